"""`retrofit verify`: its numbers are those of a plain computation, it says what does not fit, it can be interrupted."""

import json

import pytest
import torch
from rich.console import Console
from small_sources import make_source
from transformers import AutoModelForCausalLM, AutoTokenizer

from conversion import RetrofitError, RetrofitOptions, VerifyOptions, convert, verification, verify
from conversion.verification import BYTES, FULL, ROWS, TARGET, WINDOW, print_report, windowed
from kvm_hf import KVMCache

RETROFIT = RetrofitOptions(chunk_size=4, window_chunks=2, sinks=2, growth=2.0)
OPTIONS = VerifyOptions(tokens=60, pieces=2, needles=2, needle_tokens=(150,), dtype="float64", device="cpu")


@pytest.fixture
def pair(tmp_path):
    source = make_source(tmp_path / "source")
    convert(source, tmp_path / "target", RETROFIT)
    text = tmp_path / "text.txt"
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(26, (400,), generator=generator)
    text.write_text("".join("abcdefghijklmnopqrstuvwxyz"[i] for i in letters))
    return source, tmp_path / "target", text


def test_the_numbers_are_those_of_a_plain_computation(pair):
    source, target, text = pair
    report = verify(source, target, OPTIONS, text=text)
    tokenizer = AutoTokenizer.from_pretrained(source)
    ids = torch.tensor(tokenizer(text.read_text()).input_ids)
    pieces = torch.stack([ids[:60], ids[340:]])
    losses = {}
    for name, folder in ((FULL, source), (TARGET, target)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        with torch.no_grad():
            logits = model(pieces, use_cache=False).logits
        losses[name] = torch.nn.functional.cross_entropy(
            logits[:, :-1].transpose(1, 2).double(), pieces[:, 1:], reduction="none"
        )
        assert report["loss"]["beyond"][name] == pytest.approx(losses[name][:, 15:].mean().item(), abs=1e-5)
        assert report["loss"]["by_block"][name][0] == pytest.approx(losses[name][:, :7].mean().item(), abs=1e-5)
    assert report["loss"]["blocks"] == [[0, 8], [8, 16], [16, 32], [32, 60]]
    assert report["window_exactness"] <= 1e-5
    closed = report["loss"]["gap_closed"]
    assert closed[FULL] == 1 and closed[WINDOW] == 0
    assert list(report["loss"]["by_block"]) == [FULL, WINDOW, ROWS, BYTES, TARGET]
    assert len(report["needles"]["150"][TARGET]) == 2
    assert report == json.loads((target / "verify.json").read_text())
    assert (target / "verify.png").stat().st_size > 10_000
    assert not (target / "verify.partial.json").exists()


def test_bytes_are_those_of_the_caches(pair):
    source, target, text = pair
    report = verify(source, target, VerifyOptions(60, 1, 0, device="cpu"), text=text)
    model = AutoModelForCausalLM.from_pretrained(target)
    cache = KVMCache(model.config)
    with torch.no_grad():
        model(torch.zeros(1, 60, dtype=torch.long), past_key_values=cache)
    measured = report["cache_bytes"]["measured"]
    assert measured[TARGET] == cache.nbytes
    assert measured[FULL] == 3 * 2 * 2 * 8 * 60 * 4  # layers, keys and values, heads, head dim, tokens, float32
    row = 2 * 2 * 8 * 4
    assert report["windows"][BYTES] == cache.nbytes // 3 // row - 2
    assert report["windows"][ROWS] == 8 + cache.layers[0].state.rows - 2


def test_the_window_baseline_sees_sinks_and_window_and_no_more(pair):
    source, _, _ = pair
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64, attn_implementation="sdpa")
    ids = torch.randint(4, 40, (1, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), windowed(model, [0, 1, 2], size=4, sinks=1):
        logits = model(ids).logits[0, -1]
        one_layer_reach = 1 + 3 * 3  # three layers pass information on by three tokens each, and one more for the last
        for position in range(30):
            other = ids.clone()
            other[0, position] = (other[0, position] + 1) % 40
            moved = (model(other).logits[0, -1] - logits).abs().max()
            assert (moved > 1e-9) == (position == 0 or position >= 30 - one_layer_reach), position
        step = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
        for _ in range(3):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
            if ids[0, -1] in (2, 3):
                break
    assert torch.equal(step, ids)
    with torch.no_grad():
        assert (model(ids[:, :30]).logits[0, -1] - logits).abs().max() > 1e-6  # the hooks are gone


def test_passkeys_at_one_depth_are_measured_one_by_one(pair, monkeypatch):
    """Many keys on little room share depths after rounding; each has its own prompt and its own result."""
    source, target, text = pair
    asked = []
    monkeypatch.setattr(
        verification, "_recalls", lambda model, tokenizer, ids, key: asked.append(key) or len(asked) % 2
    )
    options = VerifyOptions(tokens=60, needles=60, needle_tokens=(150,), device="cpu")
    report = verify(source, target, options, text=text)
    assert len(set(report["needles"]["150"]["depths"])) < 60
    assert len(asked) == 3 * 60


def test_an_interrupted_run_goes_on_where_it_was(pair, monkeypatch):
    source, target, text = pair
    expected = verify(source, target, OPTIONS, text=text)
    calls = []
    honest = verification._token_losses

    def breaks_on_the_fifth(model, ids):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return honest(model, ids)

    monkeypatch.setattr(verification, "_token_losses", breaks_on_the_fifth)
    with pytest.raises(KeyboardInterrupt):
        verify(source, target, OPTIONS, text=text)
    assert verify(source, target, OPTIONS, text=text) == expected
    assert len(calls) == 5 + 6  # ten in all; four were kept


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (VerifyOptions(tokens=5000), "401 tokens|400 tokens|tokens; 5000"),
        (VerifyOptions(tokens=16, needles=0), "does not reach beyond"),
        (VerifyOptions(tokens=60, needle_tokens=(20,)), "leaves nothing beyond"),
        (VerifyOptions(tokens=60, dtype="int3"), "int3"),
        (VerifyOptions(tokens=60, needles=0, device="foo"), "foo"),
        (VerifyOptions(tokens=60, needles=0, device="meta"), "meta"),
        (VerifyOptions(tokens=60, pieces=0), "pieces"),
        (VerifyOptions(tokens=60, needles=-1), "needles"),
    ],
    ids=str,
)
def test_what_cannot_be_measured_is_said_before_loading_models(pair, monkeypatch, options, words):
    source, target, text = pair
    monkeypatch.setattr(
        "transformers.AutoModelForCausalLM.from_pretrained", lambda *args, **kwargs: pytest.fail("a model was loaded")
    )
    with pytest.raises(RetrofitError, match=words):
        verify(source, target, options, text=text)


def test_a_damaged_journal_is_ignored(pair):
    source, target, text = pair
    (target / "verify.partial.json").write_text("")
    verify(source, target, VerifyOptions(60, 1, 0, device="cpu"), text=text)


def test_a_source_without_tokenizer_and_an_output_that_is_a_file_are_said(pair, tmp_path):
    source, target, text = pair
    with pytest.raises(RetrofitError, match="is a file"):
        verify(source, target, OPTIONS, text=text, output=text)
    for path in source.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(RetrofitError, match="no tokenizer"):
        verify(source, target, OPTIONS, text=text)


def test_a_target_of_another_source_stands_out(pair, capsys):
    source, target, text = pair
    report = verify(source, target, VerifyOptions(60, 1, 0, device="cpu"), text=text)
    print_report(report, Console())
    assert "far more than rounding" not in capsys.readouterr().out
    print_report(report | {"window_exactness": 8.0}, Console())
    assert "far more than rounding" in capsys.readouterr().out


def test_models_that_do_not_belong_together_are_refused(pair, tmp_path):
    source, target, text = pair
    with pytest.raises(RetrofitError, match="not a KVM model"):
        verify(source, source, OPTIONS, text=text)
    other = make_source(tmp_path / "other", num_hidden_layers=2)
    with pytest.raises(RetrofitError, match="not made from"):
        verify(other, target, OPTIONS, text=text)
    with pytest.raises(RetrofitError, match="not a model folder"):
        verify(source, tmp_path / "nowhere", OPTIONS, text=text)


@pytest.mark.parametrize("kind", ["missing", "binary", "empty"])
def test_a_text_that_cannot_be_read_is_said(pair, kind):
    source, target, text = pair
    if kind == "missing":
        text.unlink()
    else:
        text.write_bytes(b"\xff\xfe\x00" if kind == "binary" else b"")
    with pytest.raises(RetrofitError, match="text"):
        verify(source, target, OPTIONS, text=text)


def test_numbers_of_another_build_of_the_target_are_not_reused(pair, monkeypatch):
    source, target, text = pair
    honest = verification._recalls
    monkeypatch.setattr(verification, "_recalls", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        verify(source, target, OPTIONS, text=text)
    monkeypatch.setattr(verification, "_recalls", honest)
    weights = target / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    calls = []
    losses = verification._token_losses
    monkeypatch.setattr(verification, "_token_losses", lambda *args: calls.append(1) or losses(*args))
    verify(source, target, OPTIONS, text=text)
    assert len(calls) == 10

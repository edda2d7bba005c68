"""`python -m benchmarks`: what it compares is what it says, and it reports what it measured."""

import json
import time
from concurrent.futures.process import BrokenProcessPool
from itertools import count
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from benchmarks import __main__ as speed
from benchmarks import folding, measuring, models, tasks

TINY = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    for size in models.SIZES:
        monkeypatch.setitem(models.SIZES, size, TINY)
    monkeypatch.setattr(models, "WINDOW", 16)
    # A process of its own is for the sake of its memory alone.
    monkeypatch.setattr(speed, "in_own_process", lambda function, *args: function(*args))


def run(command, folder, *arguments):
    result = CliRunner().invoke(speed.app, [command, "--output", str(folder), *arguments])
    assert result.exit_code == 0, result.output
    assert (folder / f"{command}.png").stat().st_size > 5_000
    return json.loads((folder / f"{command}.json").read_text())


def chosen(*names):
    return [part for name in names for part in ("--model", name)]


def test_every_model_has_the_size_that_was_asked_for_and_runs():
    with torch.no_grad():
        for name in models.MODELS:
            model = models.make_model(name, TINY, "cpu")
            assert (model.config.hidden_size, model.config.num_hidden_layers) == (32, 2)
            cache = tasks.read(model, models.prompt(TINY, 40, "cpu"))
            tasks.step(model, cache, models.prompt(TINY, 1, "cpu"))


def test_at_the_floor_a_token_sees_itself_alone():
    model = models.make_model("floor", TINY, "cpu")
    ids = models.prompt(TINY, 9, "cpu")
    with torch.no_grad():
        alone = torch.cat([model(ids[:, i : i + 1]).logits for i in range(9)], dim=1)
        # float32, matrices of other shapes
        torch.testing.assert_close(model(ids).logits, alone, atol=1e-5, rtol=1e-5)


def test_prefill_reports_each_model_beside_llama_and_the_floor(tmp_path):
    names = ["llama", "floor", "kvm-sqrt"]
    found = run("prefill", tmp_path, *chosen(*names), "--tokens", "20", "--tokens", "40", "--rounds", "2")
    assert [(row["model"], row["tokens"]) for row in found["rows"]] == [(n, t) for t in (20, 40) for n in names]
    by_place = {(row["model"], row["tokens"]): row for row in found["rows"]}
    for (name, tokens), row in by_place.items():
        assert 0 < row["seconds"]["least"] <= row["seconds"]["median"] <= row["seconds"]["most"]
        assert row["per_token"] == pytest.approx(row["seconds"]["median"] / tokens)
        for other in ("llama", "floor"):
            if name != other:
                assert row[f"over_{other}"] == pytest.approx(row["per_token"] / by_place[other, tokens]["per_token"])
    assert found["machine"]["torch"] == torch.__version__


def test_decoding_counts_borders_and_attention_of_kvm_models_and_compares_ragged_batches(tmp_path):
    found = run("decode", tmp_path, *chosen("llama", "kvm-fixed"), "--tokens", "32", "--tokens", "512", "--rounds", "1")
    *_, llama, kvm = found["rows"]
    assert min(kvm["attention_over_one_sdpa_call"], kvm["attention_and_write_over_one_sdpa_call"]) > 0
    assert -1 < kvm["share_of_chunk_borders"] < 1
    assert "share_of_chunk_borders" not in llama
    (ragged,) = found["ragged"]
    assert ragged["model"] == "kvm-fixed" and ragged["ragged_over_uniform"] > 0
    assert ragged["lengths"] == [8 * row for row in range(1, 9)]  # up to an eighth of the longest context


def test_the_call_that_attention_is_compared_with_is_not_part_of_a_step(tmp_path, monkeypatch):
    def slow(*args):
        time.sleep(0.05)

    monkeypatch.setattr(speed, "F", SimpleNamespace(pad=F.pad, scaled_dot_product_attention=slow))
    found = run("decode", tmp_path, *chosen("kvm-fixed"), "--tokens", "40", "--rounds", "1")
    (row,) = found["rows"]
    assert row["seconds"]["median"] < 0.05  # two layers would wait 0.1
    assert row["attention_over_one_sdpa_call"] < 1


def test_the_cache_is_as_large_as_the_formula_says(tmp_path):
    names = ["llama", "kvm-fixed", "kvm-sqrt", "kvm-hybrid", "maglev-fixed-point"]
    found = run("memory", tmp_path, *chosen(*names), "--tokens", "50")
    for row in found["rows"]:
        assert row["cache_bytes"] > 0
        if row["model"].startswith("kvm"):
            assert row["cache_bytes"] == row["cache_bytes_by_formula"]
    assert found["rows"][0]["cache_bytes"] == 2 * 2 * 50 * 32 * 4  # layers, keys and values, tokens, channels, float32


def test_training_reports_time_and_memory_and_leaves_maglev_out(tmp_path):
    found = run(
        "train", tmp_path, *chosen("llama", "kvm-fixed", "maglev-sequential"), "--tokens", "40", "--rounds", "1"
    )
    assert [row["model"] for row in found["rows"]] == ["llama", "kvm-fixed"]
    assert all(row["seconds"]["median"] > 0 for row in found["rows"])


def test_a_process_without_enough_memory_costs_its_own_number_alone(tmp_path, monkeypatch):
    def killed_for_kvm(function, name, *args):
        if name == "kvm-fixed":
            raise BrokenProcessPool("A process was terminated abruptly")
        return function(name, *args)

    monkeypatch.setattr(speed, "in_own_process", killed_for_kvm)
    models = chosen("llama", "kvm-fixed", "kvm-sqrt")
    train = run("train", tmp_path, *models, "--tokens", "40", "--rounds", "1")
    assert [(row["model"], row["added_bytes"] is None) for row in train["rows"]] == [
        ("llama", False),
        ("kvm-fixed", True),
        ("kvm-sqrt", False),
    ]
    assert all(row["seconds"]["median"] > 0 for row in train["rows"])
    memory = run("memory", tmp_path, *models, "--tokens", "40")
    assert [row["model"] for row in memory["rows"]] == ["llama", "kvm-sqrt"]
    result = CliRunner().invoke(speed.app, ["memory", *chosen("kvm-fixed"), "--tokens", "40"])
    assert result.exit_code == 1 and "could not be measured" in result.output


def test_folded_chunks_give_what_chunk_by_chunk_gives(tmp_path):
    for state in (0, 7):
        chunks = folding.make_chunks(3, state, heads=2, dim=8, dtype=torch.float64, device="cpu")
        torch.testing.assert_close(folding.folded(*chunks), folding.per_chunk(*chunks), atol=1e-9, rtol=0)
    result = CliRunner().invoke(speed.app, ["folding", "--rounds", "1", "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "folding.json").read_text())["rows"]
    assert [(row["chunks"], row["state"]) for row in rows] == [(4, 256), (4, 1024), (16, 256), (16, 1024)]
    assert all(row[name]["median"] > 0 for row in rows for name in ("per_chunk", "folded", "folded_without_copies"))


def test_a_profile_says_where_the_time_goes(tmp_path):
    found = run("profile", tmp_path, "--tokens", "400")  # as long as all tokens found rows, none is looked up
    assert list(found["seconds"]) == ["floor", "llama", "kvm-fixed", "kvm-sqrt"]
    for name, kinds in found["seconds"].items():
        assert kinds["linear layers"] > 0 and (kinds["attention"] > 0) == (name != "floor")
        assert (kinds["looking up rows"] > 0) == name.startswith("kvm")


def test_a_profile_may_be_that_of_a_training_step(tmp_path, monkeypatch):
    steps = []
    monkeypatch.setattr(speed, "train_step", lambda *args: steps.append(tasks.train_step(*args)))
    result = CliRunner().invoke(
        speed.app,
        ["profile", "--training", *chosen("floor", "kvm-sqrt"), "--tokens", "400", "--output", str(tmp_path)],
    )
    assert result.exit_code == 0, result.output
    assert len(steps) == 4  # of each model, one to warm up
    found = json.loads((tmp_path / "profile-training.json").read_text())["seconds"]
    assert found["floor"]["attention"] == 0 < found["kvm-sqrt"]["attention"]
    assert (tmp_path / "profile-training.png").stat().st_size > 5_000


def test_training_may_be_measured_with_fewer_layers(tmp_path):
    found = run("train", tmp_path, *chosen("llama"), "--tokens", "20", "--rounds", "1", "--layers", "3")
    assert found["size"]["num_hidden_layers"] == 3


def test_what_is_compared_takes_turns_and_the_first_round_does_not_count():
    clock, order = count(), []

    def one(name):
        order.append(name)
        return next(clock)

    taken = measuring.interleaved({name: lambda name=name: one(name) for name in "ab"}, 2, "")
    assert order == list("ababab")
    assert taken == {"a": [2, 4], "b": [3, 5]}


def test_memory_in_a_process_of_its_own_sees_what_a_call_needs():
    added = measuring.in_own_process(_needs_much)
    assert 90 << 20 < added < 200 << 20


def _needs_much():
    torch.zeros(1)
    return measuring.added_memory(lambda: torch.ones(100 << 18).sum(), "cpu")  # 100 MiB


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "gpt"], "known are"),
        (["--tokens", "1"], "must be 2 or more"),
        (["--device", "gpu"], "gpu"),
        (["--device", "meta"], "meta"),
        (["--output", __file__], "is a file"),
        (["--output", f"{__file__}/x"], "cannot be made"),
        (["--model", "maglev-sequential", "--tokens", "2048"], "leave nothing"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, message):
    result = CliRunner().invoke(speed.app, ["prefill", *arguments], env={"COLUMNS": "400"})
    assert result.exit_code == 2 and message in result.output


def test_a_choice_of_which_nothing_is_left_does_not_mean_all():
    for arguments in (["train", "--model", "maglev-sequential"], ["memory", "--model", "floor"]):
        result = CliRunner().invoke(speed.app, arguments)
        assert result.exit_code == 2 and "leave nothing" in result.output

"""`retrofit to-maglev`: at first the decoder is the source with a sliding window, and the prefiller the source itself."""

import json
import os

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from small_sources import FAMILIES, change_config, make_source
from transformers import AutoModelForCausalLM, AutoModelForPreTraining, MistralConfig, MistralForCausalLM
from typer.testing import CliRunner

from conversion import MaglevOptions, RetrofitError, RetrofitOptions, convert
from conversion.cli import app
from conversion.execute import PLAN_FILE
from conversion.families import FAMILIES as TABLES
from conversion.verification import windowed
from maglev_hf import MaglevCache, MaglevForCausalLM, MaglevForPreTraining

W = 6  # the window that the sliding layers of "qwen2-sliding" have
OPTIONS = MaglevOptions(window=W)
SHARED = MaglevOptions(window=W, share_prefiller=True)
WITH_ROPE = {"smollm3": dict(no_rope_layers=[1, 1, 1])}
# The sources compute their norms in float32 even in float64 models.
CLOSE = 1e-5


def make_accepted(folder, family):
    return make_source(folder, family, **WITH_ROPE.get(family, {}))


def random_ids(rows=2, tokens=5 * W):
    return torch.randint(4, 40, (rows, tokens), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def windowed_logits(source, ids, layers=(0, 1, 2)):
    """Of the source, whose `layers` see `W` tokens, by hooks on the masks of its own class."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64, attn_implementation="sdpa")
    with windowed(model, layers, size=W, sinks=0):
        return model(ids, use_cache=False).logits


@torch.no_grad()
def targets(folder, ids):
    model = AutoModelForPreTraining.from_pretrained(folder, dtype=torch.float64)
    return model.model(ids, rollout="teacher_forced", prefiller=model.prefiller).target


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"qwen3"}))
def test_the_decoder_is_the_source_with_a_window_and_the_prefiller_is_the_source(tmp_path, family):
    source = make_accepted(tmp_path / "source", family)
    convert(source, tmp_path / "target", OPTIONS)
    ids = random_ids()
    full = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64)
    with torch.no_grad():
        state, logits = full.base_model(ids, use_cache=False).last_hidden_state, full(ids, use_cache=False).logits
    expected = windowed_logits(source, ids)
    assert (expected - logits)[:, W:].abs().max() > 1e-3
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float64)
    plain = MaglevForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float64, memory_injection="none")
    with torch.no_grad():
        without_memory = plain(ids).logits
        assert (without_memory - expected).abs().max() <= CLOSE * expected.abs().max()
        for rollout in ("sequential", "fixed_point"):
            # What is left is the order of sums: one token at a time, or in blocks.
            assert (model(ids, rollout=rollout).logits - without_memory).abs().max() <= 1e-12 * expected.abs().max()
    assert (targets(tmp_path / "target", ids) - state).abs().max() <= CLOSE * state.abs().max()


def test_every_accepted_family_is_tested():
    assert {settings["model_type"] for settings in FAMILIES.values()} == set(TABLES)


@pytest.mark.parametrize("options", [OPTIONS, SHARED], ids=["separate", "shared"])
def test_the_decoder_is_what_transformers_makes_of_the_weights_with_a_sliding_window(source, tmp_path, options):
    convert(source, tmp_path / "target", options)
    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64)
    settings = original.config.to_dict() | {"sliding_window": W, "model_type": "mistral"}
    reference = MistralForCausalLM(MistralConfig(**settings)).to(torch.float64).eval()
    reference.load_state_dict(original.state_dict())
    reference.generation_config = original.generation_config
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float64)
    ids = random_ids()
    with torch.no_grad():
        expected = reference(ids, use_cache=False).logits
        assert (model(ids).logits - expected).abs().max() <= CLOSE * expected.abs().max()
        generation = dict(attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0)
        assert torch.equal(model.generate(ids, **generation), reference.generate(ids, **generation))


def test_a_shared_prefiller_is_the_decoder_with_full_attention_in_every_other_layer(source, tmp_path):
    plan = convert(source, tmp_path / "target", SHARED)
    assert plan.config.prefiller_layer_types == ["sliding_attention", "full_attention", "sliding_attention"]
    assert not plan.config.detach_memory and not plan.config.detach_target and plan.config.consistency_weight == 0.1
    model = AutoModelForPreTraining.from_pretrained(tmp_path / "target", dtype=torch.float64)
    assert not any(name.startswith("prefiller") for name in model.state_dict())
    ids = random_ids()
    expected = windowed_logits(source, ids, layers=(0, 2))
    with torch.no_grad():
        actual = model.lm_head(targets(tmp_path / "target", ids))
    assert (actual - expected).abs().max() <= CLOSE * expected.abs().max()


@pytest.mark.parametrize("options", [OPTIONS, SHARED], ids=["separate", "shared"])
def test_layers_of_the_source_that_slide_do_so_in_the_prefiller(tmp_path, options):
    source = make_source(tmp_path / "source", "qwen2-sliding")
    config = convert(source, tmp_path / "target", options).config
    assert config.prefiller_layer_types == ["full_attention", "sliding_attention", "sliding_attention"]
    assert config.layer_types == ["sliding_attention"] * 3
    full = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64)
    with torch.no_grad():
        state = full.base_model(random_ids(), use_cache=False).last_hidden_state
    assert (targets(tmp_path / "target", random_ids()) - state).abs().max() <= CLOSE * state.abs().max()


def test_a_source_that_slides_everywhere_is_taken_and_said_to_teach_little(tmp_path):
    source = make_source(tmp_path / "source", "mistral", sliding_window=W)
    plan = convert(source, tmp_path / "target", OPTIONS, dry_run=True)
    assert plan.config.prefiller_layer_types == ["sliding_attention"] * 3
    assert any("little that it can teach" in line for line in plan.summary)


def test_new_parameters_begin_as_they_should_and_every_other_one_is_the_sources(tmp_path):
    source = make_source(tmp_path / "source", "qwen2")
    convert(source, tmp_path / "target", OPTIONS)
    written, original = load_file(tmp_path / "target" / "model.safetensors"), load_file(source / "model.safetensors")
    for name, tensor in written.items():
        if name.endswith("memory.k_proj.weight"):
            assert torch.equal(tensor, original[name.replace("memory.", "")]), name
        elif ".memory." in name or name.endswith("o_proj.bias"):
            assert not tensor.any(), name
        else:
            assert torch.equal(tensor, original[name.replace("prefiller.", "model.")]), name
    new = {name.split(".memory.")[1] for name in written if ".memory." in name}
    assert new == {f"{part}.weight" for part in ("k_proj", "v_proj", "k_norm", "local_gate", "memory_gate")}
    assert set(MaglevForPreTraining.from_pretrained(tmp_path / "target").state_dict()) == set(written)


def test_training_reaches_every_memory_parameter_and_no_weight_of_the_frozen_prefiller(source, tmp_path):
    convert(source, tmp_path / "target", OPTIONS)
    model = MaglevForPreTraining.from_pretrained(tmp_path / "target").train()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen == [name for name in before if name.startswith("prefiller.")] and frozen

    optimizer = torch.optim.SGD([part for part in model.parameters() if part.requires_grad], lr=0.1)
    moved = []
    for _ in range(2):
        loss = model(random_ids(), labels=random_ids()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        moved.append({name for name, part in model.named_parameters() if not torch.equal(part, before[name])})
    memory = {name for name in before if ".memory." in name}
    at_once = {name for name in memory if any(part in name for part in ("v_proj", "k_norm", "local_gate"))}
    assert memory & moved[0] == at_once
    assert memory <= moved[1]  # keys move once they have a weight, the gate once there is something to let through
    assert not moved[1] & set(frozen)


def test_the_trained_decoder_can_be_exported(source, tmp_path):
    convert(source, tmp_path / "target", OPTIONS)
    MaglevForPreTraining.from_pretrained(tmp_path / "target").export_decoder(tmp_path / "deployed")
    names = set(load_file(tmp_path / "deployed" / "model.safetensors"))
    assert not any(name.startswith("prefiller") for name in names)
    ids = random_ids()
    with torch.no_grad():
        expected, actual = (
            AutoModelForCausalLM.from_pretrained(tmp_path / folder)(ids).logits for folder in ("target", "deployed")
        )
    assert torch.equal(expected, actual)


def test_the_cache_in_the_plan_is_the_cache_of_the_model(source, tmp_path):
    plan = convert(source, tmp_path / "target", OPTIONS)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    for tokens in (3, 40):
        cache = MaglevCache(model.config)
        with torch.no_grad():
            model(random_ids(1, tokens), past_key_values=cache)
        assert cache.nbytes == plan.cache_bytes(tokens)
    assert plan.cache_bytes(40) == plan.cache_bytes(10**6) == 4 * (3 * (W - 1) * 2 * 2 * 8 + 32)


def test_an_interrupted_run_goes_on_and_makes_what_a_clean_run_makes(tmp_path):
    source = make_source(tmp_path / "source", "phi3", shard_size="20KB")  # one of its tensors becomes several
    options = MaglevOptions(window=W, shard_size=20_000)

    def interrupted(count, written=[0]):  # noqa: B006
        written[0] += count
        if written[0] > 60_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "target", options, on_bytes=interrupted)
    finished = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "target.incomplete").glob("*.safetensors")}
    assert finished and not (tmp_path / "target").exists()
    convert(source, tmp_path / "target", options)
    convert(source, tmp_path / "clean", options)
    for path in (tmp_path / "clean").iterdir():
        if path.name != "README.md":
            assert (tmp_path / "target" / path.name).read_bytes() == path.read_bytes(), path.name
    assert finished == {name: (tmp_path / "target" / name).stat().st_mtime_ns for name in finished}
    assert len(list((tmp_path / "clean").glob("*.safetensors"))) > 3
    MaglevForPreTraining.from_pretrained(tmp_path / "target")


def test_a_started_kvm_model_is_not_mixed_in(source, tmp_path):
    def interrupted(count):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "target", RetrofitOptions(), on_bytes=interrupted)
    convert(source, tmp_path / "target", OPTIONS)
    assert not (tmp_path / "target" / PLAN_FILE).exists()
    assert not list((tmp_path / "target").glob("*_kvm.py"))
    MaglevForPreTraining.from_pretrained(tmp_path / "target")


def test_files_of_the_source_survive_and_the_config_says_what_it_is(source, tmp_path):
    convert(source, tmp_path / "target", MaglevOptions(window=W, consistency_weight=0.5))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "LICENSE"):
        assert (tmp_path / "target" / name).read_bytes() == (source / name).read_bytes(), name
    code = {path.name for path in (tmp_path / "target").glob("*.py")}
    parts = ("configuration", "inputs", "modeling", "cache", "layer", "padding", "parallel", "rollout")
    assert code == {f"{part}_maglev.py" for part in parts}
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    original = json.loads((source / "config.json").read_text())
    assert config["architectures"] == ["MaglevForPreTraining"]
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_maglev.MaglevForCausalLM"
    assert (config["sliding_window"], config["consistency_weight"]) == (W, 0.5)
    for name in ("rope_parameters", "rms_norm_eps", "eos_token_id", "tie_word_embeddings", "max_position_embeddings"):
        assert config[name] == original[name], name


def test_the_card_says_that_it_must_be_trained_and_how(source, tmp_path):
    convert(source, tmp_path / "target", OPTIONS, command="retrofit to-maglev source target --window 6")
    card = ModelCard.load(tmp_path / "target" / "README.md")
    assert card.data.license == "apache-2.0" and "maglev" in card.data.tags and "kvm" not in card.data.tags
    text = card.text.replace("\n", " ")
    for words in (
        "**not trained yet**",
        "the source with a sliding window of 6 tokens",
        "callbacks=[GrowingSweeps(",
        "export_decoder",
        "retrofit to-maglev source target --window 6",
        "full attention in layers 0-2",
        "3 layers of 5 keys and values, and one memory of 32 numbers",
        "Not measured",
    ):
        assert words in text, words
    assert "{{" not in text and str(tmp_path) not in text


def test_a_tied_model_with_a_head_of_its_own_keeps_both(tmp_path):
    source = make_source(tmp_path / "source", tie_word_embeddings=True)
    weights = load_file(source / "model.safetensors")
    head = torch.randn(44, 32)
    save_file(weights | {"lm_head.weight": head}, source / "model.safetensors", metadata={"format": "pt"})
    convert(source, tmp_path / "target", OPTIONS)
    assert torch.equal(MaglevForPreTraining.from_pretrained(tmp_path / "target").lm_head.weight, head)


def test_weights_are_cast_when_asked(source, tmp_path):
    convert(source, tmp_path / "target", MaglevOptions(window=W, dtype="bfloat16"))
    written = load_file(tmp_path / "target" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert AutoModelForPreTraining.from_pretrained(tmp_path / "target", dtype="auto").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("family", "fields", "options", "words"),
    [
        ("qwen3", {}, {}, "qwen3 model cannot become.*norms of queries and keys"),
        ("smollm3", {}, {}, r"smollm3 model cannot become.*without RoPE \(`no_rope_layers` names \[1\]"),
        ("mistral", dict(sliding_window=8), {}, "window of 8, not 6.*`--window 8`"),
        ("qwen2-sliding", dict(sliding_window=9), dict(share_prefiller=True), "window of 9, not 6"),
        ("phi3", dict(resid_pdrop=0.1), {}, "resid_pdrop"),
        ("llama", dict(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), {}, "RoPE type"),
        ("llama", {}, dict(window=1), "`--window 1` cannot be; give 2 to 1024"),
        ("llama", {}, dict(window=1025), "`--window 1025` cannot be"),
        ("llama", {}, dict(consistency_weight=-1.0), "consistency_weight"),
        ("llama", {}, dict(dtype="int8"), "--dtype int8"),
        ("llama", {}, dict(shard_size=0), "--shard-size"),
        ("llama", dict(num_hidden_layers=2), {}, None),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name_before_any_weight_is_read(
    tmp_path, monkeypatch, family, fields, options, words
):
    monkeypatch.setattr("conversion.source.Source.read", lambda *args: pytest.fail("a weight was read"))
    source = make_source(tmp_path / "source", family, **fields)
    if words is None:
        change_config(source, num_hidden_layers=1)
        words = "tensors of the source have no place in the target"
    with pytest.raises(RetrofitError, match=words):
        convert(source, tmp_path / "target", MaglevOptions(**{"window": W, **options}))
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("kind", ["kvm", "maglev", "gemma2"])
def test_other_families_are_refused_by_name(source, tmp_path, kind):
    change_config(source, model_type=kind, architectures=None)
    with pytest.raises(RetrofitError, match=f"'{kind}' cannot be converted"):
        convert(source, tmp_path / "target", OPTIONS)


def test_a_dry_run_by_command_prints_the_plan_and_writes_nothing(source, tmp_path):
    arguments = ["to-maglev", str(source), str(tmp_path / "target"), "--dry-run", "--window", "6"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    for words in (
        "becomes a Maglev model to train",
        "the source's 3 layers, all with a sliding window of 6 tokens",
        "the source once more, frozen, with full attention in layers 0-2",
        "New parameters: 6168 (k_norm, k_proj, local_gate, memory_gate, v_proj)",
        "3 layers of 5 keys and values, and one memory of 32 numbers",
        "Weights: 0.000 GB in 1 file(s)",
        "128k",
        "tokenizer.json",
    ):
        assert words in result.output, words
    assert os.listdir(tmp_path) == ["source"]


def test_a_conversion_by_command(source, tmp_path):
    arguments = [str(source), str(tmp_path / "target"), "-q", "--share-prefiller", "--consistency-weight", "0.2"]
    result = CliRunner().invoke(app, ["to-maglev", *arguments])
    assert (result.exit_code, result.output) == (0, "")
    config = AutoModelForPreTraining.from_pretrained(tmp_path / "target").config
    assert (config.sliding_window, config.share_prefiller, config.consistency_weight) == (512, True, 0.2)

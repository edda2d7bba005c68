"""Every family: the converted model is the source within the window, and throughout where no layer is converted."""

import pytest
import torch
from small_sources import FAMILIES, change_config, make_source
from transformers import AutoModelForCausalLM

from conversion import RetrofitError, RetrofitOptions, convert
from conversion.families import FAMILIES as TABLES
from conversion.families import REFUSED

OPTIONS = RetrofitOptions(chunk_size=4, window_chunks=2, sinks=1, growth=2.0)
L = 8


def logits(folder, ids, dtype=torch.float64):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        return model(ids, use_cache=False).logits, model


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_window_equals_the_source_and_later_tokens_do_not(tmp_path, family):
    source = make_source(tmp_path / "source", family)
    convert(source, tmp_path / "target", OPTIONS)
    ids = torch.randint(4, 40, (2, 5 * L), generator=torch.Generator().manual_seed(0))
    expected, _ = logits(source, ids)
    actual, model = logits(tmp_path / "target", ids)
    difference = (expected - actual).abs().amax(dim=(0, 2))
    assert model.config.model_type == "kvm"
    # 1e-5: the sources compute their norms in float32 even in float64 models
    assert difference[:L].max() <= 1e-5 * expected.abs().max()
    assert difference[L:].max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_with_a_row_for_every_token_the_source_is_reproduced_throughout(tmp_path, family):
    """No merging: what is left is the mapping of tensors and settings, and turning keys back and forth."""
    source = make_source(tmp_path / "source", family)
    convert(
        source,
        tmp_path / "target",
        RetrofitOptions(chunk_size=4, window_chunks=2, sinks=1, budget="fixed", state_size=900),
    )
    ids = torch.randint(4, 40, (1, 5 * L + 3), generator=torch.Generator().manual_seed(0))
    expected, _ = logits(source, ids)
    actual, _ = logits(tmp_path / "target", ids)
    assert (expected - actual).abs().max() <= 1e-5 * expected.abs().max()


def test_every_accepted_family_is_tested():
    assert {settings["model_type"] for settings in FAMILIES.values()} == set(TABLES)


@pytest.mark.parametrize("kind", sorted(set(REFUSED) - {"kvm"}) + ["bert"])
def test_other_families_are_refused_by_name_with_what_is_missing(source, tmp_path, kind):
    change_config(source, model_type=kind, architectures=None)
    with pytest.raises(RetrofitError, match=f"{kind}' cannot be converted. Missing"):
        convert(source, tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(architectures=["LlamaForSequenceClassification"]), "not a causal language model"),
        (dict(quantization_config={"quant_method": "awq", "bits": 4}), "quantized weights"),
        (dict(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "constant frequencies"),
        (dict(num_hidden_layers=4), "no tensor"),
        (dict(num_hidden_layers=2), "no place in the target"),
        (dict(intermediate_size=64), "shape"),
    ],
    ids=str,
)
def test_what_cannot_be_said_exactly_is_refused(source, tmp_path, fields, words):
    change_config(source, **fields)
    with pytest.raises(RetrofitError, match=words):
        convert(source, tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("where", ["rope_parameters", "top level"])
def test_a_partial_rotary_factor_is_heeded_only_where_the_source_heeds_it(source, tmp_path, where):
    """transformers' Llama rotates every channel whatever its config says of `partial_rotary_factor`."""
    factor = {"partial_rotary_factor": 0.5}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    change_config(source, **({"rope_parameters": rope | factor} if where == "rope_parameters" else factor))
    convert(source, tmp_path / "target", OPTIONS)
    ids = torch.randint(4, 40, (1, L), generator=torch.Generator().manual_seed(0))
    assert (logits(source, ids)[0] - logits(tmp_path / "target", ids)[0]).abs().max() <= 1e-4


def test_dropout_that_we_do_not_have_is_refused(tmp_path):
    source = make_source(tmp_path / "source", "phi3", resid_pdrop=0.1)
    with pytest.raises(RetrofitError, match="resid_pdrop"):
        convert(source, tmp_path / "target")


def test_sliding_layers_of_the_source_stay_unless_named(tmp_path):
    source = make_source(tmp_path / "source", "qwen2-sliding")
    kinds = convert(source, tmp_path / "a", OPTIONS, dry_run=True).config.layer_types
    assert kinds == ["kvm_attention", "sliding_attention", "sliding_attention"]
    named = RetrofitOptions(layers="0-2", chunk_size=4, window_chunks=2, sinks=1)
    assert convert(source, tmp_path / "a", named, dry_run=True).config.layer_types == ["kvm_attention"] * 3
    mistral = make_source(tmp_path / "mistral", "mistral", sliding_window=6)
    with pytest.raises(RetrofitError, match="No layer of the source is full attention"):
        convert(mistral, tmp_path / "b", OPTIONS)

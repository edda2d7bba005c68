"""Checkpoints of the Key-Value Means authors: there and back bit for bit, and what is refused. That an imported model
computes what theirs does is in `tests/kvm/test_golden_gptalpha.py`."""

import json
import os
import shutil

import pytest
import torch
from remote_code.test_remote_code import in_fresh_process
from safetensors.torch import load_file, save_file
from small_models import DATA
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import conversion.paper
from conversion import RetrofitError, export_paper, import_paper
from conversion.cli import app
from conversion.execute import PLAN_FILE
from conversion.paper import Parameter, _rope_for_paper, _rope_from_paper, config_for_paper, config_from_paper
from kvm_hf import GPTAlphaConfig
from kvm_hf.modeling_kvm import KVMRotaryEmbedding, apply_rotary

GOLDEN = DATA / "kvm"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/model.safetensors"))


def fields_of(case: str, **changes) -> dict:
    return json.loads((GOLDEN / case / "config.json").read_text()) | changes


def make_checkpoint(folder, case="kvm_fixed", weights=None, **changes):
    """A checkpoint of the authors: a golden case with other config fields or weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields_of(case, **changes)))
    save_file(
        load_file(GOLDEN / case / "model.safetensors") if weights is None else weights, folder / "model.safetensors"
    )
    return folder


def assert_equal_bit_for_bit(actual: dict, expected: dict):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("case", CASES)
def test_there_and_back_by_command_is_equal_bit_for_bit(case, tmp_path):
    for arguments in (
        ["import-paper", GOLDEN / case, tmp_path / "ours"],
        ["export-paper", tmp_path / "ours", tmp_path / "back"],
    ):
        result = CliRunner().invoke(app, [*map(str, arguments), "--quiet"])
        assert result.exit_code == 0 and result.output == "", result.output
    assert_equal_bit_for_bit(
        load_file(tmp_path / "back" / "model.safetensors"), load_file(GOLDEN / case / "model.safetensors")
    )
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {name: fields_of(case)[name] for name in back} == back
    assert not list((tmp_path / "back").glob("*.py"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_tensor_keeps_its_dtype(tmp_path, dtype):
    weights = load_file(GOLDEN / "kvm_lambdas_skips" / "model.safetensors")  # has lambdas in float64
    weights = {name: tensor.to(dtype) if tensor.dtype == torch.float32 else tensor for name, tensor in weights.items()}
    import_paper(make_checkpoint(tmp_path / "theirs", "kvm_lambdas_skips", weights), tmp_path / "ours")
    assert load_file(tmp_path / "ours" / "model.safetensors")["model.layers.0.lambdas"].dtype == torch.float64
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "ours").dtype == dtype
    export_paper(tmp_path / "ours", tmp_path / "back")
    assert_equal_bit_for_bit(load_file(tmp_path / "back" / "model.safetensors"), weights)


@pytest.mark.parametrize("file", ["rwkv-final.pth", "checkpoint.pt", "pytorch_model.bin", "shards"])
def test_weights_in_other_files_give_the_same_folder(tmp_path, file):
    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(GOLDEN / "kvm_saturation_swa" / "config.json", source)
    weights = load_file(GOLDEN / "kvm_saturation_swa" / "model.safetensors")
    if file == "shards":
        names = {name: f"model-0000{i % 3 + 1}-of-00003.safetensors" for i, name in enumerate(weights)}
        for shard in set(names.values()):
            save_file({name: tensor for name, tensor in weights.items() if names[name] == shard}, source / shard)
        (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    else:
        torch.save(weights, source / file)
    import_paper(source, tmp_path / "ours")
    import_paper(GOLDEN / "kvm_saturation_swa", tmp_path / "expected")
    assert_equal_bit_for_bit(
        load_file(tmp_path / "ours" / "model.safetensors"), load_file(tmp_path / "expected" / "model.safetensors")
    )


def test_large_models_are_written_in_shards_both_ways(tmp_path, monkeypatch):
    monkeypatch.setattr(conversion.paper, "SHARD_SIZE", 40_000)
    import_paper(GOLDEN / "kvm_fixed", tmp_path / "ours")
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 2
    AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    export_paper(tmp_path / "ours", tmp_path / "back")
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    written = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert_equal_bit_for_bit(written, load_file(GOLDEN / "kvm_fixed" / "model.safetensors"))


def test_files_that_are_neither_weights_nor_code_come_along(tmp_path):
    source = make_checkpoint(tmp_path / "source")
    for name in ("README.md", "LICENSE", "tokenizer.json", "modeling_rwkv7backbone.py"):
        (source / name).write_text(name)
    import_paper(source, tmp_path / "ours")
    export_paper(tmp_path / "ours", tmp_path / "back")
    for folder in (tmp_path / "ours", tmp_path / "back"):
        assert all((folder / name).read_text() == name for name in ("README.md", "LICENSE", "tokenizer.json"))
        assert not (folder / "modeling_rwkv7backbone.py").exists() and not (folder / PLAN_FILE).exists()


def test_an_imported_folder_loads_alone_and_gives_the_same_logits(tmp_path):
    import_paper(GOLDEN / "kvm_saturation_swa", tmp_path / "ours")
    golden = load_file(GOLDEN / "kvm_saturation_swa" / "io.safetensors")
    (tmp_path / "cache").mkdir()
    result = in_fresh_process(
        f"""
        from transformers import AutoTokenizer
        folder = {str(tmp_path / "ours")!r}
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        ids = torch.tensor({golden["input_ids"].tolist()})
        with torch.no_grad():
            logits = model(ids).logits[:, {golden["logits_positions"].tolist()}]
        print(json.dumps([type(model).__module__, type(model).__name__, logits.tolist()]))
        """,
        tmp_path / "cache",
    )
    assert result[0].startswith("transformers_modules") and result[1] == "GPTAlphaForCausalLM"
    assert (torch.tensor(result[2]) - golden["logits"]).abs().max() <= 1e-5  # float32, as in test_golden_gptalpha


@pytest.mark.parametrize(("dim", "rotary"), [(16, 8), (16, 16), (128, 64)])
def test_rotated_vectors_equal_the_authors(dim, rotary):
    golden = load_file(GOLDEN / "rope.safetensors")
    tag = f"d{dim}_r{rotary}"
    parameter = Parameter("", "", (dim,), (dim,), dim, rotary)
    order = parameter.from_paper(torch.arange(dim))
    config = GPTAlphaConfig(
        hidden_size=dim,
        num_attention_heads=1,
        layer_types=["full_attention"] * 12,
        rope_parameters=_rope_from_paper({"base": 10000.0, "channels": rotary}, "base", "channels", dim),
    )
    assert config.rotary_channels_of("full_attention") == rotary
    rope = KVMRotaryEmbedding(config)
    torch.testing.assert_close(rope.inv_freq, golden[f"{tag}.freq"], rtol=1e-6, atol=0)
    cos, sin = rope(golden[f"{tag}.positions"])
    rotated = apply_rotary(golden[f"{tag}.x"][:, order], cos, sin)
    # Angles are float32: so is their resolution, which grows with the position (measured: half of this).
    tolerance = 1e-6 + 1.5e-7 * golden[f"{tag}.positions"][:, None]
    assert ((rotated - golden[f"{tag}.y"][:, order]).abs() <= tolerance).all()


@pytest.mark.parametrize("channels", [0, 2, 4, 64, 98])
@pytest.mark.parametrize("base", [10000.0, 500000.0, 1e6 / 3])
def test_the_base_of_rope_comes_back(base, channels):
    """98 channels: the factors 2/98 and 4/98 times 98 are a little less than 2 and 4 in floating point."""
    rope = _rope_from_paper({"base": base, "channels": channels}, "base", "channels", 98)
    config = GPTAlphaConfig(head_dim=98, layer_types=["full_attention"] * 12, rope_parameters=rope)
    back = _rope_for_paper(config, "full_attention", "base", "channels")
    assert back["channels"] == channels and back["base"] == pytest.approx(base, rel=1e-11)
    assert base == 1e6 / 3 or back["base"] == base


def test_settings_that_stand_for_others_are_read_as_the_authors_read_them():
    config = config_from_paper(
        fields_of("kvm_saturation_swa", residual_scale=None, logit_softcap=0.0, swa_window_size=0, d_head=20)
    )
    assert (config.residual_scale, config.logit_softcap, config.sliding_window, config.head_dim) == (1.0, None, 8, 20)
    assert config.layer_types == ["sliding_attention", "kvm_attention"] * 2
    assert config_from_paper(fields_of("kvm_fixed", residual_scale=0, logit_softcap=30.0)).logit_softcap == 30.0
    # A state begins with a row per token of a chunk, whatever the smallest size or the cap.
    small = config_from_paper(fields_of("kvm_fixed", state_min_len=2, n_max_d_chunks=0))
    assert (small.state_size, small.state_max_size) == (8, 8)
    heads = config_from_paper(fields_of("kvm_fixed", d_qk_head=24, d_v_head=24))
    assert heads.head_dim == 24 and heads.rotary_channels == 8
    back = config_for_paper(heads)
    assert back["d_qk_head"] == back["d_v_head"] == 24
    assert config_from_paper(fields_of("kvm_fixed", kvm_value_residual_mode="none")).value_residual == "none"


def test_a_mix_that_the_authors_never_use_is_left_out_and_comes_back_as_zeros(tmp_path):
    weights = load_file(GOLDEN / "kvm_fixed" / "model.safetensors")
    weights = {name: tensor for name, tensor in weights.items() if not name.endswith(("attn.x_q", "attn.x_k"))}
    source = make_checkpoint(tmp_path / "theirs", weights=weights, use_tokenshift_att=0)
    result = CliRunner().invoke(app, ["import-paper", str(source), str(tmp_path / "ours")])
    assert result.exit_code == 0 and "Left out: transformer.h.0.attn.x_v, " in result.output
    AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    export_paper(tmp_path / "ours", tmp_path / "back")
    expected = {name: torch.zeros_like(t) if name.endswith("attn.x_v") else t for name, t in weights.items()}
    assert_equal_bit_for_bit(load_file(tmp_path / "back" / "model.safetensors"), expected)


def test_counts_that_differ_from_the_authors_are_said(tmp_path):
    result = CliRunner().invoke(app, ["import-paper", str(GOLDEN / "kvm_no_vlens"), str(tmp_path / "ours")])
    assert result.exit_code == 0 and "kvm_use_vlens" in result.output


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("transformer.h.1.attn.x_q"), r"missing: transformer\.h\.1\.attn\.x_q\."),
        (lambda w: w.update(spare=torch.ones(2)), r"left over: spare\."),
        (
            lambda w: w.update({"transformer.h.0.mlp.x_k": torch.ones(32)}),
            r"transformer.h.0.mlp.x_k.*\(32,\).*\(1, 1, 32\)",
        ),
        (lambda w: w.update({"lm_head.weight": w["lm_head.weight"].to(torch.int8)}), "lm_head.weight.*I8"),
    ],
    ids=["missing", "left over", "another shape", "quantized"],
)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path, change, words):
    weights = load_file(GOLDEN / "kvm_fixed" / "model.safetensors")
    change(weights)
    source = make_checkpoint(tmp_path / "theirs", weights=weights)
    with pytest.raises(RetrofitError, match=words):
        import_paper(source, tmp_path / "ours")
    assert os.listdir(tmp_path) == ["theirs"]


def test_an_export_refuses_tensors_that_do_not_fit(tmp_path):
    import_paper(GOLDEN / "kvm_fixed", tmp_path / "ours")
    weights = load_file(tmp_path / "ours" / "model.safetensors")
    del weights["model.layers.2.self_attn.state_norm.bias"]
    save_file(weights, tmp_path / "ours" / "model.safetensors")
    with pytest.raises(RetrofitError, match=r"model\.layers\.2\.self_attn\.state_norm\.bias"):
        export_paper(tmp_path / "ours", tmp_path / "back")


HYBRID = "kvm_saturation_swa"


@pytest.mark.parametrize(
    ("case", "changes", "words"),
    [
        ("ovq_swa", {}, "`token_mixer` 'ovq'"),
        *[
            ("kvm_fixed", {"token_mixer": name}, f"'{name}'")
            for name in ("rwkv7", "gated_deltanet", "kda", "lact", "swa")
        ],
        ("kvm_fixed", {"token_mixer_class_path": "my.Mixer"}, "token_mixer_class_path"),
        ("kvm_fixed", {"model_class_path": "model.other.Other"}, "model_class_path"),
        ("kvm_fixed", {"model_type": "llama"}, "'llama'"),
        (HYBRID, {"alt_token_mixer": "ovq"}, "`alt_token_mixer` 'ovq'"),
        (HYBRID, {"alt_token_mixer_class_path": "my.Mixer"}, "alt_token_mixer_class_path"),
        (HYBRID, {"alt_share_v0": 1}, "alt_share_v0"),
        (HYBRID, {"alt_layer_every": 1}, "alt_layer_every"),
        (HYBRID, {"alt_rope_partial_dim": 18}, "alt_rope_partial_dim"),
        (HYBRID, {"swa_window_size": 1}, "sliding_window"),
        (HYBRID, {"swa_value_residual_mode": "none"}, "swa_value_residual_mode"),
        (HYBRID, {"num_hidden_layers": 6, "use_skip_connections": 1}, "multiple of 2"),
        ("kvm_fixed", {"use_skip_connections": 1}, "skip_connections"),
        ("kvm_fixed", {"kvm_value_residual_mode": "linear"}, "'linear'"),
        ("kvm_fixed", {"kvm_value_residual_mode": "rwkv_post_tokenshift"}, "'rwkv_post_tokenshift'"),
        ("kvm_fixed", {"kvm_token_shift_mode": "conv"}, "'conv'"),
        ("kvm_fixed", {"d_qk_head": 8}, "`d_qk_head` is 8 and `d_v_head` 16"),
        ("kvm_fixed", {"rope_partial_dim": 0}, "rope_partial_dim"),
        ("kvm_fixed", {"rope_partial_dim": 16}, "rope_partial_dim"),
        ("kvm_fixed", {"rope_partial_dim": 7}, "rope_partial_dim"),
        ("kvm_fixed", {"state_budget_mode": "cube"}, "'cube'"),
        ("kvm_fixed", {"sink_len": 8}, "num_sink_tokens"),
        ("kvm_fixed", {"n_max_d_chunks": None}, "makes no sense"),
        ("kvm_fixed", {"kvm_use_magic": 1}, "kvm_use_magic"),
        ("kvm_fixed", {"use_magic": 1}, "use_magic"),
    ],
)
def test_models_that_ours_cannot_be_are_refused_by_their_config_alone(tmp_path, case, changes, words):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(fields_of(case, **changes)))
    result = CliRunner().invoke(app, ["import-paper", str(source), str(tmp_path / "ours")])
    assert result.exit_code == 1 and "Traceback" not in result.output
    assert words in " ".join(result.output.split()), result.output
    assert os.listdir(tmp_path) == ["source"]


def test_a_field_that_is_missing_is_not_guessed():
    fields = fields_of("kvm_fixed")
    del fields["sink_len"]
    with pytest.raises(RetrofitError, match="sink_len"):
        config_from_paper(fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(layer_types=["full_attention", "kvm_attention"]), "layer_types"),
        (dict(layer_types=["kvm_attention", "sliding_attention"], sliding_window=8), "layer_types"),
        (dict(layer_types=["sliding_attention"] * 2, sliding_window=8), "layer_types"),
        (dict(value_residual="linear"), "value_residual"),
        (dict(tie_word_embeddings=True), "tie_word_embeddings"),
        (dict(rope_parameters={"partial_rotary_factor": 0.0}), "without RoPE"),
        (dict(state_max_size=300), "state_max_size"),
        (dict(head_dim=64, layer_types=["sliding_attention", "kvm_attention"], sliding_window=8), "head_dim"),
        (
            dict(layer_types=["sliding_attention", "kvm_attention"], sliding_window=8, skip_connections=True),
            "Skip connections",
        ),
    ],
)
def test_models_that_the_authors_code_cannot_be_are_not_exported(fields, words):
    with pytest.raises(RetrofitError, match=words):
        config_for_paper(GPTAlphaConfig(num_hidden_layers=2, **fields))


@pytest.mark.parametrize("run", ["kvm-256", "kvm-sqrt", "kvm-saturation-hybrid", "bswa", "full", "full-hybrid-nope"])
def test_the_papers_runs_can_be_exported_and_imported(run):
    config = GPTAlphaConfig.preset(run)
    again = config_from_paper(config_for_paper(config))
    for name in GPTAlphaConfig.__annotations__:
        if name == "sliding_rope_parameters" and "sliding_attention" not in config.layer_types:
            continue
        expected, actual = getattr(config, name), getattr(again, name)
        if name.endswith("rope_parameters"):
            assert actual == pytest.approx(expected)
        elif name == "state_max_size":
            assert actual >= config.max_position_embeddings
        else:
            assert actual == expected, name


@pytest.mark.parametrize("direction", [import_paper, export_paper])
def test_sources_that_are_not_there_or_of_another_kind_are_refused(tmp_path, direction):
    with pytest.raises(RetrofitError, match=r"no .*config\.json"):
        direction(tmp_path / "gone", tmp_path / "target")
    (tmp_path / "other").mkdir()
    for content, words in (('{"model_type": "llama"}', "'llama'"), ("[]", "not a config"), ("{", "cannot be read")):
        (tmp_path / "other" / "config.json").write_text(content)
        with pytest.raises(RetrofitError, match=words):
            direction(tmp_path / "other", tmp_path / "target")


def test_weights_that_are_missing_ambiguous_or_not_a_state_dict_are_refused(tmp_path):
    source, weights = tmp_path / "source", load_file(GOLDEN / "kvm_fixed" / "model.safetensors")
    source.mkdir()
    shutil.copy(GOLDEN / "kvm_fixed" / "config.json", source)
    with pytest.raises(RetrofitError, match="has no weights"):
        import_paper(source, tmp_path / "ours")
    for content, words in (
        (b"garbage", "cannot be read"),
        ({"step": 7, "state": weights}, "does not hold a state dict"),
        ({"a": torch.ones(2, dtype=torch.int8)}, "stored as torch.int8"),
        ({"a": print}, "cannot be read"),  # an object that is not a tensor would run code
    ):
        torch.save(content, source / "model.pth") if isinstance(content, dict) else (source / "model.pth").write_bytes(
            content
        )
        with pytest.raises(RetrofitError, match=words):
            import_paper(source, tmp_path / "ours")
    torch.save(weights, source / "optimizer.pt")
    with pytest.raises(RetrofitError, match=r"several .*model\.pth, optimizer\.pt"):
        import_paper(source, tmp_path / "ours")
    assert os.listdir(tmp_path) == ["source"]


def test_an_interrupted_run_leaves_no_target_and_the_next_one_starts_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(conversion.paper, "SHARD_SIZE", 40_000)
    done = 0

    def interrupt(count):
        nonlocal done
        done += count
        if done > 60_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_paper(GOLDEN / "kvm_fixed", tmp_path / "ours", on_bytes=interrupt)
    assert os.listdir(tmp_path) == ["ours.incomplete"] and not (tmp_path / "ours.incomplete" / "config.json").exists()
    (tmp_path / "ours.incomplete" / "model-00007-of-00009.safetensors").write_bytes(b"of another run")
    import_paper(GOLDEN / "kvm_fixed", tmp_path / "ours")
    assert os.listdir(tmp_path) == ["ours"]
    assert not (tmp_path / "ours" / "model-00007-of-00009.safetensors").exists()
    AutoModelForCausalLM.from_pretrained(tmp_path / "ours")


def test_folders_in_the_way_are_left_alone(tmp_path):
    for name, words in (("ours", "not an empty folder"), ("ours.incomplete", "not ours")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("do not lose")
        with pytest.raises(RetrofitError, match=words):
            import_paper(GOLDEN / "kvm_fixed", tmp_path / "ours")
        assert (tmp_path / name / "thesis.txt").read_text() == "do not lose"
        (tmp_path / name / "thesis.txt").unlink()
        shutil.rmtree(tmp_path / name)


def test_a_full_disk_is_said(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(conversion.execute.os, "fsync", full)
    with pytest.raises(RetrofitError, match="No space left"):
        import_paper(GOLDEN / "kvm_fixed", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()

"""Checkpoints: what comes back, what they may lack, shared tensors, resized embeddings, and the decoder alone."""

import warnings

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from small_maglev import LLAMA_STYLE, SMALL, make_model
from small_models import generate, random_ids
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForPreTraining, LlamaConfig, LlamaForCausalLM

from maglev_hf import MaglevConfig, MaglevForCausalLM, MaglevForPreTraining, MaglevModel

T = 17
CLASSES = [MaglevModel, MaglevForCausalLM, MaglevForPreTraining]
KINDS = {
    "paper": dict(share_prefiller=True),
    "separate": dict(share_prefiller=False),
    "llama": dict(share_prefiller=True, **LLAMA_STYLE),
    "residual": dict(memory_injection="residual", share_prefiller=False),
    "cross_attention": dict(memory_injection="cross_attention"),
}
ROPES = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
]


def trained_model(**fields):
    """Both stacks, in float32, as they are saved."""
    model = make_model(dtype=torch.float32, model_class=MaglevForPreTraining, **fields)
    model.tie_weights()
    return model


def target_of(model, ids):
    with torch.no_grad():
        return model.model(ids, rollout="teacher_forced", prefiller=model.prefiller).target


def report_of(model_class, folder):
    """What loading says that the file has too much or too little."""
    model, info = model_class.from_pretrained(folder, output_loading_info=True)
    return model.eval(), {name: set(info[name]) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")}


NOTHING = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set()}


@pytest.mark.parametrize("load", [{}, {"device_map": "auto"}, {"dtype": torch.bfloat16}], ids=["", "auto", "bfloat16"])
@pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("model_class", CLASSES, ids=["base", "causal lm", "pretraining"])
def test_every_buffer_and_parameter_comes_back(tmp_path, load, fields, model_class):
    """Buffers are not in the file; loading goes through the meta device."""
    model = make_model(dtype=torch.float32, model_class=model_class, **fields)
    if hasattr(model, "lm_head"):
        model.tie_weights()
    model.save_pretrained(tmp_path)
    loaded = model_class.from_pretrained(tmp_path, **load)
    for kind in ("named_parameters", "named_buffers"):
        wanted, found = (dict(getattr(one, kind)()) for one in (model, loaded))
        assert wanted.keys() == found.keys() and wanted
        for name, tensor in wanted.items():
            is_table = kind == "named_buffers"  # which stays float32
            dtype = torch.float32 if is_table else load.get("dtype", torch.float32)
            assert found[name].dtype == dtype and torch.equal(found[name], tensor.to(dtype)), name


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("load", [{}, {"device_map": "auto"}, {"dtype": torch.bfloat16}], ids=["", "auto", "bfloat16"])
def test_rotary_tables_of_every_type_survive_loading(tmp_path, rope, load):
    model = make_model(dtype=torch.float32, rope_parameters=dict(rope))
    model.save_pretrained(tmp_path)
    loaded = MaglevForCausalLM.from_pretrained(tmp_path, **load)
    assert torch.equal(loaded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert loaded.model.rotary_emb.attention_scaling == model.model.rotary_emb.attention_scaling


def test_auto_classes_know_the_model(tmp_path):
    model = trained_model()
    model.save_pretrained(tmp_path)
    assert type(AutoModel.from_pretrained(tmp_path)) is MaglevModel
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is MaglevForCausalLM
    assert type(AutoModelForPreTraining.from_pretrained(tmp_path)) is MaglevForPreTraining


# What a file may lack, or have too much of


@pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS)
def test_parameters_that_a_file_lacks_get_their_neutral_values(tmp_path, fields):
    """Gates that are 1, norms of weight 1, and residual scales as without them: 1 and 0."""
    model = trained_model(**fields)
    neutral = {"gate.weight": 0.0, "residual_scale": 1.0, "embedding_scale": 0.0, "memory.k_norm.weight": 1.0}
    state = model.state_dict()
    lacking = {name: value for name in state for part, value in neutral.items() if name.endswith(part)}
    assert len(lacking) >= (3 if fields is KINDS["llama"] else 4)
    model.save_pretrained(tmp_path, state_dict={name: state[name].clone() for name in state if name not in lacking})
    loaded = MaglevForPreTraining.from_pretrained(tmp_path)
    for name, parameter in loaded.state_dict().items():
        if name in lacking:
            assert parameter.eq(lacking[name]).all(), name
        else:
            assert torch.equal(parameter, state[name]), name


def test_a_llama_checkpoint_becomes_a_model_whose_new_parts_are_neutral(tmp_path):
    """What reads the memory is drawn as other matrices are; how much of it is taken is not."""
    shared = {name: SMALL[name] for name in SMALL if name != "sliding_window"}
    LlamaForCausalLM(LlamaConfig(**shared, tie_word_embeddings=True)).save_pretrained(tmp_path)
    config = MaglevConfig(**SMALL, **{**LLAMA_STYLE, "attention_bias": False}, initializer_range=0.05)
    model = MaglevForPreTraining.from_pretrained(tmp_path, config=config)
    for layer in model.model.layers:
        memory = layer.self_attn.memory
        assert memory.local_gate.weight.eq(0).all() and memory.memory_gate.weight.eq(0).all()
        assert memory.k_norm.weight.eq(1).all()
        for projection in (memory.k_proj, memory.v_proj):
            assert 0.02 < projection.weight.std() < 0.1  # drawn with a standard deviation of 0.05


@pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("model_class", [MaglevForCausalLM, MaglevModel])
def test_the_decoder_loads_a_training_checkpoint_without_a_word_of_the_prefiller(
    tmp_path, fields, model_class, caplog, monkeypatch
):
    model = trained_model(**fields)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(transformers.logging.get_logger("transformers"), "propagate", True)
    caplog.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoder, report = report_of(model_class, tmp_path)
    assert not any("prefiller" in record.getMessage() for record in caplog.records)
    if model_class is MaglevForCausalLM:
        assert report == NOTHING
        assert not any("prefiller" in name for name in decoder.state_dict())
        ids = random_ids(model, T)
        assert torch.equal(
            generate(decoder, ids, 8, rollout="sequential"), generate(model, ids, 8, rollout="sequential")
        )
    else:
        assert not report["missing_keys"] and not any("prefiller" in name for name in report["unexpected_keys"])


def test_training_goes_on_from_a_deployed_checkpoint_and_says_that_the_prefiller_is_new(tmp_path):
    make_model(dtype=torch.float32, share_prefiller=False).save_pretrained(tmp_path)
    model, report = report_of(MaglevForPreTraining, tmp_path)
    assert report["missing_keys"] and all(name.startswith("prefiller.") for name in report["missing_keys"])
    assert not report["unexpected_keys"]
    ids = random_ids(model, T)
    assert model.train()(ids, labels=ids).loss.isfinite()


# Shared tensors


@pytest.mark.parametrize("fields", [KINDS["paper"], KINDS["llama"]], ids=["untied", "tied"])
def test_a_shared_prefiller_costs_nothing_in_the_file_and_is_still_shared_after_loading(tmp_path, fields):
    model = trained_model(**fields)
    model.save_pretrained(tmp_path / "training")
    held = {tensor.data_ptr(): tensor.nbytes for tensor in model.state_dict().values()}
    written = load_file(tmp_path / "training" / "model.safetensors")
    assert sum(tensor.nbytes for tensor in written.values()) == sum(held.values())
    assert not any(name.startswith("prefiller.layers") for name in written)
    loaded, report = report_of(MaglevForPreTraining, tmp_path / "training")
    assert report == NOTHING
    ids = random_ids(model, T)
    assert torch.equal(target_of(loaded, ids), target_of(model, ids))
    with torch.no_grad():  # the prefiller's blocks are the decoder's: a change of one is a change of both
        loaded.model.layers[1].mlp.up_proj.weight.mul_(2)
    assert (target_of(loaded, ids) - target_of(model, ids)).abs().max() > 1e-2
    tied = fields is KINDS["llama"]
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert ("lm_head.weight" in written) != tied


def test_a_separate_prefiller_shares_the_embedding_alone(tmp_path):
    model = trained_model(**KINDS["separate"])
    model.save_pretrained(tmp_path)
    loaded, report = report_of(MaglevForPreTraining, tmp_path)
    assert report == NOTHING
    ids = random_ids(model, T)
    assert torch.equal(target_of(loaded, ids), target_of(model, ids))
    with torch.no_grad():
        loaded.model.layers[1].mlp.up_proj.weight.mul_(2)
        assert torch.equal(target_of(loaded, ids), target_of(model, ids))
        loaded.model.embed_tokens.weight.mul_(-1)
    assert not torch.equal(target_of(loaded, ids), target_of(model, ids))


@pytest.mark.parametrize(
    "fields", [KINDS["paper"], KINDS["separate"], KINDS["llama"]], ids=["untied", "separate", "tied"]
)
def test_resized_embeddings_stay_tied_or_apart_and_the_prefiller_follows(tmp_path, fields):
    model = trained_model(**fields)
    ids = random_ids(model, T)
    with torch.no_grad():
        before = model(ids, rollout="sequential").logits
        model.resize_token_embeddings(64, mean_resizing=False)
        after = model(ids, rollout="sequential").logits
    assert after.shape[-1] == model.config.vocab_size == 64
    assert (after[..., :61] - before).abs().max() <= 1e-5  # a head of another width rounds differently in float32
    new = ids.clone()
    new[0, 3:5] = torch.tensor([62, 63])
    assert (target_of(model, new) - target_of(model, ids))[:, 3:].abs().amax(-1).gt(1e-3).all()
    model.save_pretrained(tmp_path)
    loaded, report = report_of(MaglevForPreTraining, tmp_path)
    assert report == NOTHING
    for one in (model, loaded):
        assert (one.lm_head.weight is one.model.embed_tokens.weight) == (fields is KINDS["llama"])
    assert torch.equal(target_of(loaded, new), target_of(model, new))
    with torch.no_grad():
        assert torch.equal(loaded(new).logits, model(new).logits)


# The decoder alone


@pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS)
def test_the_exported_decoder_has_no_tensor_of_the_prefiller_and_generates_the_same(tmp_path, fields):
    model = trained_model(**fields)
    held = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.export_decoder(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    tied = {"lm_head.weight"} if fields is KINDS["llama"] else set()
    assert names == {name for name in held if not name.startswith("prefiller.")} - tied
    loaded, report = report_of(MaglevForCausalLM, tmp_path)
    assert report == NOTHING and loaded.config.architectures == ["MaglevForCausalLM"]
    ids = random_ids(model, T)
    assert torch.equal(generate(loaded, ids, 8), generate(model, ids, 8, rollout="sequential"))
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == bool(tied)
    # The model that was exported is as it was, and can still be trained.
    assert all(torch.equal(held[name], tensor) for name, tensor in model.state_dict().items())
    assert model.train()(ids, labels=ids).consistency_loss is not None


def test_an_exported_decoder_needs_no_targets(tmp_path):
    """They are the prefiller's."""
    model = trained_model(rollout="teacher_forced")
    model.export_decoder(tmp_path)
    assert model.config.rollout == "teacher_forced"
    loaded = MaglevForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.rollout == "fixed_point"
    generate(loaded, random_ids(model, T), 3)


def test_generation_settings_are_exported_too(tmp_path):
    model = trained_model()
    model.generation_config.top_k, model.generation_config.do_sample = 7, True
    model.export_decoder(tmp_path)
    assert MaglevForCausalLM.from_pretrained(tmp_path).generation_config.top_k == 7


@pytest.mark.filterwarnings("ignore:The following device_map keys")  # of bare parameters, which it needs all the same
def test_a_model_with_a_layer_on_disk_computes_and_exports_the_same(tmp_path):
    """accelerate moves what a module is given; the decoder, which the prefiller is given, stays where it is."""
    model = make_model(dtype=torch.float32, std=0.1, model_class=MaglevForPreTraining)
    model.save_pretrained(tmp_path / "model")
    parts = ["model.embed_tokens", "model.norm", "model.rotary_emb", "model.residual_scale", "model.embedding_scale"]
    device_map = dict.fromkeys([*parts, "model.layers.0", "model.layers.2", "lm_head", "prefiller"], "cpu")
    loaded = MaglevForPreTraining.from_pretrained(
        tmp_path / "model", device_map=device_map | {"model.layers.1": "disk"}, offload_folder=tmp_path / "offload"
    )
    ids = random_ids(model, 20)
    with torch.no_grad():
        for rollout in ("teacher_forced", "fixed_point"):
            assert (loaded(ids, rollout=rollout).logits - model(ids, rollout=rollout).logits).abs().max() < 1e-5
    loaded.export_decoder(tmp_path / "decoder")
    exported = MaglevForCausalLM.from_pretrained(tmp_path / "decoder").state_dict()
    for name, tensor in exported.items():
        assert torch.equal(tensor, model.state_dict()[name]), name

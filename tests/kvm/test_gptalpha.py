"""The paper's backbone beside what golden data and the common invariance tests say of it: config, initial values,
presets, training, saving."""

import os
import subprocess
import sys

import pytest
import torch
from small_models import GPTALPHA, SHARED, make_model, random_ids
from transformers import AutoModelForCausalLM, DynamicCache, Trainer, TrainingArguments

from kvm_hf import GPTAlphaConfig, GPTAlphaForCausalLM, KVMCache
from kvm_hf.configuration_gptalpha import RUNS, SIZES

L = 8


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(hidden_size=30, head_dim=None), "not a multiple"),
        (dict(layer_types=["kvm_attention", "linear_attention"]), "unknown entries"),
        (dict(layer_types=["kvm_attention"]), "1 entries"),
        (dict(layer_types=["kvm_attention", "sliding_attention"]), "sliding_window"),
        (dict(rope_parameters={"partial_rotary_factor": 1.0}), "without rotation"),
        (dict(rope_parameters={"partial_rotary_factor": 0.4}), "pairs of channels"),
        (dict(rope_parameters={"rope_type": "yarn"}), "only 'default'"),
        (dict(value_residual="rwkv"), "value_residual"),
        (dict(num_hidden_layers=3, skip_connections=True), "two halves"),
        (dict(logit_softcap=0.0), "logit_softcap"),
        (dict(residual_scale=0.0), "other than 0"),
        (dict(pad_token_id=61), "pad_token_id"),
        (dict(rope_parameters={"rope_theta": -1.0}), "positive number"),
        (dict(ffn_expansion=0.5), "without a channel"),
        (dict(num_sink_tokens=4), "no row to merge into"),
        (dict(state_budget="fixed", state_size=3), "cannot be kept"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused_by_name(fields, words):
    with pytest.raises(Exception, match=words):
        GPTAlphaConfig(**{**SHARED, **fields})


@pytest.mark.parametrize("lambdas", [True, False])
def test_a_new_model_starts_at_the_papers_values(lambdas):
    """Also in blocks without parameters of their own, over which transformers passes in custom code."""
    model = GPTAlphaForCausalLM(GPTAlphaConfig(**SHARED, block_lambdas=lambdas))
    for layer in model.model.layers:
        assert layer.self_attn.o_proj.weight.eq(0).all() and layer.mlp.down_proj.weight.eq(0).all()
        assert layer.self_attn.shift_q[0] == 1 and layer.mlp.shift[0] == 1
    gram = model.lm_head.weight.T @ model.lm_head.weight
    assert (gram - 0.25 * torch.eye(len(gram))).abs().max() < 1e-5  # orthogonal, times a half


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("run", RUNS)
def test_presets_are_the_papers_runs(run, size):
    config = GPTAlphaConfig.preset(run, size)
    with torch.device("meta"):
        model = GPTAlphaForCausalLM(config)
    body = sum(p.numel() for name, p in model.named_parameters() if "lm_head" not in name)
    assert {"120M": 115e6, "350M": 345e6}[size] < body < {"120M": 135e6, "350M": 385e6}[size]
    assert config.head_dim == 128 and config.window_size == 512
    assert len(config.layer_types) == config.num_hidden_layers
    if "hybrid" in run:
        assert config.layer_types[::2] == ["sliding_attention"] * (config.num_hidden_layers // 2)
    assert len(GPTAlphaConfig.preset(run, size, num_hidden_layers=5).layer_types) == 5
    with pytest.raises(ValueError, match="Runs are"):
        GPTAlphaConfig.preset("kvm", size)


def test_a_new_model_is_the_embedding_and_the_head():
    """Output projections start at zero, so no branch says anything; matrices are orthogonal, mixes within (0, 1)."""
    torch.manual_seed(0)
    fields = {name: value for name, value in GPTALPHA.items() if name not in ("backbone", "layer_types")}
    model = GPTAlphaForCausalLM(GPTAlphaConfig(**{**SHARED, **fields, "skip_connections": False}))
    ids = random_ids(model, 3 * L)
    with torch.no_grad():
        normed = model.model.norm(model.model.embed_norm(model.model.embed_tokens(ids)))
        cap = model.config.logit_softcap
        assert torch.allclose(model(ids).logits, cap * torch.tanh(model.lm_head(normed) / cap), atol=1e-6)
    for layer in model.model.layers:
        for weight in (layer.self_attn.q_proj.weight, layer.self_attn.v_proj.weight, layer.mlp.up_proj.weight):
            short = min(weight.shape)
            gram = weight @ weight.T if weight.shape[0] == short else weight.T @ weight
            assert torch.allclose(gram, torch.eye(short), atol=1e-5)
        for mix in (layer.self_attn.shift_q, layer.self_attn.shift_k, layer.self_attn.shift_v, layer.mlp.shift):
            assert mix.min() >= 0 and mix.max() <= 1 and mix.diff().le(0).all()
        assert layer.self_attn.value_gate.down.weight.eq(0).all()
        assert layer.self_attn.value_gate.bias.diff().lt(0).all()
        if hasattr(layer.self_attn, "state_temperature"):
            assert layer.self_attn.state_temperature.eq(1).all() and layer.self_attn.window_temperature.eq(1).all()


def test_gradients_reach_every_parameter():
    model = make_model(**GPTALPHA).train()
    ids = random_ids(model, 7 * L)
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        # The first layer of its kind without lambdas would mix its value with itself; with lambdas it does not.
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_a_cache_that_transformers_made_gets_its_token_shifts():
    model = make_model(**GPTALPHA)
    ids = random_ids(model, 4 * L)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        pieces = [model(part, past_key_values=cache).logits for part in ids.split(5, dim=1)]
    assert (torch.cat(pieces, 1) - whole).abs().max() <= 1e-9
    assert len(cache.layers) == len(KVMCache(model.config).layers) == 4 + 8


def test_a_cache_that_was_filled_without_token_shift_is_refused():
    plain = make_model(backbone="gptalpha", token_shift_attention=False, token_shift_mlp=False)
    cache = KVMCache(plain.config)
    ids = random_ids(plain, 9)
    with torch.no_grad():
        plain(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="without token shift"):
            make_model(backbone="gptalpha")(ids, past_key_values=cache)
        for other, words in (
            (make_model(backbone="gptalpha", token_shift_mlp=False), "token shifts of 24 features"),
            (make_model(backbone="gptalpha"), "holds 1 sequences"),
        ):
            model = make_model(backbone="gptalpha", token_shift_attention=False) if "features" in words else other
            cache = KVMCache(model.config)
            model(ids, past_key_values=cache)
            with pytest.raises(ValueError, match=words):
                other(ids if "features" in words else ids.expand(2, -1), past_key_values=cache)


def test_token_shift_keeps_a_token_and_not_the_prompt_that_it_ends():
    model = make_model(**GPTALPHA)
    cache = KVMCache(model.config)
    with torch.no_grad():
        model(random_ids(model, 20 * L), past_key_values=cache)
    for layer in cache.layers[model.config.num_hidden_layers :]:
        assert layer.tail.untyped_storage().nbytes() == layer.nbytes == layer.tail.shape[2] * 8


@pytest.mark.parametrize("make_cache", [KVMCache, lambda config: DynamicCache(config=config)], ids=["KVM", "Dynamic"])
@pytest.mark.parametrize("fields", [dict(backbone="gptalpha"), {}], ids=["gptalpha", "llama"])
def test_rows_of_full_attention_models_count_their_own_tokens_too(fields, make_cache):
    model = make_model(**fields, layer_types=["full_attention"] * 2)
    ids, more = random_ids(model, 6, batch=2), random_ids(model, 3, batch=2, seed=1)
    mask = torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]])
    cache = make_cache(model.config)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        logits = model(more, attention_mask=torch.cat([mask, torch.ones_like(more)], 1), past_key_values=cache).logits
        for row, length in enumerate((6, 3)):
            alone = model(torch.cat([ids[row : row + 1, :length], more[row : row + 1]], 1)).logits[0, length:]
            assert (logits[row] - alone).abs().max() <= 1e-6  # masks of other lengths, RoPE tables in float32


def test_saved_models_come_back_with_every_parameter_and_buffer(tmp_path):
    model = make_model(dtype=torch.float32, **GPTALPHA)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is GPTAlphaForCausalLM
    ids = random_ids(model, 4 * L)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    for name, buffer in model.named_buffers():
        assert torch.equal(dict(loaded.named_buffers())[name], buffer), name


def test_a_120m_preset_trains_in_bfloat16_and_generates_from_its_own_code(tmp_path):
    """Three steps under Trainer with gradient checkpointing, on sequences beyond the window; then a process that does
    not have our package."""
    torch.manual_seed(0)
    model = GPTAlphaForCausalLM(GPTAlphaConfig.preset("kvm-saturation-hybrid")).to(torch.bfloat16)
    before = model.model.layers[1].self_attn.o_proj.weight.clone()
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(50304, (3, 600))]
    arguments = TrainingArguments(
        tmp_path / "run",
        max_steps=3,
        per_device_train_batch_size=1,
        gradient_checkpointing=True,
        bf16=True,
        learning_rate=1e-3,
        warmup_steps=0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    losses = [entry["train_loss"] for entry in trainer.state.log_history if "train_loss" in entry]
    assert losses and all(0 < loss < 20 for loss in losses)
    assert not torch.equal(model.model.layers[1].self_attn.o_proj.weight, before)
    trainer.save_model(tmp_path / "saved")
    code = (
        "import sys, torch, transformers; sys.modules['kvm_hf'] = None\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "assert model.dtype == torch.bfloat16 and 'transformers_modules' in type(model).__module__\n"
        "ids = torch.arange(520)[None]\n"
        "tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)\n"
        "assert tokens.shape == (1, 523)\n"
    )
    modules = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "saved")], check=True, env=os.environ | modules, cwd=tmp_path
    )

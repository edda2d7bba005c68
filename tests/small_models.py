"""Golden data, and small models whose weights are large enough that a wrong state shows."""

import json
from pathlib import Path

import torch
from hypothesis import strategies as st
from safetensors.torch import load_file

from kvm_hf import GPTAlphaConfig, GPTAlphaForCausalLM, KVMConfig, KVMForCausalLM

DATA = Path(__file__).parent / "data"
SMALL = dict(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    chunk_size=4,
    num_window_chunks=2,
    state_size=4,
    state_growth_factor=2.0,
    bos_token_id=None,
    eos_token_id=None,
)


HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
MIXED = dict(
    num_hidden_layers=3, layer_types=["kvm_attention", "sliding_attention", "full_attention"], sliding_window=5
)


# The paper's backbone in place of the Llama-style one, with everything that it may have.
GPTALPHA = dict(
    backbone="gptalpha",
    num_hidden_layers=4,
    layer_types=["kvm_attention", "block_sliding_attention", "full_attention", "kvm_attention"],
    block_lambdas=True,
    skip_connections=True,
    residual_scale=0.7,
    logit_softcap=9.0,
)
# What every small model of either backbone has in common.
SHARED = {
    name: SMALL[name]
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "chunk_size")
} | {name: SMALL[name] for name in ("num_window_chunks", "state_size", "state_growth_factor")}


def make_model(seed: int = 0, dtype=torch.float64, backbone: str = "llama", **fields):
    """A small model with every parameter drawn, none at its neutral value: matrices with std 0.3, so that the state
    moves the logits by far more than any tolerance."""
    torch.manual_seed(seed)
    if backbone == "llama":
        model = KVMForCausalLM(KVMConfig(**{**SMALL, **fields}))
    else:
        model = GPTAlphaForCausalLM(GPTAlphaConfig(**{**SHARED, "ffn_expansion": 1.5, **fields}))
    model = model.to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ("norm" in name and name.endswith("weight")) or "temperature" in name or "lambdas" in name:
                parameter.uniform_(0.7, 1.4)
            elif "shift" in name:
                parameter.uniform_(0.05, 0.95)
            else:
                parameter.normal_(std=0.3)
    return model


def random_ids(model, length: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def run_in_pieces(model, ids, sizes, cache):
    """Logits of `ids` fed in pieces of `sizes` tokens; the last size repeats."""
    outputs, start, sizes = [], 0, list(sizes)
    while start < ids.shape[1]:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        outputs.append(model(ids[:, start : start + size], past_key_values=cache).logits)
        start += size
    return torch.cat(outputs, dim=1)


def generate(model, ids, count, pad_token_id=0, **kwargs):
    """Greedy tokens; the mask is given, since random ids may hold the padding token."""
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=pad_token_id,
        **kwargs,
    )


def greedy_without_cache(model, ids, count):
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids


def golden_llama_cases() -> list[str]:
    return sorted(path.name for path in (DATA / "llama").iterdir())


def load_golden_llama(case: str, dtype) -> tuple[KVMForCausalLM, dict[str, torch.Tensor]]:
    folder = DATA / "llama" / case
    model = KVMForCausalLM(KVMConfig(**json.loads((folder / "config.json").read_text()))).to(dtype).eval()
    weights = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    if model.config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    return model, load_file(folder / "io.safetensors")


@st.composite
def configs(draw):
    """Random settings that the configs accept, over both backbones, all layer types, budgets, gates and treatments."""
    chunk = draw(st.sampled_from([1, 2, 3, 4, 5]))
    fields = dict(
        chunk_size=chunk,
        num_window_chunks=draw(st.integers(1, 3)),
        num_sink_tokens=draw(st.integers(0, chunk - 1)),
        state_budget=draw(st.sampled_from(["fixed", "power_law", "saturation"])),
        state_size=draw(st.integers(chunk, 9)),
        state_growth_factor=draw(st.floats(0.5, 4.0)),
        state_growth_exponent=draw(st.floats(0.2, 1.0)),
        state_saturation=draw(st.integers(1, 30)),
        state_round_to=draw(st.integers(1, 4)),
        state_max_size=draw(st.none() | st.integers(chunk, 20)),
        gate_keys=draw(st.booleans()),
        gate_values=draw(st.booleans()),
        gate_appends=draw(st.booleans()),
        gate_initial_state=draw(st.booleans()),
        value_radius=draw(st.booleans()),
        region_temperatures=draw(st.booleans()),
        sliding_window=draw(st.integers(2, 7)),
    )
    kinds = ["kvm_attention", "full_attention", "sliding_attention"]
    if draw(st.sampled_from(["llama", "llama", "gptalpha"])) == "gptalpha":
        kind = st.sampled_from([*kinds, "block_sliding_attention"])
        return fields | dict(
            backbone="gptalpha",
            rope_parameters={"partial_rotary_factor": draw(st.sampled_from([0.0, 0.5]))},
            value_residual=draw(st.sampled_from(["gated", "linear", "none"])),
            token_shift_attention=draw(st.booleans()),
            token_shift_mlp=draw(st.booleans()),
            block_lambdas=draw(st.booleans()),
            skip_connections=draw(st.booleans()),
            num_hidden_layers=4,
            layer_types=["kvm_attention", draw(kind), draw(kind), draw(kind)],
        )
    positional = draw(st.booleans())
    count_bias = draw(st.sampled_from([0.0, 1.0, 0.5]))
    if positional or count_bias:
        fields["gate_values"] = fields["gate_keys"]
    kind = st.sampled_from(kinds)
    return fields | dict(
        state_treatment="positional" if positional else "normalized",
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": draw(st.sampled_from([0.5, 1.0])) if positional else 0.5,
        },
        count_bias=count_bias,
        num_key_value_heads=draw(st.sampled_from([1, 2, 4])),
        use_qk_norm=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        no_rope_layers=draw(st.none() | st.lists(st.integers(0, 1), min_size=3, max_size=3)),
        num_hidden_layers=3,
        layer_types=["kvm_attention", draw(kind), draw(kind)],
    )

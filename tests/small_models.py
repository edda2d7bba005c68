"""Golden data, and small models whose weights are large enough that a wrong state shows."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from kvm_hf import KVMConfig, KVMForCausalLM

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


def make_model(seed: int = 0, dtype=torch.float64, **fields) -> KVMForCausalLM:
    """A small model with every parameter drawn, none at its neutral value: matrices with std 0.3, so that the state
    moves the logits by far more than any tolerance."""
    torch.manual_seed(seed)
    model = KVMForCausalLM(KVMConfig(**{**SMALL, **fields})).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ("norm" in name and name.endswith("weight")) or "temperature" in name:
                parameter.uniform_(0.7, 1.4)
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


def generate(model, ids, count, **kwargs):
    """Greedy tokens; the mask is given, since random ids may hold the padding token."""
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0, **kwargs
    )


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

"""The models that are compared: of one size, with random weights."""

from collections.abc import Callable

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from kvm_hf import KVMConfig, KVMForCausalLM
from maglev_hf import MaglevConfig, MaglevForCausalLM

SIZES = {
    "small": dict(
        hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4, vocab_size=4096
    ),  # 5 million parameters
    "paper": dict(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=6, vocab_size=50304
    ),  # the 120M runs of the Key-Value Means paper, with Llama's MLP: 162 million with embeddings and head
}
POSITIONS = 1 << 17
WINDOW = 512
LLAMA, FLOOR = "llama", "floor"
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
SATURATION = dict(state_budget="saturation", state_saturation=1024, state_size=1)


class ValueOnly(nn.Module):
    """An attention in which every token sees itself alone: what is left of a model's time is what no cache changes."""

    def __init__(self, attention: nn.Module):
        super().__init__()
        self.v_proj, self.o_proj = attention.v_proj, attention.o_proj

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> tuple[torch.Tensor, None]:
        return self.o_proj(self.v_proj(hidden_states)), None


def _llama(size: dict) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**size, max_position_embeddings=POSITIONS))


def _floor(size: dict) -> PreTrainedModel:
    model = _llama(size)
    for layer in model.model.layers:
        layer.self_attn = ValueOnly(layer.self_attn)
    return model


def _sliding(size: dict) -> PreTrainedModel:
    """Mistral is Llama with a sliding window."""
    heads = size["num_attention_heads"]
    config = MistralConfig(**size, num_key_value_heads=heads, sliding_window=WINDOW, max_position_embeddings=POSITIONS)
    return MistralForCausalLM(config)


def _kvm(**fields) -> Callable[[dict], PreTrainedModel]:
    def make(size: dict) -> PreTrainedModel:
        window = dict(chunk_size=WINDOW // 2, num_window_chunks=2)
        settings = size | window | dict(max_position_embeddings=POSITIONS, rope_parameters=dict(ROPE)) | fields
        if "sliding_window" in fields:
            layers = size["num_hidden_layers"]
            settings["layer_types"] = (["sliding_attention", "kvm_attention"] * layers)[:layers]
        return KVMForCausalLM(KVMConfig(**settings))

    return make


def _maglev(rollout: str) -> Callable[[dict], PreTrainedModel]:
    def make(size: dict) -> PreTrainedModel:
        config = MaglevConfig(**size, sliding_window=WINDOW, max_position_embeddings=POSITIONS, rollout=rollout)
        return MaglevForCausalLM(config)

    return make


MODELS: dict[str, Callable[[dict], PreTrainedModel]] = {
    LLAMA: _llama,
    FLOOR: _floor,
    "llama-sliding": _sliding,
    "kvm-fixed": _kvm(state_budget="fixed", state_size=256),
    "kvm-sqrt": _kvm(state_budget="power_law", state_growth_factor=16.0, state_growth_exponent=0.5, state_size=256),
    "kvm-saturation": _kvm(**SATURATION),
    "kvm-hybrid": _kvm(**SATURATION, sliding_window=256),
    "maglev-fixed-point": _maglev("fixed_point"),
    "maglev-sequential": _maglev("sequential"),
}
# Prompts go token by token, or sweep by sweep, which takes too long beyond this.
MOST_TOKENS = {"maglev-sequential": 1024, "maglev-fixed-point": 4096}
COLOURS = dict(
    zip(MODELS, ("black", "0.6", "#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442"))
)


def make_model(name: str, size: dict, device: str) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device(device):
        return MODELS[name](size).eval()


def prompt(size: dict, tokens: int, device: str, batch: int = 1) -> torch.Tensor:
    """Random ids `[batch, tokens]`."""
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(size["vocab_size"], (batch, tokens), generator=generator).to(device)

"""Golden data, and small Maglev models whose weights are large enough that a wrong memory shows."""

import json

import torch
from hypothesis import strategies as st
from safetensors.torch import load_file
from small_models import DATA

from maglev_hf import MaglevConfig, MaglevForCausalLM, MaglevForPreTraining

SMALL = dict(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    max_position_embeddings=512,
    sliding_window=5,
)
# Neither of the paper's block: what a Llama-style checkpoint becomes.
LLAMA_STYLE = dict(
    final_logit_softcapping=None,
    use_qk_norm=False,
    gated_mlp=True,
    use_residual_scales=False,
    norm_embeddings=False,
    attention_bias=True,
    tie_word_embeddings=True,
)


def make_model(seed: int = 0, dtype=torch.float64, model_class=MaglevForCausalLM, std: float = 0.2, **fields):
    """A small model with every parameter drawn, none at its neutral value."""
    torch.manual_seed(seed)
    model = model_class(MaglevConfig(**{**SMALL, **fields})).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "residual_scale" in name:
                parameter.uniform_(0.7, 1.3)
            else:
                parameter.normal_(std=std)
    return model


def golden_cases() -> list[str]:
    return sorted(path.name for path in (DATA / "maglev").iterdir())


def load_golden(case: str, dtype, **fields) -> tuple[MaglevForPreTraining, dict[str, torch.Tensor]]:
    folder = DATA / "maglev" / case
    config = MaglevConfig(**json.loads((folder / "config.json").read_text()) | fields)
    model = MaglevForPreTraining(config).to(dtype)
    weights = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    return model, load_file(folder / "io.safetensors")


@st.composite
def configs(draw):
    """Random settings that the config accepts."""
    layers = draw(st.integers(1, 3))
    kind = st.sampled_from(["sliding_attention", "full_attention"])
    return dict(
        num_hidden_layers=layers,
        num_key_value_heads=draw(st.sampled_from([1, 2, 4])),
        sliding_window=draw(st.integers(2, 7)),
        layer_types=draw(st.just(["sliding_attention"] * layers) | st.lists(kind, min_size=layers, max_size=layers)),
        prefiller_layer_types=draw(st.lists(kind, min_size=layers, max_size=layers)),
        share_prefiller=draw(st.booleans()),
        memory_injection=draw(st.sampled_from(["kv", "kv", "residual", "cross_attention"])),
        final_logit_softcapping=draw(st.none() | st.just(15.0)),
        use_qk_norm=draw(st.booleans()),
        gated_mlp=draw(st.booleans()),
        use_residual_scales=draw(st.booleans()),
        norm_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
    )

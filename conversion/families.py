"""What each source family calls its parts, and what it has that our models cannot say. One entry per family.

A family is accepted only if a KVM model with all layers as full attention computes exactly the same function. Names
that are not in a table are the same on both sides.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from transformers import PreTrainedConfig

from .errors import RetrofitError

# Fields of a source config that a KVM config has under the same name and with the same meaning.
COMMON_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "rope_parameters",
    "attention_dropout",
    "dtype",
)


@dataclass(frozen=True)
class Origin:
    """Where a target tensor comes from: rows `[start, stop)` of a source tensor, or a constant."""

    name: str | None
    start: int | None = None
    stop: int | None = None
    fill: float | None = None


def _same_fields(*names: str) -> Callable[[PreTrainedConfig], dict]:
    return lambda config: {name: getattr(config, name) for name in names}


def _nothing(config: PreTrainedConfig) -> list[str]:
    return []


def _no_renaming(name: str, config: PreTrainedConfig) -> Origin:
    return Origin(name)


@dataclass(frozen=True)
class Family:
    """One source family.

    Attributes:
        architecture: the class that its checkpoints name.
        fields: source config to the KVM fields that are not common to all families.
        partial_rotary: whether its models heed `partial_rotary_factor`; the others rotate every channel all the same.
        missing: source config to what a KVM model lacks for it, in words; empty if nothing.
        origin: target tensor name and source config to where the tensor comes from.
    """

    architecture: str
    fields: Callable[[PreTrainedConfig], dict] = field(default=lambda config: {})
    partial_rotary: bool = False
    missing: Callable[[PreTrainedConfig], list[str]] = field(default=_nothing)
    origin: Callable[[str, PreTrainedConfig], Origin] = field(default=_no_renaming)


def _qwen2_origin(name: str, config: PreTrainedConfig) -> Origin:
    """Qwen2 has biases on q, k and v only; ours come with one on o, which stays zero."""
    return Origin(None, fill=0.0) if name.endswith("o_proj.bias") else Origin(name)


def _phi3_origin(name: str, config: PreTrainedConfig) -> Origin:
    """Phi-3 stacks q, k, v in one matrix, and gate and up in another."""
    head_dim = config.hidden_size // config.num_attention_heads
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    width = config.intermediate_size
    parts = {
        "q_proj": ("qkv_proj", 0, queries),
        "k_proj": ("qkv_proj", queries, queries + keys),
        "v_proj": ("qkv_proj", queries + keys, queries + 2 * keys),
        "gate_proj": ("gate_up_proj", 0, width),
        "up_proj": ("gate_up_proj", width, 2 * width),
    }
    for part, (fused, start, stop) in parts.items():
        if f".{part}." in name:
            return Origin(name.replace(part, fused), start, stop)
    return Origin(name)


def _phi3_missing(config: PreTrainedConfig) -> list[str]:
    return [
        f"`{name}` {getattr(config, name)} (dropout that our models do not have)"
        for name in ("resid_pdrop", "embd_pdrop")
        if getattr(config, name, 0.0)
    ]


def _one_window(config: PreTrainedConfig) -> dict:
    """Mistral and Phi-3: a sliding window, if there is one, holds for every layer."""
    window = config.sliding_window
    kind = "full_attention" if window is None else "sliding_attention"
    return {"sliding_window": window, "layer_types": [kind] * config.num_hidden_layers}


def _layered_window(config: PreTrainedConfig) -> dict:
    """Qwen and SmolLM3: each layer says whether the sliding window holds for it."""
    windowed = "sliding_attention" in config.layer_types
    return {
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window if windowed else None,
    }


FAMILIES = {
    "llama": Family("LlamaForCausalLM", fields=_same_fields("attention_bias", "mlp_bias")),
    "mistral": Family("MistralForCausalLM", fields=_one_window),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        fields=lambda config: {"attention_bias": True, **_layered_window(config)},
        origin=_qwen2_origin,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        fields=lambda config: {
            "attention_bias": config.attention_bias,
            "use_qk_norm": True,
            **_layered_window(config),
        },
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        fields=lambda config: {
            **_same_fields("attention_bias", "mlp_bias", "no_rope_layers")(config),
            **_layered_window(config),
        },
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        fields=_one_window,
        partial_rotary=True,
        missing=_phi3_missing,
        origin=_phi3_origin,
    ),
}

# Families that people will try, and what our models would need for them.
REFUSED = {
    "granite": "multipliers on embeddings, attention scores, residual branches and logits",
    "olmo2": "norms after each sublayer instead of before it, and a query/key norm over all heads at once",
    "olmo": "layer norms without weights and clipped projections",
    "gemma": "norm weights around 1, scaled embeddings",
    "gemma2": "norm weights around 1, scaled embeddings, four norms per layer, softcaps",
    "gemma3_text": "norm weights around 1, scaled embeddings, four norms per layer, two RoPE bases",
    "mixtral": "mixture-of-experts layers",
    "qwen2_moe": "mixture-of-experts layers",
    "qwen3_moe": "mixture-of-experts layers",
    "phi": "layer norms with bias, attention and MLP in parallel",
    "gpt_neox": "layer norms with bias, attention and MLP in parallel",
    "gpt2": "learned positions, layer norms with bias",
    "cohere": "layer norms, attention and MLP in parallel, scaled logits",
    "stablelm": "layer norms with bias",
    "starcoder2": "layer norms with bias, an MLP without gate",
    "kvm": "nothing, it was converted already: use the checkpoint that it was made from",
    "maglev": "nothing, it was converted already: use the checkpoint that it was made from",
}


def refuse_unknown(model_type: str | None) -> None:
    """Raises a RetrofitError, by name and with what is missing, for a family that is not in the table."""
    if model_type not in FAMILIES:
        lacking = REFUSED.get(model_type, "this family has not been looked at")
        raise RetrofitError(
            f"Models of type {model_type!r} cannot be converted. Missing: {lacking}. "
            f"Families that can: {', '.join(sorted(FAMILIES))}."
        )


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a source config.

    Raises:
        RetrofitError: by name, for a model that is not a causal LM or has what our models lack.
    """
    family = FAMILIES[config.model_type]
    architectures = config.architectures or [family.architecture]
    if family.architecture not in architectures:
        raise RetrofitError(
            f"The source is a {architectures[0]}, not a causal language model. Use a checkpoint of "
            f"{family.architecture}."
        )
    lacking = list(family.missing(config))
    if getattr(config, "quantization_config", None) is not None:
        lacking.append("quantized weights (load the model, call `dequantize()`, save it, and convert that)")
    if any(isinstance(value, dict) for value in config.rope_parameters.values()):
        lacking.append("RoPE parameters that differ between layers")
    if lacking:
        raise RetrofitError(
            f"This {config.model_type} model cannot be converted exactly. Missing: {'; '.join(lacking)}."
        )
    return family


def kvm_fields(config: PreTrainedConfig) -> dict:
    """Every field of the KVM config that follows from the source: the same model, all layers as they are there. The fields
    of every source can be said in it, so that other targets begin with it too."""
    family = family_of(config)
    common = {name: getattr(config, name) for name in COMMON_FIELDS if hasattr(config, name)}
    if not family.partial_rotary:
        common["rope_parameters"] = {
            name: value for name, value in config.rope_parameters.items() if name != "partial_rotary_factor"
        }
    own = {"layer_types": ["full_attention"] * config.num_hidden_layers, **family.fields(config)}
    return {**common, **own}

"""What a Llama-style KVM model is: names, defaults, and checks. No computation."""

import math

from huggingface_hub.dataclasses import strict
from transformers import configuration_utils
from transformers.configuration_utils import PreTrainedConfig

LAYER_TYPES = ("kvm_attention", "full_attention", "sliding_attention")
# Trainer, which resumes from a checkpoint, reads its config as of no model in particular, and transformers then refuses
# types of layers that are not in this list of its own.
configuration_utils.ALLOWED_ATTN_LAYER_TYPES = tuple(
    dict.fromkeys((*configuration_utils.ALLOWED_ATTN_LAYER_TYPES, *LAYER_TYPES, "block_sliding_attention"))
)
STATE_BUDGETS = ("fixed", "power_law", "saturation")
STATE_TREATMENTS = ("normalized", "positional")
# Types of RoPE with constant frequencies: where they change with the length, a key could not be turned back later.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Tensor parallelism cuts a layer between heads, and with them what a KVM layer has per key/value head. Norms, which all heads share,
# are whole everywhere (`parallel_kvm`). A model leaves out the rules for what it lacks.
ATTENTION_TP_PLAN = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.self_attn.merge_gate": "colwise",
    "layers.*.self_attn.state_temperature": "colwise",
    "layers.*.self_attn.window_temperature": "colwise",
}


@strict
class KVMConfig(PreTrainedConfig):
    """Configuration of `KVMModel`: every field of `LlamaConfig`, and how its KVM layers keep their state.

    Source: Goldstein & Cheah, Key-Value Means, arXiv 2605.09877. The fields that Llama does not have:

    Args:
        layer_types: per layer `"kvm_attention"` (the default), `"full_attention"` or `"sliding_attention"`.
        sliding_window: tokens that a query of a `"sliding_attention"` layer sees, itself included.
        use_qk_norm: RMSNorm with a learned weight per head on queries and keys before RoPE, as in Qwen3.
        no_rope_layers: per layer 1 if it uses RoPE and 0 if not, as in SmolLM3; None means all do.
        chunk_size: `C`, tokens per chunk; the state changes once per chunk.
        num_window_chunks: `n`; the window holds `L = n * C` tokens.
        num_sink_tokens: first tokens whose rows nothing is merged into.
        state_budget: `"fixed"`: `state_size` rows; `"power_law"`: `state_growth_factor * tokens **
            state_growth_exponent`; `"saturation"`: `S * tokens / (S + tokens)` with `S = state_saturation`.
        state_size: rows of a fixed budget, least rows of the others.
        state_round_to: growing budgets are rounded down to a multiple of this.
        state_max_size: most rows, or None.
        gate_keys, gate_values: whether a learned gate per key/value head weighs a token's key and value in the state.
            Default: yes in `"normalized"`, no in `"positional"`.
        gate_appends, gate_initial_state: whether that holds for tokens that found a row, and for the first chunk too.
        value_radius: read a row's value as direction times the length of its founding value (else as the mean).
        region_temperatures: learned scales per head for the keys of the state and of the window (a window's nearer to
            zero than 1e-4 counts as 1e-4).
        state_treatment: `"normalized"`: the paper's, which ignores the rotary channels of keys and needs some without
            rotation (`partial_rotary_factor < 1`); `"positional"`: ours, for models that rotate every channel; the
            default when all channels are rotated.
        count_bias: times the log of the tokens in a row, added to the row's scores. Default: 1 in `"positional"`,
            0 in `"normalized"`.

    Raises:
        ValueError: (possibly wrapped by `strict`) naming the field, its value and what would work.
    """

    model_type = "kvm"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    base_model_tp_plan = ATTENTION_TP_PLAN | {
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_dropout: int | float | None = 0.0
    mlp_bias: bool = False

    use_qk_norm: bool = False
    no_rope_layers: list[int] | None = None
    layer_types: list[str] | None = None
    sliding_window: int | None = None

    chunk_size: int = 256
    num_window_chunks: int = 2
    num_sink_tokens: int = 1
    state_budget: str = "power_law"
    state_size: int = 256
    state_growth_factor: int | float = 16.0
    state_growth_exponent: int | float = 0.5
    state_saturation: int | None = None
    state_round_to: int = 1
    state_max_size: int | None = None
    gate_keys: bool | None = None
    gate_values: bool | None = None
    gate_appends: bool = True
    gate_initial_state: bool = False
    value_radius: bool = True
    region_temperatures: bool = True
    state_treatment: str | None = None
    count_bias: int | float | None = None

    def __post_init__(self, **kwargs):
        self.head_dim = default_head_dim(self) if self.head_dim is None else self.head_dim
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.layer_types is None:
            self.layer_types = ["kvm_attention"] * self.num_hidden_layers
        super().__post_init__(**kwargs)

        if self.state_treatment is None:
            self.state_treatment = "positional" if self.rotary_channels == self.head_dim else "normalized"
        if self.count_bias is None:
            self.count_bias = 1.0 if self.state_treatment == "positional" else 0.0
        if self.gate_keys is None:
            self.gate_keys = self.state_treatment == "normalized"
        if self.gate_values is None:
            self.gate_values = self.state_treatment == "normalized"

    @property
    def rotary_channels(self) -> int:
        """`r`: the first channels of a head, which RoPE rotates."""
        return int(self.head_dim * self.rope_parameters.get("partial_rotary_factor", 1.0))

    @property
    def window_size(self) -> int:
        """`L`: tokens of the block sliding window."""
        return self.chunk_size * self.num_window_chunks

    def uses_rope(self, layer_idx: int) -> bool:
        return self.no_rope_layers is None or bool(self.no_rope_layers[layer_idx])

    # `strict` runs every `validate_*` after construction.

    def validate_architecture(self):
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            at_least(self, name, 1)
        at_least(self, "num_key_value_heads", 1)
        at_least(self, "head_dim", 1)
        at_least(self, "chunk_size", 1)
        at_least(self, "num_window_chunks", 1)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_attention_heads` ({self.num_attention_heads}) must be a multiple of `num_key_value_heads` "
                f"({self.num_key_value_heads}): every key/value head serves the same number of query heads."
            )
        if any(isinstance(value, dict) for value in self.rope_parameters.values()):
            raise ValueError(
                f"`rope_parameters` must be one set for all layers, got {self.rope_parameters}. Layers may only go "
                "without RoPE, by `no_rope_layers`."
            )
        if self.rotary_channels % 2 or not 0 < self.rotary_channels <= self.head_dim:
            raise ValueError(
                f"RoPE turns pairs of channels, but `head_dim` {self.head_dim} with `partial_rotary_factor` "
                f"{self.rope_parameters.get('partial_rotary_factor', 1.0)} gives {self.rotary_channels} channels. "
                f"Choose them so that their product is even and at most `head_dim`."
            )
        rope_type = self.rope_parameters.get("rope_type")
        if rope_type not in ROPE_TYPES:
            raise ValueError(
                f"RoPE type {rope_type!r} is not supported: keys in the state must be comparable with later ones, which "
                f"needs constant frequencies. Types that have them: {', '.join(ROPE_TYPES)}."
            )
        if self.no_rope_layers is not None and len(self.no_rope_layers) < self.num_hidden_layers:
            raise ValueError(
                f"`no_rope_layers` has {len(self.no_rope_layers)} entries for {self.num_hidden_layers} layers; "
                "give at least one per layer (1 with RoPE, 0 without), or None."
            )

    def validate_layer_type(self):
        check_layer_types(self, LAYER_TYPES)

    def validate_window(self):
        if "kvm_attention" in self.layer_types and self.window_size > self.max_position_embeddings:
            raise ValueError(
                f"The window of `chunk_size` {self.chunk_size} times `num_window_chunks` {self.num_window_chunks} = "
                f"{self.window_size} tokens is longer than `max_position_embeddings` {self.max_position_embeddings}: "
                "no token would ever reach the state. Choose a shorter window."
            )

    def validate_state(self):
        check_state(self)

    def validate_treatment(self):
        one_of(self, "state_treatment", STATE_TREATMENTS)
        if self.state_treatment == "normalized" and self.rotary_channels == self.head_dim:
            raise ValueError(
                "`state_treatment` 'normalized' sees only channels without rotation, and this model rotates all "
                f"{self.head_dim}. Use 'positional', or a `partial_rotary_factor` below 1."
            )
        if (self.state_treatment == "positional" or self.count_bias) and self.gate_keys != self.gate_values:
            raise ValueError(
                f"`state_treatment` 'positional' and a `count_bias` weigh a token by one gate: `gate_keys` "
                f"{self.gate_keys} and `gate_values` {self.gate_values} must be equal."
            )


def default_head_dim(config) -> int:
    if config.num_attention_heads < 1 or config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"`hidden_size` {config.hidden_size} is not a multiple of `num_attention_heads` "
            f"{config.num_attention_heads}. Give another, or `head_dim`."
        )
    return config.hidden_size // config.num_attention_heads


def check_layer_types(config, known):
    """One known type for each layer, and a window for those that slide."""
    unknown = sorted(set(config.layer_types) - set(known))
    if unknown:
        raise ValueError(f"`layer_types` has unknown entries {unknown}; known are {list(known)}.")
    if len(config.layer_types) != config.num_hidden_layers:
        raise ValueError(
            f"`layer_types` has {len(config.layer_types)} entries for `num_hidden_layers` {config.num_hidden_layers}."
        )
    if "sliding_attention" in config.layer_types and (config.sliding_window is None or config.sliding_window < 2):
        raise ValueError(
            f"`sliding_attention` layers need `sliding_window` of 2 or more (transformers' cache cannot hold a window of "
            f"1), got {config.sliding_window}."
        )


def check_state(config):
    """The checks of a KVM layer's state, for every config that has its fields."""
    one_of(config, "state_budget", STATE_BUDGETS)
    at_least(config, "num_sink_tokens", 0)
    at_least(config, "state_size", 1)
    at_least(config, "state_round_to", 1)
    if config.state_budget == "saturation" and (config.state_saturation is None or config.state_saturation < 1):
        raise ValueError(
            f"`state_budget` 'saturation' needs `state_saturation` of 1 or more, got {config.state_saturation}."
        )
    if not 0 < config.state_growth_factor < math.inf or not 0 <= config.state_growth_exponent <= 1:
        raise ValueError(
            f"`state_growth_factor` must be positive and `state_growth_exponent` between 0 and 1, got "
            f"{config.state_growth_factor} and {config.state_growth_exponent}."
        )
    if config.num_sink_tokens >= config.chunk_size:
        raise ValueError(
            f"`num_sink_tokens` {config.num_sink_tokens} leaves no row to merge into: the state starts with "
            f"`chunk_size` {config.chunk_size} rows. Use fewer sinks."
        )
    if config.state_size < config.num_sink_tokens:
        raise ValueError(
            f"`state_size` {config.state_size} is smaller than its {config.num_sink_tokens} `num_sink_tokens`."
        )
    if config.state_max_size is not None and config.state_max_size < config.chunk_size:
        raise ValueError(
            f"`state_max_size` {config.state_max_size} cannot be kept: the state starts with one row for each of "
            f"`chunk_size` {config.chunk_size} tokens. Raise it, or use smaller chunks."
        )
    if config.state_budget == "fixed" and config.state_size < config.chunk_size:
        raise ValueError(
            f"A fixed `state_size` of {config.state_size} cannot be kept: the state starts with one row for each "
            f"of `chunk_size` {config.chunk_size} tokens. Raise it, or use smaller chunks."
        )


def at_least(config, name, least):
    value = getattr(config, name)
    if value < least:
        raise ValueError(f"`{name}` must be {least} or more, got {value}.")


def one_of(config, name, known):
    value = getattr(config, name)
    if value not in known:
        raise ValueError(f"`{name}` must be one of {list(known)}, got {value!r}.")


KVMConfig.register_for_auto_class()

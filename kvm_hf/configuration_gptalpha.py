"""What a GPTAlpha-2 model is: the backbone of the Key-Value Means paper. Names, defaults, presets, checks.

Source: Goldstein & Cheah, Key-Value Means, arXiv 2605.09877; our specification, section 7. muP-style scaling is not
part of it.
"""

import math

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

from .configuration_kvm import ATTENTION_TP_PLAN, at_least, check_layer_types, check_state, default_head_dim, one_of

LAYER_TYPES = ("kvm_attention", "full_attention", "sliding_attention", "block_sliding_attention")
VALUE_RESIDUALS = ("gated", "linear", "none")

# The paper's runs. Heads have 128 channels.
SIZES = {
    "120M": dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=6),
    "350M": dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=8),
}
SQRT = dict(state_budget="power_law", state_growth_factor=16.0, state_growth_exponent=0.5, state_size=256)
SATURATION = dict(state_budget="saturation", state_saturation=1024, state_size=1, sliding_window=256)
NO_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.0}
RUNS = {
    "kvm-256": (["kvm_attention"], dict(state_budget="fixed", state_size=256)),
    "kvm-sqrt": (["kvm_attention"], SQRT),
    "kvm-saturation-hybrid": (["sliding_attention", "kvm_attention"], SATURATION),
    "kvm-saturation-hybrid-nope": (["sliding_attention", "kvm_attention"], SATURATION | {"rope_parameters": NO_ROPE}),
    "bswa": (["block_sliding_attention"], dict(num_sink_tokens=0)),
    "full": (["full_attention"], {}),
    "full-hybrid": (["sliding_attention", "full_attention"], dict(sliding_window=256)),
    "full-hybrid-nope": (["sliding_attention", "full_attention"], dict(sliding_window=256, rope_parameters=NO_ROPE)),
}


@strict
class GPTAlphaConfig(PreTrainedConfig):
    """Configuration of `GPTAlphaModel`.

    Args:
        head_dim: channels per head; `hidden_size / num_attention_heads` by default. There are as many key/value heads
            as query heads.
        ffn_expansion: the MLP has `int(ffn_expansion * hidden_size) // 32 * 32` channels inside.
        layer_types: per layer `"kvm_attention"` (the default), `"full_attention"`, `"sliding_attention"`, or
            `"block_sliding_attention"` (the window of a KVM layer without its state; `num_sink_tokens` first tokens stay).
        sliding_window: tokens that a query of a `"sliding_attention"` layer sees, itself included.
        rope_parameters: RoPE of all but sliding layers, on the first half of the channels by default
            (`partial_rotary_factor`; 0 is none); `sliding_rope_parameters`: that of sliding layers, all channels.
        value_residual: how the values of the first layer of a kind join those of the others: `"gated"`, `"linear"` or
            `"none"`.
        token_shift_attention, token_shift_mlp: mix each token's projections, and the MLP's input, with the token before.
        block_lambdas: every block starts from a learned mix of its input and the embeddings.
        skip_connections: blocks of the second half add the output of their mirror image in the first.
        residual_scale: factor of every branch.
        logit_softcap: `cap * tanh(logits / cap)`, or None.

    The fields of the window and of the state are those of `KVMConfig`.

    Raises:
        ValueError: (possibly wrapped by `strict`) naming the field, its value and what would work.
    """

    model_type = "kvm_gptalpha"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    base_model_tp_plan = ATTENTION_TP_PLAN | {
        "layers.*.self_attn.value_gate.up": "colwise",
        "layers.*.self_attn.value_gate.bias": "colwise",
        "layers.*.self_attn.shift_q": "colwise",
        "layers.*.self_attn.shift_k": "colwise",
        "layers.*.self_attn.shift_v": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }

    vocab_size: int = 50304
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 6
    head_dim: int | None = None
    ffn_expansion: int | float = 4.0
    max_position_embeddings: int = 131072
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False
    rope_parameters: dict | None = None
    sliding_rope_parameters: dict | None = None
    attention_dropout: int | float | None = 0.0
    layer_types: list[str] | None = None
    sliding_window: int | None = None

    value_residual: str = "gated"
    token_shift_attention: bool = True
    token_shift_mlp: bool = True
    block_lambdas: bool = False
    skip_connections: bool = False
    residual_scale: int | float = 1.0
    logit_softcap: int | float | None = None

    chunk_size: int = 256
    num_window_chunks: int = 2
    num_sink_tokens: int = 1
    state_budget: str = "fixed"
    state_size: int = 256
    state_growth_factor: int | float = 16.0
    state_growth_exponent: int | float = 0.5
    state_saturation: int | None = None
    state_round_to: int = 1
    state_max_size: int | None = None
    gate_keys: bool = True
    gate_values: bool = True
    gate_appends: bool = True
    gate_initial_state: bool = False
    value_radius: bool = True
    region_temperatures: bool = True

    # What the shared attention asks of every config, and what is fixed here.
    state_treatment = "normalized"
    count_bias = 0.0
    attention_bias = False
    use_qk_norm = False  # this backbone brings its own

    @classmethod
    def preset(cls, run: str, size: str = "120M", **fields) -> "GPTAlphaConfig":
        """The paper's `run` (a key of `RUNS`) at a `size` (`"120M"` or `"350M"`), with other `fields` if given."""
        if run not in RUNS or size not in SIZES:
            raise ValueError(f"Runs are {list(RUNS)} and sizes {list(SIZES)}, got {run!r} and {size!r}.")
        pattern, settings = RUNS[run]
        layers = fields.get("num_hidden_layers", SIZES[size]["num_hidden_layers"])
        layer_types = (pattern * layers)[:layers]
        return cls(**{**SIZES[size], "layer_types": layer_types, **settings, **fields})

    def __post_init__(self, **kwargs):
        self.head_dim = default_head_dim(self) if self.head_dim is None else self.head_dim
        if self.layer_types is None:
            self.layer_types = ["kvm_attention"] * self.num_hidden_layers
        default = {"rope_type": "default", "rope_theta": 10000.0}
        self.rope_parameters = default | {"partial_rotary_factor": 0.5} | (self.rope_parameters or {})
        self.sliding_rope_parameters = default | {"partial_rotary_factor": 1.0} | (self.sliding_rope_parameters or {})
        super().__post_init__(**kwargs)

    @property
    def num_key_value_heads(self) -> int:
        return self.num_attention_heads

    @property
    def intermediate_size(self) -> int:
        return int(self.ffn_expansion * self.hidden_size) // 32 * 32

    @property
    def window_size(self) -> int:
        """`L`: tokens of the block sliding window."""
        return self.chunk_size * self.num_window_chunks

    @property
    def rotary_channels(self) -> int:
        """`r` of KVM layers: the first channels of a head, which RoPE rotates."""
        return self.rotary_channels_of("kvm_attention")

    @property
    def num_token_shifts(self) -> int:
        """Layers of the cache, behind those of attention, that hold a last token: for each layer's attention and MLP."""
        return self.num_hidden_layers * (self.token_shift_attention + self.token_shift_mlp)

    def rope_of(self, layer_type: str) -> dict:
        return self.sliding_rope_parameters if layer_type == "sliding_attention" else self.rope_parameters

    def rotary_channels_of(self, layer_type: str) -> int:
        return int(self.head_dim * self.rope_of(layer_type).get("partial_rotary_factor", 1.0))

    def uses_rope(self, layer_idx: int) -> bool:
        return self.rotary_channels_of(self.layer_types[layer_idx]) > 0

    # `strict` runs every `validate_*` after construction.

    def validate_architecture(self):
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim"):
            at_least(self, name, 1)
        at_least(self, "chunk_size", 1)
        at_least(self, "num_window_chunks", 1)
        if self.intermediate_size < 32:
            raise ValueError(f"`ffn_expansion` {self.ffn_expansion} leaves the MLP without a channel; 32 at least.")
        for layer_type in set(self.layer_types):
            rope, channels = self.rope_of(layer_type), self.rotary_channels_of(layer_type)
            if rope.get("rope_type") != "default":
                raise ValueError(f"RoPE type {rope.get('rope_type')!r} is not supported here, only 'default'.")
            if not 0 < rope["rope_theta"] < math.inf:
                raise ValueError(f"`rope_theta` must be a positive number, got {rope['rope_theta']}.")
            if channels % 2 or not 0 <= channels <= self.head_dim:
                raise ValueError(
                    f"RoPE turns pairs of channels, but `head_dim` {self.head_dim} with `partial_rotary_factor` "
                    f"{rope.get('partial_rotary_factor')} gives {channels} channels for {layer_type} layers."
                )
        one_of(self, "value_residual", VALUE_RESIDUALS)
        if self.skip_connections and self.num_hidden_layers % 2:
            raise ValueError(
                f"`skip_connections` pair the blocks of two halves, but `num_hidden_layers` is {self.num_hidden_layers}."
            )
        if not 0 < abs(self.residual_scale) < math.inf:
            raise ValueError(f"`residual_scale` must be a number other than 0, got {self.residual_scale}.")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(f"`pad_token_id` {self.pad_token_id} is not one of `vocab_size` {self.vocab_size} ids.")
        if self.logit_softcap is not None and self.logit_softcap <= 0:
            raise ValueError(f"`logit_softcap` must be positive or None, got {self.logit_softcap}.")

    def validate_layer_type(self):
        check_layer_types(self, LAYER_TYPES)

    def validate_state(self):
        check_state(self)
        if "kvm_attention" in self.layer_types and self.rotary_channels == self.head_dim:
            raise ValueError(
                f"The state sees only channels without rotation, and RoPE turns all {self.head_dim} of them. Give "
                "`rope_parameters` a `partial_rotary_factor` below 1."
            )


GPTAlphaConfig.register_for_auto_class()

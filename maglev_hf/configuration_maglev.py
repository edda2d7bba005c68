"""What a Maglev model is: names, defaults, and checks. No computation."""

import math

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

LAYER_TYPES = ("sliding_attention", "full_attention")
MEMORY_INJECTIONS = ("kv", "residual", "cross_attention", "none")
ROLLOUTS = ("sequential", "fixed_point", "teacher_forced")
# Types of RoPE with constant frequencies: a cached key is never turned again.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Tensor parallelism cuts the layers of either stack between heads. A model leaves out the rules for what it lacks.
LAYER_TP_PLAN = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}


@strict
class MaglevConfig(PreTrainedConfig):
    """Configuration of `MaglevModel`: every field of `LlamaConfig`, and what makes it remember.

    Source: Liu & Liu, Maglev: Sliding Recurrent Memory, arXiv 2608.02870. The defaults are the paper's model (nanochat
    d20). The fields that Llama does not have:

    Args:
        sliding_window: `W`, tokens that a query sees, itself included.
        layer_types: per decoder layer `"sliding_attention"` (the default) or `"full_attention"`.
        prefiller_layer_types: the same for the prefiller; the default alternates, sliding first.
        share_prefiller: whether the prefiller uses the decoder's blocks and final norm, or has its own.
        consistency_weight: of the distance between memories and targets in the loss. Default: 0.1 for a shared
            prefiller, 1 for a separate one.
        memory_injection: how a token reads the memory of the token before: `"kv"` into its keys and values,
            `"residual"` into the residual stream before the first block, `"cross_attention"` by attention over the
            memories in the window, `"none"` not at all, which is a plain decoder.
        final_logit_softcapping: logits are `cap * tanh(logits / cap)`; None leaves them as they are.
        use_qk_norm: RMSNorm without a weight on queries and keys after RoPE.
        gated_mlp: a gated MLP with `hidden_act` as in Llama, else `relu(x W_up)^2 W_down`.
        use_residual_scales: learned scales per block of the residual stream and of the embedding added to it.
        norm_embeddings: RMSNorm without a weight on the embeddings.
        rollout: how the memories of several tokens in one call are found: `"sequential"`, `"fixed_point"` (in
            parallel, until none moves by more than `rollout_tolerance`), or `"teacher_forced"` (a prompt reads the
            prefiller's targets instead, an approximation).
        rollout_tolerance: root mean square over the channels of a memory, which are of the order of 1.
        detach_memory: nothing flows back through memories that are fed, be they targets or a sweep's.
        detach_target: nothing flows back through the targets in the distance to them.
        self_feeding_sweeps: additional passes of training, each fed the memories of the one before; 0 in the paper.

    With `detach_memory` and `detach_target` the prefiller is frozen: its parameters ask for no gradient.

    Raises:
        ValueError: (possibly wrapped by `strict`) naming the field, its value and what would work.
    """

    model_type = "maglev"
    keys_to_ignore_at_inference = ["past_key_values", "cache", "ce_loss", "consistency_loss"]
    # What a layer makes of a memory is cut likewise; the memory is whole everywhere.
    base_model_tp_plan = LAYER_TP_PLAN | {
        "layers.*.self_attn.memory.k_proj": "colwise",
        "layers.*.self_attn.memory.v_proj": "colwise",
        "layers.*.self_attn.memory.local_gate": "colwise",
        "layers.*.self_attn.memory.memory_gate": "colwise",
    }

    vocab_size: int = 65536
    hidden_size: int = 1280
    intermediate_size: int = 5120
    num_hidden_layers: int = 20
    num_attention_heads: int = 10
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_dropout: int | float | None = 0.0
    mlp_bias: bool = False

    sliding_window: int | None = 512
    layer_types: list[str] | None = None
    prefiller_layer_types: list[str] | None = None
    share_prefiller: bool = True
    consistency_weight: int | float | None = None
    memory_injection: str = "kv"
    final_logit_softcapping: int | float | None = 15.0
    use_qk_norm: bool = True
    gated_mlp: bool = False
    use_residual_scales: bool = True
    norm_embeddings: bool = True
    rollout: str = "fixed_point"
    rollout_tolerance: int | float = 1e-4
    detach_memory: bool = False
    detach_target: bool = False
    self_feeding_sweeps: int = 0

    def __post_init__(self, **kwargs):
        if self.head_dim is None:
            if self.num_attention_heads < 1 or self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"`hidden_size` {self.hidden_size} is not a multiple of `num_attention_heads` "
                    f"{self.num_attention_heads}. Give another, or `head_dim`."
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.layer_types is None:
            self.layer_types = ["sliding_attention"] * self.num_hidden_layers
        if self.prefiller_layer_types is None:
            self.prefiller_layer_types = [LAYER_TYPES[i % 2] for i in range(self.num_hidden_layers)]
        if self.consistency_weight is None:
            self.consistency_weight = 0.1 if self.share_prefiller else 1.0
        super().__post_init__(**kwargs)

    @property
    def rotary_channels(self) -> int:
        """The first channels of a head, which RoPE rotates."""
        return int(self.head_dim * self.rope_parameters.get("partial_rotary_factor", 1.0))

    # `strict` runs every `validate_*` after construction.

    def validate_architecture(self):
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            at_least(self, name, 1)
        at_least(self, "num_key_value_heads", 1)
        at_least(self, "head_dim", 1)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_attention_heads` ({self.num_attention_heads}) must be a multiple of `num_key_value_heads` "
                f"({self.num_key_value_heads}): every key/value head serves the same number of query heads."
            )
        if any(isinstance(value, dict) for value in self.rope_parameters.values()):
            raise ValueError(f"`rope_parameters` must be one set for all layers, got {self.rope_parameters}.")
        if self.rotary_channels % 2 or not 0 < self.rotary_channels <= self.head_dim:
            raise ValueError(
                f"RoPE turns pairs of channels, but `head_dim` {self.head_dim} with `partial_rotary_factor` "
                f"{self.rope_parameters.get('partial_rotary_factor', 1.0)} gives {self.rotary_channels} channels. "
                f"Choose them so that their product is even and at most `head_dim`."
            )
        rope_type = self.rope_parameters.get("rope_type")
        if rope_type not in ROPE_TYPES:
            raise ValueError(
                f"RoPE type {rope_type!r} is not supported: its frequencies change with the length. Types that can be "
                f"used: {', '.join(ROPE_TYPES)}."
            )
        if self.final_logit_softcapping is not None and not 0 < self.final_logit_softcapping < math.inf:
            raise ValueError(
                f"`final_logit_softcapping` must be positive, or None, got {self.final_logit_softcapping}."
            )

    def validate_layer_type(self):
        for name in ("layer_types", "prefiller_layer_types"):
            types = getattr(self, name)
            unknown = sorted(set(types) - set(LAYER_TYPES))
            if unknown:
                raise ValueError(f"`{name}` has unknown entries {unknown}; known are {list(LAYER_TYPES)}.")
            if len(types) != self.num_hidden_layers:
                raise ValueError(f"`{name}` has {len(types)} entries for `num_hidden_layers` {self.num_hidden_layers}.")
            if "sliding_attention" in types and (self.sliding_window is None or self.sliding_window < 2):
                raise ValueError(
                    "`sliding_attention` layers need `sliding_window` of 2 or more (transformers' cache cannot hold a "
                    f"window of 1), got {self.sliding_window}."
                )

    def validate_memory(self):
        one_of(self, "memory_injection", MEMORY_INJECTIONS)
        one_of(self, "rollout", ROLLOUTS)
        at_least(self, "self_feeding_sweeps", 0)
        for name in ("rollout_tolerance", "consistency_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"`{name}` must be 0 or more, got {getattr(self, name)}.")


def at_least(config, name, least):
    value = getattr(config, name)
    if value < least:
        raise ValueError(f"`{name}` must be {least} or more, got {value}.")


def one_of(config, name, known):
    value = getattr(config, name)
    if value not in known:
        raise ValueError(f"`{name}` must be one of {list(known)}, got {value!r}.")


MaglevConfig.register_for_auto_class()

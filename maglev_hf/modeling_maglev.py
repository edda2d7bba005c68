"""A sliding-window decoder that reads its own memory of the token before, and the prefiller that trains it in parallel.

Liu & Liu, Maglev: Sliding Recurrent Memory, arXiv 2608.02870; equations and names as in our specification. Parameters of
the decoder are named as in transformers' Llama. The order is that of transformers' model files: norm, RoPE, MLP, memory,
attention, layer, prefiller, model, heads.

Depends on `configuration_maglev`, `inputs_maglev`, `cache_maglev`, `parallel_maglev` and `rollout_maglev` beside it, and on
transformers.
"""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults

from .cache_maglev import MaglevCache, add_memory, check_cache, part_of, restore, snapshot
from .configuration_maglev import LAYER_TP_PLAN, ROLLOUTS, MaglevConfig
from .inputs_maglev import MaglevInputs, read_inputs
from .padding_maglev import items_within_sequences, labels_within_sequences
from .parallel_maglev import check_heads, rules_for, shared_by_heads
from .rollout_maglev import Rollout, fixed_point, sequential

# transformers 5.24 calls the cache `cache` in inputs and outputs, releases before it `past_key_values`.
CACHE_NAME = "cache" if "cache" in {field.name for field in fields(BaseModelOutputWithPast)} else "past_key_values"


# For PEFT adapters (`peft_maglev`): modules to adapt, per model type, and the ends of the names of the parameters that a
# retrofit adds. A prefiller of its own is left as it is.
PEFT_TARGETS = {"maglev": r"(?!.*prefiller)(.*\.)?layers\.\d+\.self_attn\.[qkvo]_proj"}
PEFT_PARAMETERS = (
    *(f"memory.{part}.weight" for part in ("k_proj", "v_proj", "k_norm", "local_gate", "memory_gate")),
    "residual_scale",
    "embedding_scale",
)


def rms_normed(hidden: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last dimension, computed in at least float32."""
    precise = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    return (precise * torch.rsqrt(precise.pow(2).mean(-1, keepdim=True) + eps)).to(hidden.dtype)


class MaglevRMSNorm(nn.Module):
    """Root mean square norm over the last dimension with a learned weight."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight * rms_normed(hidden, self.eps)


class MaglevRotaryEmbedding(nn.Module):
    """Cosine and sine tables of RoPE for the first `r` channels of a head."""

    def __init__(self, config: MaglevConfig):
        super().__init__()
        self.config = config
        self.rope_type = config.rope_parameters["rope_type"]
        init_fn = ROPE_INIT_FUNCTIONS.get(self.rope_type, self.compute_default_rope_parameters)
        inv_freq, self.attention_scaling = init_fn(config)
        # transformers' `_init_weights` fills both again when a checkpoint is loaded through the meta device.
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config: MaglevConfig, *args, **kwargs) -> tuple[torch.Tensor, float]:
        channels = torch.arange(0, config.rotary_channels, 2, dtype=torch.float)
        return 1.0 / config.rope_parameters["rope_theta"] ** (channels / config.rotary_channels), 1.0

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions `[1 or B, T]` to cosines and sines `[1 or B, T, r]` in at least float32."""
        precise = torch.promote_types(self.inv_freq.dtype, torch.float32)
        angles = positions[..., None].to(precise) * self.inv_freq.to(positions.device, precise)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


def apply_rotary(hidden: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotates pairs `(i, i + r/2)` of the first `r` channels of `[B, heads, T, D]`."""
    cos, sin = (table[:, None].to(hidden.dtype) for table in position_embeddings)
    channels = cos.shape[-1]
    rotary, rest = hidden[..., :channels], hidden[..., channels:]
    first, second = rotary.chunk(2, dim=-1)
    rotated = rotary * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


class MaglevMLP(nn.Module):
    """The paper's `relu(x W_up)^2 W_down`, or Llama's gated MLP."""

    def __init__(self, config: MaglevConfig):
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gated = config.gated_mlp
        if self.gated:
            self.gate_proj = nn.Linear(hidden, inner, bias=bias)
            self.act_fn = ACT2FN[config.hidden_act]
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        up = self.up_proj(hidden)
        return self.down_proj(self.act_fn(self.gate_proj(hidden)) * up if self.gated else F.relu(up).square())


class MaglevMemory(nn.Module):
    """Keys and values of the memory that is fed to a token, and how much of them it takes (specification, section 1)."""

    def __init__(self, config: MaglevConfig):
        super().__init__()
        self.head_dim = config.head_dim
        width = config.num_key_value_heads * config.head_dim
        self.k_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_norm = MaglevRMSNorm(config.head_dim, config.rms_norm_eps)
        # With cross-attention it weighs what every query head read; into keys and values, it is per channel of those.
        self.is_kv = config.memory_injection == "kv"
        if self.is_kv:
            self.local_gate = nn.Linear(config.hidden_size, width, bias=False)
        gated = width if self.is_kv else config.num_attention_heads * config.head_dim
        self.memory_gate = nn.Linear(config.hidden_size, gated, bias=False)

    def project(self, fed: torch.Tensor, position_embeddings) -> tuple[torch.Tensor, torch.Tensor]:
        """The memory `[B, T, d]` as keys and values `[B, G, T, D]`."""
        key, value = self._heads(self.k_proj(fed)), self._heads(self.v_proj(fed))
        key = shared_by_heads(self.k_norm, self.k_proj)(key)
        key = key.to(value.dtype).transpose(1, 2)  # the norm's weight is float32 under autocast
        return apply_rotary(key, position_embeddings), value.transpose(1, 2)

    def inject(self, hidden, fed, key, value, position_embeddings) -> tuple[torch.Tensor, torch.Tensor]:
        """The token's own keys and values, and those of its memory, each times its gate."""
        memory_key, memory_value = self.project(fed, position_embeddings)
        local = 2 * self._heads(self.local_gate(hidden)).sigmoid().transpose(1, 2)
        injected = 2 * self._heads(self.memory_gate(hidden)).sigmoid().transpose(1, 2)
        return local * key + injected * memory_key, local * value + injected * memory_value

    def gate(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[B, T, H, D]`, for what cross-attention read."""
        return 2 * self._heads(self.memory_gate(hidden)).sigmoid()

    def _heads(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.unflatten(-1, (-1, self.head_dim))


class MaglevResidualMemory(nn.Module):
    """The memory in the residual stream before the first block (specification, section 3)."""

    def __init__(self, config: MaglevConfig):
        super().__init__()
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.memory_gate = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, embeds: torch.Tensor, fed: torch.Tensor) -> torch.Tensor:
        return embeds + 2 * self.memory_gate(embeds).sigmoid() * self.v_proj(fed)


def eager_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Attention in plain tensor operations; the signature of transformers' attention interface."""
    groups = module.num_key_value_groups
    key, value = (part.repeat_interleave(groups, dim=1) if groups > 1 else part for part in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    precise = torch.promote_types(query.dtype, torch.float32)
    weights = scores.softmax(dim=-1, dtype=precise).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class MaglevAttention(nn.Module):
    """Attention whose keys and values take up the memory that each token is fed, if it is fed one."""

    def __init__(self, config: MaglevConfig, layer_idx: int, reads_memory: bool):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.is_causal = True

        queries, keys, bias = config.num_attention_heads, config.num_key_value_heads, config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, queries * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, keys * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, keys * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(queries * self.head_dim, config.hidden_size, bias=bias)
        self.memory = MaglevMemory(config) if reads_memory else None

    def forward(
        self, hidden, fed, position_embeddings, attention_mask, kv_cache, position_ids, sliding_window, dropout
    ):
        """`hidden` `[B, T, d]`, the normed input; `fed` `[B, T, d]`, or None in the prefiller, which reads no memory."""
        query, key, value = (
            projection(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary(query, position_embeddings), apply_rotary(key, position_embeddings)
        if self.config.use_qk_norm:
            query, key = rms_normed(query, self.config.rms_norm_eps), rms_normed(key, self.config.rms_norm_eps)

        reads_memory = self.memory is not None and fed is not None
        crosses = reads_memory and not self.memory.is_kv
        if crosses:  # one cache layer holds both, the memory's heads behind the token's own
            memory_key, memory_value = self.memory.project(fed, position_embeddings)
            key, value = torch.cat([key, memory_key], dim=1), torch.cat([value, memory_value], dim=1)
        elif reads_memory:
            key, value = self.memory.inject(hidden, fed, key, value, position_embeddings)

        if kv_cache is not None:
            key, value = kv_cache.update(key, value, self.layer_idx)
            if sliding_window is not None:
                # While it records its past, the layer of older transformers returns more than the mask counts.
                visible = sliding_window - 1 + query.shape[2]
                key, value = key[:, :, -visible:], value[:, :, -visible:]

        def attend(key, value):
            interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
            return interface(
                self,
                query,
                key,
                value,
                attention_mask,
                dropout=dropout,
                scaling=self.scaling,
                sliding_window=sliding_window,
                position_ids=position_ids,  # flash attention finds packed sequences by them
            )[0]

        if crosses:
            (key, memory_key), (value, memory_value) = key.chunk(2, dim=1), value.chunk(2, dim=1)
            output = attend(key, value) + self.memory.gate(hidden) * attend(memory_key, memory_value)
        else:
            output = attend(key, value)
        return self.o_proj(output.flatten(2))


class MaglevDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: MaglevConfig, layer_idx: int, reads_memory: bool):
        super().__init__()
        self.self_attn = MaglevAttention(config, layer_idx, reads_memory)
        self.mlp = MaglevMLP(config)
        self.input_layernorm = MaglevRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = MaglevRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, fed: torch.Tensor | None, **kwargs) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), fed, **kwargs)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def run_blocks(
    config, layers, layer_types, scales, hidden, fed, inputs, columns, masks, cache, dropout, states=None
) -> torch.Tensor:
    """A stack without its final norm on some columns of a call (specification, section 1).

    Args:
        scales: `(residual_scale, embedding_scale)` `[N]`, or None.
        hidden: `[B, n, d]`, what enters the first block; fed: `[B, n, d]`, or None for the prefiller.
        states: a list that gets what enters each block.
    """
    embeds = inputs.embeds[:, columns]
    tables = tuple(table[:, columns] for table in inputs.position_embeddings)
    for index, (layer, layer_type) in enumerate(zip(layers, layer_types)):
        if states is not None:
            states.append(hidden)
        if scales is not None:
            residual, embedding = (scale[index].to(hidden.device) for scale in scales)
            hidden = residual * hidden + embedding * embeds.to(hidden.device)
        hidden = layer(
            hidden,
            fed,
            position_embeddings=tables,
            attention_mask=masks[layer_type],
            kv_cache=cache,
            position_ids=inputs.position_ids[:, columns],
            sliding_window=config.sliding_window if layer_type == "sliding_attention" else None,
            dropout=dropout,
        )
    return hidden


class MaglevPreTrainedModel(PreTrainedModel):
    config: MaglevConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MaglevDecoderLayer"]
    # `prefiller` and `decoder` are modules, and `inputs` hold a cache; accelerate would move them.
    _skip_keys_device_placement = ["past_key_values", "cache", "kv_cache", "prefiller", "decoder", "inputs"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    AUTO_MAP = {
        "AutoConfig": "configuration_maglev.MaglevConfig",
        "AutoModel": "modeling_maglev.MaglevModel",
        "AutoModelForCausalLM": "modeling_maglev.MaglevForCausalLM",
        "AutoModelForPreTraining": "modeling_maglev.MaglevForPreTraining",
    }

    def __init__(self, config, *args, **kwargs):
        config.validate()  # it may have been edited since it was made
        super().__init__(config, *args, **kwargs)
        self._made_with_cache = config.use_cache

    def init_parallel_plans(self):
        super().init_parallel_plans()
        self._tp_plan = rules_for(self, self._tp_plan)

    @classmethod
    def maybe_distribute_model(cls, model, distributed_config, *args, **kwargs):
        """As in transformers, which cuts a model here before any weight is read."""
        check_heads(model, distributed_config)
        return super().maybe_distribute_model(model, distributed_config, *args, **kwargs)

    def _initialize_weights(self, module, is_custom_code: bool = False):
        """Never as custom code, of which transformers passes over modules that have no parameters of their own.
        `_init_weights` leaves alone what a checkpoint brought."""
        super()._initialize_weights(module)

    @torch.no_grad()
    def _init_weights(self, module):
        """Also gives what a checkpoint lacks its neutral value: gates 1, residual scales as without them."""
        super()._init_weights(module)
        if isinstance(module, (MaglevMemory, MaglevResidualMemory)):
            init.zeros_(module.memory_gate.weight)
            if hasattr(module, "local_gate"):
                init.zeros_(module.local_gate.weight)
        if isinstance(module, (MaglevModel, MaglevPrefiller)) and self.config.use_residual_scales:
            init.ones_(module.residual_scale)
            init.zeros_(module.embedding_scale)

    def save_pretrained(self, save_directory, *args, **kwargs):
        """As in transformers; the folder also says which of its classes serves which Auto class. `use_cache` is saved as the
        model was made with: Trainer turns it off."""
        self.config.auto_map = dict(self.AUTO_MAP)
        in_training, self.config.use_cache = self.config.use_cache, self._made_with_cache
        try:
            return super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            self.config.use_cache = in_training


def add_scales(stack: nn.Module, config: MaglevConfig) -> None:
    """Residual scales, of which either stack has its own."""
    if config.use_residual_scales:
        stack.residual_scale = nn.Parameter(torch.ones(config.num_hidden_layers))
        stack.embedding_scale = nn.Parameter(torch.zeros(config.num_hidden_layers))


def scales_of(stack: nn.Module) -> tuple[torch.Tensor, torch.Tensor] | None:
    return (stack.residual_scale, stack.embedding_scale) if hasattr(stack, "residual_scale") else None


class MaglevPrefiller(nn.Module):
    """The stack that makes the targets, with blocks of its own or the decoder's under other masks."""

    def __init__(self, config: MaglevConfig):
        super().__init__()
        self.config = config
        if not config.share_prefiller:
            self._tp_plan, self._fsdp_plan = dict(LAYER_TP_PLAN), {"layers.*": "free_full_weight"}
            self.layers = nn.ModuleList(
                MaglevDecoderLayer(config, index, reads_memory=False) for index in range(config.num_hidden_layers)
            )
            self.norm = MaglevRMSNorm(config.hidden_size, config.rms_norm_eps)
        add_scales(self, config)
        self.is_frozen = config.detach_memory and config.detach_target
        self.requires_grad_(not self.is_frozen)

    def train(self, mode: bool = True) -> "MaglevPrefiller":
        if self.is_frozen:  # not any more where `from_pretrained` put new parameters in; it calls `eval()` after that
            self.requires_grad_(False)
        return super().train(mode)

    def forward(self, inputs: MaglevInputs, decoder: "MaglevModel") -> torch.Tensor:
        """The targets of one call's tokens, `[B, T, d]`, zero at pads. What the cache has seen is not looked at."""
        owner = decoder if self.config.share_prefiller else self
        mask = inputs.attention_mask
        alone = inputs._replace(cache=None, past=0, attention_mask=None if mask is None else mask[:, inputs.past :])
        hidden = run_blocks(
            self.config,
            owner.layers,
            self.config.prefiller_layer_types,
            scales_of(self),
            hidden=inputs.embeds,
            fed=None,
            inputs=alone,
            columns=inputs.columns,
            masks=alone.masks(self.config, self.config.prefiller_layer_types, inputs.columns),
            cache=None,
            dropout=self.config.attention_dropout if self.training else 0.0,
        )
        return inputs.without_pads(owner.norm(hidden), inputs.columns)


class MaglevMade(NamedTuple):
    """What the decoder made of some columns; see `rollout_maglev`."""

    memory: torch.Tensor  # [B, n, d]
    states: list[torch.Tensor] | None
    keep: Callable[[], None]


@dataclass
class MaglevModelOutput(BaseModelOutputWithPast):
    """`target` `[B, T, d]`: what the prefiller made of the tokens, if there is one and it was asked. `sweeps`: parallel
    passes over each block of tokens whose memories were searched for, 1 for tokens that went one by one."""

    target: torch.FloatTensor | None = None
    sweeps: list[int] | None = None


class MaglevModel(MaglevPreTrainedModel):
    """The decoder without a head. Its last hidden states are the memories, one per token."""

    _keys_to_ignore_on_load_unexpected = [r"^prefiller\."]

    def __init__(self, config: MaglevConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        in_layers = config.memory_injection in ("kv", "cross_attention")
        self.layers = nn.ModuleList(
            MaglevDecoderLayer(config, index, reads_memory=in_layers) for index in range(config.num_hidden_layers)
        )
        self.norm = MaglevRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = MaglevRotaryEmbedding(config)
        add_scales(self, config)
        if config.memory_injection == "residual":
            self.memory = MaglevResidualMemory(config)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    @merge_with_config_defaults
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: Cache | None = None,
        fed: torch.Tensor | None = None,
        rollout: str | None = None,
        prefiller: MaglevPrefiller | None = None,
        **kwargs,
    ) -> MaglevModelOutput:
        """As transformers' `LlamaModel.forward`; `past_key_values` is the older name of `cache`. Every token reads the
        memory of the token before it, which the model makes itself; gradients do not pass through what is read.

        Args:
            fed: `[B, T, d]`, what each token reads, in place of the model's own memories: one parallel pass, and
                gradients pass.
            rollout: how the memories are found, in place of `config.rollout`.
            prefiller: makes the targets that a `"teacher_forced"` call reads (gradients pass) if it begins the sequences,
                and from which others search for the fixed point.

        Batches may be padded on the left or the right (`attention_mask`), or packed (`position_ids` that restart at 0,
        or the `cu_seq_lens_q` of transformers' flattening collator): every sequence gives what it gives alone. Packed
        sequences leave no cache behind, and those padded on the right cannot be continued.

        Raises:
            ValueError: an empty input; masks other than padding, `output_attentions`, an unknown or impossible rollout; a
                cache that was not made for this model, or does not fit the mask.
        """
        if rollout is None:
            rollout = self.config.rollout
            if rollout == "teacher_forced" and prefiller is None:  # a checkpoint of training, loaded for deployment
                rollout = "fixed_point"
        if rollout not in ROLLOUTS:
            raise ValueError(f"`rollout` must be one of {list(ROLLOUTS)}, got {rollout!r}.")
        inputs = self._read_inputs(
            input_ids, inputs_embeds, attention_mask, position_ids, cache, past_key_values, use_cache, kwargs
        )
        wants_states = kwargs.get("output_hidden_states")
        wants_states = self.config.output_hidden_states if wants_states is None else wants_states
        target = sweeps = None
        if fed is not None:
            self._check_fed(fed, inputs)
            parts = [self._decode(inputs, inputs.columns, fed, wants_states)]
            parts[0].keep()
        elif self.config.memory_injection == "none":
            parts = [self._decode(inputs, inputs.columns, None, wants_states)]
            parts[0].keep()
        elif rollout == "teacher_forced" and not inputs.past:
            parts, target = self._teacher_forced(inputs, prefiller, wants_states)
        else:
            if prefiller is not None and rollout != "sequential" and (inputs.length > 1 or not inputs.past):
                with torch.no_grad():
                    target = prefiller(inputs=inputs, decoder=self)
            parts, sweeps = self._deployed(inputs, rollout, target, wants_states)

        memory = join([part.memory for part in parts])
        states = None
        if wants_states:
            states = (*(join(of_block) for of_block in zip(*(part.states for part in parts))), memory)
        return MaglevModelOutput(
            last_hidden_state=memory,
            hidden_states=states,
            target=None if inputs.past else target,
            sweeps=sweeps,
            **{CACHE_NAME: inputs.cache},
        )

    def _teacher_forced(self, inputs: MaglevInputs, prefiller, wants_states) -> tuple[list[MaglevMade], torch.Tensor]:
        """One pass that reads the targets; in training `config.self_feeding_sweeps` more, each of which reads what the
        one before it made."""
        if prefiller is None:
            raise ValueError(
                "`rollout='teacher_forced'` needs the prefiller, which only `MaglevForPreTraining` has. Use 'fixed_point' "
                "or 'sequential'."
            )
        with torch.set_grad_enabled(torch.is_grad_enabled() and not prefiller.is_frozen):
            target = memory = prefiller(inputs=inputs, decoder=self)
        first = torch.zeros_like(target[:, :1])
        sweeps = self.config.self_feeding_sweeps if self.training else 0
        for sweep in range(sweeps + 1):
            fed = inputs.shifted(first, memory.detach() if self.config.detach_memory else memory)
            made = self._decode(inputs, inputs.columns, fed, wants_states and sweep == sweeps)
            memory = made.memory
        made.keep()
        return [made], target

    def _deployed(self, inputs: MaglevInputs, rollout: str, guess, wants_states) -> Rollout:
        """Every token reads what the decoder itself made at the token before (specification, section 2)."""
        first = self._first_memory(inputs)
        if inputs.length == 1:
            made, sweeps = self._decode(inputs, inputs.columns, first, wants_states), [1]
        elif torch.is_grad_enabled() or inputs.is_packed:
            # The memories first; then, in one pass, what is made of them.
            with torch.no_grad():
                apart = inputs.apart(self.config)
                guess = inputs.unpacked(guess) if guess is not None and inputs.is_packed else guess
                parts, sweeps = self._roll_out(apart, rollout, guess, wants_states=False)
                memory = join([part.memory for part in parts])
                memory = inputs.packed(memory) if inputs.is_packed else memory
            made = self._decode(inputs, inputs.columns, inputs.shifted(first, memory), wants_states)
        else:
            kept = inputs if inputs.cache is not None else inputs.apart(self.config)
            return self._roll_out(kept, rollout, guess, wants_states)
        made.keep()
        return Rollout([made], sweeps)

    def _roll_out(self, inputs: MaglevInputs, rollout: str, guess, wants_states) -> Rollout:
        """Searches for the memories with the cache of `inputs`, and leaves them there."""
        # FSDP1 wraps a layer, FSDP2 makes it of another class.
        if any(hasattr(self.layers[0], name) for name in ("_fsdp_wrapped_module", "unshard")):
            raise ValueError(
                "Under FSDP each process would search for its memories in another number of passes, and processes would wait for "
                "each other for ever. Train and evaluate `MaglevForPreTraining` with `config.rollout = 'teacher_forced'`, or use "
                "DDP."
            )
        masks = {}

        def run(columns, fed):
            if (columns.start, columns.stop) not in masks:  # the same for every sweep over a block
                masks.clear()
                masks[columns.start, columns.stop] = inputs.masks(self.config, self.config.layer_types, columns)
            masks_of = masks[columns.start, columns.stop]
            return self._decode(inputs, columns, fed, wants_states, masks_of, searches=True)

        first = self._first_memory(inputs)
        if rollout == "sequential":
            return sequential(run, first, inputs.columns)
        return fixed_point(run, first, inputs.columns, guess, self.config.rollout_tolerance)

    def _first_memory(self, inputs: MaglevInputs) -> torch.Tensor:
        """`[B, 1, d]`, what the first column reads."""
        if inputs.cache is None:
            return torch.zeros_like(inputs.embeds[:, :1])
        return inputs.cache.layers[self.config.num_hidden_layers].last(inputs.embeds).detach()

    def _decode(
        self, inputs: MaglevInputs, columns: slice, fed, wants_states, masks=None, searches=False
    ) -> MaglevMade:
        """One parallel pass over some of a call's columns, with the cache as it is; it changes with `keep`."""
        cache = None if inputs.cache is None else snapshot(inputs.cache)
        hidden = inputs.embeds[:, columns]
        if self.config.memory_injection == "residual":
            hidden = self.memory(hidden, fed)
            fed = None
        states = [] if wants_states else None
        hidden = run_blocks(
            self.config,
            self.layers,
            self.config.layer_types,
            scales_of(self),
            hidden,
            fed,
            inputs,
            columns,
            masks or inputs.masks(self.config, self.config.layer_types, columns),
            cache,
            # Every sweep would draw other weights to drop, so that none agrees with the one before.
            self.config.attention_dropout if self.training and not searches else 0.0,
            states,
        )
        memory = inputs.without_pads(self.norm(hidden), columns)

        def keep():
            if cache is None:
                return
            restore(inputs.cache, cache)
            if self.config.memory_injection != "none":
                padding = part_of(inputs.padding, columns)
                inputs.cache.update(memory, None, self.config.num_hidden_layers, padding)

        return MaglevMade(memory, states, keep)

    def _check_fed(self, fed: torch.Tensor, inputs: MaglevInputs) -> None:
        if self.config.memory_injection == "none":
            raise ValueError("`fed` gives memories to read, but this model has `memory_injection='none'`.")
        if tuple(fed.shape) != tuple(inputs.embeds.shape):
            raise ValueError(f"`fed` has shape {tuple(fed.shape)}, expected {tuple(inputs.embeds.shape)} here.")

    @torch.compiler.disable  # it looks at the values of masks and positions
    def _read_inputs(
        self, input_ids, inputs_embeds, attention_mask, position_ids, cache, past_key_values, use_cache, others
    ) -> MaglevInputs:
        """Makes out of what people and `generate()` give to `forward` what the stacks need, or refuses it."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of `input_ids` and `inputs_embeds`.")
        if others.get("output_attentions", self.config.output_attentions):
            raise ValueError(
                "`output_attentions=True` is not available: the memories of a call are found in several passes, each of "
                "which has its own weights."
            )
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if self.config.norm_embeddings:
            inputs_embeds = rms_normed(inputs_embeds, self.config.rms_norm_eps)
        was_given = cache is not None or past_key_values is not None
        cache = self._resolve_cache(cache, past_key_values, use_cache)
        return read_inputs(inputs_embeds, attention_mask, position_ids, cache, was_given, self.rotary_emb, others)

    def _resolve_cache(self, cache, past_key_values, use_cache) -> Cache | None:
        """The one cache to use, whatever it was called; a new one if asked for."""
        if cache is not None and past_key_values is not None and cache is not past_key_values:
            raise ValueError(
                "`cache` and `past_key_values` are two names for one thing; give one of them. (Before transformers 5.24 "
                "`generate()` knows only `past_key_values`, and makes a cache of its own if there is none.)"
            )
        cache = past_key_values if cache is None else cache
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            # The layers run twice, so they must not write to a cache (merge_with_config_defaults warned already).
            if cache is not None:
                raise ValueError(
                    "Gradient checkpointing replays the layers, so a cache can be neither filled nor continued. Give "
                    "the whole sequence without one, or call `model.gradient_checkpointing_disable()`."
                )
            return None
        if cache is None:
            return MaglevCache(self.config) if use_cache else None
        check_cache(cache, self.config)
        add_memory(cache, self.config)
        return cache


class MaglevForCausalLM(MaglevPreTrainedModel, GenerationMixin):
    """Maglev as it is deployed: the decoder with a language modelling head. Loads checkpoints of training as well, and
    leaves the prefiller out."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}
    _keys_to_ignore_on_load_unexpected = [r"^prefiller\."]

    def __init__(self, config: MaglevConfig):
        super().__init__(config)
        self.model = MaglevModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        past_key_values: Cache | None = None,
        rollout: str | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """As transformers' `LlamaForCausalLM.forward`, and as `MaglevModel.forward`. The loss of a padded or packed batch
        counts what a token of the same sequence predicts, and nothing else. It is that of the deployed model also in
        training, where gradients pass through every token's reading of a memory, and not through the memory."""
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            rollout=rollout,
            return_dict=True,
            **kwargs,
        )
        logits = self.compute_logits(outputs.last_hidden_state, logits_to_keep)
        loss = None
        if labels is not None:
            loss, _ = self.compute_ce_loss(logits, labels, attention_mask, position_ids, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            **{CACHE_NAME: getattr(outputs, CACHE_NAME)},
        )

    def compute_logits(self, memory: torch.Tensor, logits_to_keep: int | torch.Tensor = 0) -> torch.Tensor:
        """`[B, T, V]`, or of those positions of `T` that are to be kept."""
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits, cap = self.lm_head(memory[:, kept]), self.config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def compute_ce_loss(self, logits, labels, attention_mask, position_ids, **kwargs) -> tuple[torch.Tensor, object]:
        """The cross-entropy, and what to weigh other means by: this batch's share of `num_items_in_batch`, else 1."""
        given, weight = labels, 1.0
        labels = labels_within_sequences(given, attention_mask, position_ids, kwargs.get("cu_seq_lens_q"))
        if kwargs.get("num_items_in_batch") is not None and kwargs.get("shift_labels") is None:
            items = items_within_sequences(
                kwargs["num_items_in_batch"], given, labels, trainer="maglev_hf.MaglevTrainer"
            )
            kwargs["num_items_in_batch"] = items
            weight = (labels[:, 1:] != -100).sum() / items
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return loss, weight

    @wraps(GenerationMixin.prepare_inputs_for_generation)  # `generate()` looks at the names of the arguments
    def prepare_inputs_for_generation(self, *args, **kwargs):
        # The cache under its older name too, by which PEFT (0.21) sees that a learned prompt has been read already.
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        if CACHE_NAME == "cache" and inputs.get("cache") is not None:
            inputs["past_key_values"] = inputs["cache"]
        return inputs

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        """In place of the cache that transformers makes, one that has a memory from the start and can be saved."""
        given = model_kwargs.get("cache") is not None or model_kwargs.get("past_key_values") is not None
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        if not given and type(model_kwargs.get(CACHE_NAME)) is DynamicCache:
            model_kwargs[CACHE_NAME] = MaglevCache.of(model_kwargs[CACHE_NAME], self.config)


@dataclass
class MaglevForPreTrainingOutput(CausalLMOutputWithPast):
    """`ce_loss` and `consistency_loss`: the two terms of training's loss; the second is not weighted."""

    ce_loss: torch.FloatTensor | None = None
    consistency_loss: torch.FloatTensor | None = None


class MaglevForPreTraining(MaglevForCausalLM):
    """Maglev as it is trained: the decoder, and the prefiller whose targets it reads in parallel."""

    _keys_to_ignore_on_load_unexpected = []

    def __init__(self, config: MaglevConfig):
        super().__init__(config)
        if config.memory_injection == "none":
            raise ValueError(
                "`memory_injection='none'` leaves nothing for a prefiller to teach: train `MaglevForCausalLM` instead."
            )
        self.prefiller = MaglevPrefiller(config)
        self.loss_type = "ForCausalLM"  # transformers goes by the name of the class
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        past_key_values: Cache | None = None,
        rollout: str | None = None,
        num_tokens_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> MaglevForPreTrainingOutput:
        """As `MaglevForCausalLM.forward`. In training, unless a cache or a `rollout` is given, the decoder reads the
        prefiller's targets, and so it does at `rollout="teacher_forced"`: the loss is then the cross-entropy plus
        `consistency_weight` times the distance between memories and targets (the mean over tokens of the root mean square
        over channels). Otherwise it is the cross-entropy of the deployed model, and the distance is only reported.

        `num_tokens_in_batch` is to the distance what transformers' `num_items_in_batch` is to the cross-entropy: the number of
        real tokens in all batches whose gradients are accumulated. Without it, the batch's share of labels stands for its
        share of tokens."""
        trains = self.training and (labels is not None or torch.is_grad_enabled())  # `generate()` does not
        if trains and rollout is None and cache is None and past_key_values is None:
            rollout = "teacher_forced"
            use_cache = bool(use_cache)  # nobody continues a training batch
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            rollout=rollout,
            prefiller=self.prefiller,
            return_dict=True,
            **kwargs,
        )
        logits = self.compute_logits(outputs.last_hidden_state, logits_to_keep)
        loss = ce_loss = consistency_loss = None
        if labels is not None:
            ce_loss, weight = self.compute_ce_loss(logits, labels, attention_mask, position_ids, **kwargs)
            loss = ce_loss
            if outputs.target is not None:
                distance, tokens = self.compute_consistency(outputs, attention_mask)
                weight = weight if num_tokens_in_batch is None else tokens / num_tokens_in_batch
                consistency_loss = (weight * distance).to(ce_loss.device)
                if (rollout or self.config.rollout) == "teacher_forced":
                    loss = ce_loss + self.config.consistency_weight * consistency_loss
        return MaglevForPreTrainingOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            ce_loss=ce_loss,
            consistency_loss=consistency_loss,
            **{CACHE_NAME: getattr(outputs, CACHE_NAME)},
        )

    def compute_consistency(self, outputs: MaglevModelOutput, attention_mask: torch.Tensor | None):
        """The mean over real tokens of `|memory - target|_2 / sqrt(d)`, and their number."""
        target = outputs.target.detach() if self.config.detach_target else outputs.target
        apart = outputs.last_hidden_state - target.to(outputs.last_hidden_state.device)
        distance = torch.linalg.vector_norm(apart, dim=-1) / apart.shape[-1] ** 0.5  # [B, T]; zero at pads
        real = distance.numel() if attention_mask is None else (attention_mask == 1).sum()
        return distance.sum() / real, real

    def export_decoder(self, directory: str | os.PathLike, **kwargs) -> None:
        """Writes what is deployed to a folder: a `MaglevForCausalLM` without the prefiller. `kwargs` are those of
        `save_pretrained`."""
        config = copy.deepcopy(self.config)
        config.use_cache = self._made_with_cache
        if config.rollout == "teacher_forced":
            config.rollout = "fixed_point"
        with torch.device("meta"):
            decoder = MaglevForCausalLM(config)
        decoder.model, decoder.lm_head = self.model, self.lm_head
        if hasattr(self, "hf_device_map"):  # some weights may lie on disk
            decoder.hf_device_map = self.hf_device_map
        decoder.generation_config = self.generation_config
        decoder.save_pretrained(directory, **kwargs)


def join(parts: list[torch.Tensor]) -> torch.Tensor:
    """Along the tokens."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)


MaglevModel.register_for_auto_class("AutoModel")
MaglevForCausalLM.register_for_auto_class("AutoModelForCausalLM")
MaglevForPreTraining.register_for_auto_class("AutoModelForPreTraining")

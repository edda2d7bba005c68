"""A Llama-style language model whose attention layers may keep a Key-Value Means state instead of a growing cache.

Parameters are named as in transformers' Llama, so that its checkpoints load; a `kvm_attention` layer adds
`state_norm`, `merge_gate`, `state_temperature` and `window_temperature` (specification, section 5). The order is that
of transformers' model files: norm, RoPE, MLP, attention, layer, model, heads.

Depends on `configuration_kvm`, `state_kvm`, `attention_kvm`, `cache_kvm`, `parallel_kvm` and `replay_kvm` beside it, and on
transformers.
"""

from collections.abc import Callable
from dataclasses import fields
from functools import partial, wraps
from typing import NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from transformers import AutoModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention_kvm import CausalMasks, attend, eager_attention, repeat_heads, takes_mask
from .cache_kvm import KVMCache, KVMLayer, KVMStep, attend_alone
from .configuration_kvm import KVMConfig
from .padding_kvm import (
    Padding,
    check_first_positions,
    check_padded_positions,
    items_within_sequences,
    labels_within_sequences,
    packed_positions,
    read_packing,
    read_padding,
)
from .parallel_kvm import check_heads, of_this_process, parameters_of_this_process, rules_for, shared_by_heads
from .replay_kvm import replayed
from .state_kvm import NormalizedKeys, PositionalKeys, SinkKeys, StateRule, choose

# transformers 5.24 calls the cache `cache` in inputs and outputs, releases before it `past_key_values`.
CACHE_NAME = "cache" if "cache" in {field.name for field in fields(BaseModelOutputWithPast)} else "past_key_values"

# Window temperatures nearer to zero count as this: the state's keys are scaled by the ratio of the two, which has to
# fit into float16.
LEAST_TEMPERATURE = 1e-4

# Layers that count tokens per sequence and need no mask from transformers.
KVM_LAYER_TYPES = ("kvm_attention", "block_sliding_attention")


# For PEFT adapters (`peft_kvm`): modules to adapt, per model type, and the ends of the names of the parameters that a
# retrofit adds.
PEFT_TARGETS = {kind: ["q_proj", "k_proj", "v_proj", "o_proj"] for kind in ("kvm", "kvm_gptalpha")}
PEFT_PARAMETERS = (
    "self_attn.merge_gate.weight",
    "self_attn.state_norm.weight",
    "self_attn.state_norm.bias",
    "self_attn.state_temperature",
    "self_attn.window_temperature",
)


class KVMRMSNorm(nn.Module):
    """Root mean square norm over the last dimension with a learned weight, computed in at least float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        precise = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        # One pass over the tensor; `pow` and `mean` are two, with as much memory in between.
        length = torch.linalg.vector_norm(precise, dim=-1, keepdim=True)
        normed = precise * torch.rsqrt(length.square() / precise.shape[-1] + self.eps)
        return self.weight * normed.to(hidden.dtype)


class KVMRotaryEmbedding(nn.Module):
    """Cosine and sine tables of RoPE for the first `r` channels of a head."""

    def __init__(self, config: KVMConfig):
        super().__init__()
        self.config = config
        self.rope_type = config.rope_parameters["rope_type"]
        init_fn = ROPE_INIT_FUNCTIONS.get(self.rope_type, self.compute_default_rope_parameters)
        inv_freq, self.attention_scaling = init_fn(config)
        # transformers' `_init_weights` fills both again when a checkpoint is loaded through the meta device.
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config: KVMConfig, *args, **kwargs) -> tuple[torch.Tensor, float]:
        channels = torch.arange(0, config.rotary_channels, 2, dtype=torch.float)
        return 1.0 / config.rope_parameters["rope_theta"] ** (channels / config.rotary_channels), 1.0

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions of any shape, whole or real, to cosines and sines `[..., r]` in at least float32."""
        precise = torch.promote_types(positions.dtype, torch.float32)
        angles = positions[..., None].to(precise) * self.inv_freq.to(positions.device, precise)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling

    def rotate(self, keys: torch.Tensor, positions: torch.Tensor, inverse: bool) -> torch.Tensor:
        """`keys` `[..., D]` turned to `positions` `[...]`, or, if `inverse`, as they were before they were turned."""
        cos, sin = self(positions)
        if inverse:
            return apply_rotary(keys, cos, -sin, scale=self.attention_scaling**-2)
        return apply_rotary(keys, cos, sin)


def apply_rotary(hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Rotates pairs `(i, i + r/2)` of the first `r` channels, and multiplies these channels by `scale`."""
    channels = cos.shape[-1]
    cos, sin = (table[..., : channels // 2].to(hidden.dtype) for table in (cos, sin))  # the other half is the same
    first, second = hidden[..., :channels].chunk(2, dim=-1)
    rotated = (torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin))
    if scale != 1.0:
        rotated = (rotated[0] * scale, rotated[1] * scale)
    return torch.cat((*rotated, hidden[..., channels:]), dim=-1)


class KVMMLP(nn.Module):
    def __init__(self, config: KVMConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))


class KVMDotProductAttention(nn.Module):
    """Llama's attention, for `full_attention` and `sliding_attention` layers, and the base of the KVM layer."""

    def __init__(self, config: KVMConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        self.use_rope = config.uses_rope(layer_idx)
        self.use_qk_norm = config.use_qk_norm
        self.sliding_window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None

        queries, keys, bias = config.num_attention_heads, config.num_key_value_heads, config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, queries * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, keys * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, keys * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(queries * self.head_dim, config.hidden_size, bias=bias)
        if config.use_qk_norm:
            self.q_norm = KVMRMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = KVMRMSNorm(self.head_dim, config.rms_norm_eps)

    def project(self, hidden: torch.Tensor, position_embeddings) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`[B, T, hidden]` to rotated queries `[B, H, T, D]`, rotated keys and values `[B, G, T, D]`."""
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden).view(shape)
        key = self.k_proj(hidden).view(shape)
        value = self.v_proj(hidden).view(shape).transpose(1, 2)
        if self.use_qk_norm:
            query = shared_by_heads(self.q_norm, self.q_proj)(query)
            key = shared_by_heads(self.k_norm, self.k_proj)(key)
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        if self.use_rope:
            cos, sin = (table.unsqueeze(1) for table in position_embeddings)
            query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
        return query, key, value

    def forward(
        self, hidden, position_embeddings, attention_mask, cache, position_ids, padding, sequences, rotary, **projection
    ) -> tuple[torch.Tensor, None]:
        """`projection`: what `project` of a derived class needs beside. `padding`, `sequences` and `rotary` are for KVM
        layers; here the mask says it all."""
        query, key, value = self.project(hidden, position_embeddings, **projection)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
            if self.sliding_window is not None:
                # While it records its past, the layer of older transformers returns more than the mask counts.
                visible = self.sliding_window - 1 + query.shape[2]
                key, value = key[:, :, -visible:], value[:, :, -visible:]
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        output, _ = interface(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            position_ids=position_ids,  # flash attention finds packed sequences by them
        )
        return self.o_proj(output.flatten(2)), None


class KVMStateLayerNorm(nn.LayerNorm):
    """LayerNorm over memory keys, in the precision of the state whatever the model's dtype."""

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight.to(keys.dtype), self.bias.to(keys.dtype)
        return nn.functional.layer_norm(keys, self.normalized_shape, weight, bias, self.eps)


class LearnedOfState(NamedTuple):
    """What is learned of how a layer keeps its state and attends to it; None of what it lacks."""

    state_norm: Callable[[torch.Tensor], torch.Tensor] | None
    state_temperature: torch.Tensor | None  # [G]
    window_temperature: torch.Tensor | None  # [G]


class KVMAttention(KVMDotProductAttention):
    """Attention over a block sliding window and a state of key-value means, in one softmax."""

    def __init__(self, config: KVMConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        heads = config.num_key_value_heads
        self.rule = StateRule.from_config(config, config.layer_types[layer_idx])
        self.rotary_channels = config.rotary_channels
        self.is_gated = self.rule.gate_keys or self.rule.gate_values
        self.gradient_checkpointing = False  # transformers sets it in every module that has it
        self.has_temperatures = config.region_temperatures and self.rule.state_treatment != "sinks"
        self.has_state_norm = self.rule.state_treatment == "normalized"
        if self.has_state_norm:
            self.state_norm = KVMStateLayerNorm(config.head_dim, eps=1e-5)
        if self.is_gated:
            self.merge_gate = nn.Linear(config.hidden_size, heads, bias=False)
        if self.has_temperatures:
            self.state_temperature = nn.Parameter(torch.ones(heads))
            self.window_temperature = nn.Parameter(torch.ones(heads))

    def treatment(self, rotary: KVMRotaryEmbedding, state_norm: Callable[[torch.Tensor], torch.Tensor] | None):
        """How keys enter the state, are compared with it, and are read from it."""
        if self.rule.state_treatment == "normalized":
            return NormalizedKeys(state_norm, self.rotary_channels if self.use_rope else 0)
        if self.rule.state_treatment == "sinks":
            return SinkKeys()
        return PositionalKeys(rotary.rotate if self.use_rope else lambda keys, positions, inverse: keys)

    def _learned(self) -> LearnedOfState:
        norm, temperatures = None, (None, None)
        if self.has_state_norm:
            norm = shared_by_heads(self.state_norm, self.q_proj)
        if self.has_temperatures:
            temperatures = (
                of_this_process(part, self.q_proj) for part in (self.state_temperature, self.window_temperature)
            )
        return LearnedOfState(norm, *temperatures)

    def _norm_parameters(self) -> dict[str, torch.Tensor]:
        return parameters_of_this_process(self.state_norm, self.q_proj) if self.has_state_norm else {}

    def _step(
        self, query, gates, positions, learned: LearnedOfState, *, rotary, dropout, masks, padding=None, choose=choose
    ) -> KVMStep:
        """One call's tokens as a cache layer takes them.

        The temperature of window keys is put on the queries, and its inverse on the state's keys: the same scores, while the
        buffer holds the keys that the state will need.
        """
        scale, state_scale = None, lambda: 1.0
        if self.has_temperatures:
            window = learned.window_temperature[:, None, None]
            window = torch.where(window.abs() < LEAST_TEMPERATURE, LEAST_TEMPERATURE, window)
            scale = repeat_heads(window[None], self.num_key_value_groups).to(query.dtype)
            state_scale = partial(torch.div, learned.state_temperature[:, None, None], window)
        return KVMStep(
            rule=self.rule,
            treatment=self.treatment(rotary, learned.state_norm),
            queries=query,
            gates=gates,
            positions=positions,
            state_scale=state_scale,
            takes_mask=takes_mask(self.config._attn_implementation),
            attend=partial(self._attend, scale, dropout, masks),
            padding=padding,
            choose=choose,
        )

    def _attend(self, scale: torch.Tensor | None, dropout: float, masks: CausalMasks, queries, keys, values, bias):
        """As `attention_kvm.attend`, with `scale` `[1, H, 1, 1]` on the queries."""
        return attend(self, queries if scale is None else queries * scale, keys, values, bias, dropout, masks)

    def forward(
        self, hidden, position_embeddings, attention_mask, cache, position_ids, padding, sequences, rotary, **projection
    ) -> tuple[torch.Tensor, None]:
        query, key, value = self.project(hidden, position_embeddings, **projection)
        positions, gates = position_ids.expand(hidden.shape[:2]), None
        if self.is_gated:
            gates = (1 + nn.functional.elu(self.merge_gate(hidden))).transpose(1, 2)[..., None]
        if padding is not None:
            query, key, value = (padding.align(part, dim=2) for part in (query, key, value))
            positions, gates = padding.align(positions), None if gates is None else padding.align(gates, dim=2)

        # Healing calls a layer with the mask that the teacher's layer had.
        masks = attention_mask if isinstance(attention_mask, CausalMasks) else CausalMasks()
        dropout = self.attention_dropout if self.training else 0.0
        make_step = partial(self._step, rotary=rotary, dropout=dropout, masks=masks)
        if cache is not None:
            step = make_step(query, gates, positions, self._learned(), padding=padding)
            output, _ = cache.update(key, value, self.layer_idx, step)
        else:
            output = self._without_cache(key, value, query, gates, positions, sequences, make_step)
        output = output.flatten(2)
        output = self.o_proj(output if padding is None else padding.restore(output))
        if self.training and torch.is_grad_enabled():
            output = output + self._nothing(gates, output)
        return output, None

    def _nothing(self, gates: torch.Tensor | None, output: torch.Tensor) -> torch.Tensor:
        """Zero, from every parameter that only a state uses: sequences within the window have none, and processes that train
        together (DDP) wait for the gradient of each parameter."""
        unused = [] if gates is None else [gates[:, :, :1]]
        unused += self._norm_parameters().values()
        if self.has_temperatures:
            unused.append(of_this_process(self.state_temperature, self.q_proj))
        return sum(((0 * part).sum().to(output) for part in unused), output.new_zeros(()))

    @torch.compiler.disable  # as `KVMLayer.update`
    def _without_cache(self, key, value, query, gates, positions, sequences: list[list[slice]], make_step):
        """Each packed sequence in a layer of its own, which is thrown away. Pads after a sequence change nothing before
        them, and here nothing comes after them."""
        whole = (key, value, query, gates, positions)
        if len(sequences) == len(sequences[0]) == 1:
            return self._alone(*whole, make_step)

        def cut(tensor, sizes, dim):
            """All at once: the gradient of a part that is cut out by itself is as large as the whole."""
            return len(sizes) * [None] if tensor is None else tensor.split(sizes, dim)

        rows = [key.shape[0]] if len(sequences) == 1 else len(sequences) * [1]
        outputs = []
        for parts, *row in zip(sequences, *(cut(tensor, rows, 0) for tensor in whole)):
            sizes = [part.stop - part.start for part in parts]
            alone = zip(*(cut(tensor, sizes, dim) for tensor, dim in zip(row, (2, 2, 2, 2, 1))))
            outputs.append(torch.cat([self._alone(*sequence, make_step) for sequence in alone], dim=1))
        return torch.cat(outputs)

    def _alone(self, key, value, query, gates, positions, make_step: Callable[..., KVMStep]) -> torch.Tensor:
        """Sequences in a layer that is thrown away.

        For the backward pass autograd keeps what it keeps of plain attention, queries, keys, values and the output. The
        states and windows of all chunks, several times as much, are computed again, unless the whole layer is
        (`gradient_checkpointing_enable`).
        """
        learned = self._learned()
        if not torch.is_grad_enabled():
            return KVMLayer().update(key, value, make_step(query, gates, positions, learned))[0]
        is_again = self.gradient_checkpointing and self.training
        has_chunks = key.shape[2] > self.rule.window_size
        if is_again or not has_chunks or _within_function_transform():
            return attend_alone(key, value, make_step(query, gates, positions, learned))

        # With the parameters of now, which may be others by then (`torch.func.functional_call`), and the same choices.
        of_norm, choices = self._norm_parameters(), []

        def choose_and_remember(*given):
            choices.append(choose(*given))
            return choices[-1]

        def attend_to_all(key, value, query, gates, state_temperature, window_temperature, *of_norm_again):
            norm_again = None
            if of_norm:
                norm_again = partial(functional_call, self.state_norm, dict(zip(of_norm, of_norm_again)))
            make = partial(
                make_step, query, gates, positions, LearnedOfState(norm_again, state_temperature, window_temperature)
            )
            if torch.is_grad_enabled():
                known = iter(choices)
                return attend_alone(key, value, make(choose=lambda *given: next(known)))
            return KVMLayer().update(key, value, make(choose=choose_and_remember))[0]

        given = (key, value, query, gates, learned.state_temperature, learned.window_temperature, *of_norm.values())
        return replayed(attend_to_all, *given, draws=self.training and self.attention_dropout > 0)


def _within_function_transform() -> bool:
    """Whether this is within `torch.func.grad` and its like, which take no backward pass of another's making."""
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return False
    except RuntimeError:
        return True


class KVMDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: KVMConfig, layer_idx: int):
        super().__init__()
        attention = KVMAttention if config.layer_types[layer_idx] == "kvm_attention" else KVMDotProductAttention
        self.self_attn = attention(config, layer_idx)
        self.mlp = KVMMLP(config)
        self.input_layernorm = KVMRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = KVMRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, **kwargs) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), **kwargs)[0]
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class KVMInputs(NamedTuple):
    """One call's inputs as the layers take them."""

    embeds: torch.Tensor  # [B, T, hidden]
    cache: Cache | None
    position_ids: torch.Tensor  # [1 or B, T]
    padding: Padding | None  # None if every column is a token
    sequences: list[list[slice]]  # packed sequences per row, or for all rows; one of them if nothing is packed
    masks: dict[str, object]  # what the layers of each type take as `attention_mask`: KVM layers, `CausalMasks`

    @property
    def begins(self) -> torch.Tensor:
        """`[B or 1, T, 1]`: the columns in which a sequence's tokens of this call begin."""
        columns = torch.arange(self.embeds.shape[1], device=self.embeds.device)
        if self.padding is not None:
            begins = columns == torch.tensor(self.padding.first, device=columns.device)[:, None]
        elif any(len(row) > 1 for row in self.sequences):
            begins = (columns == 0) | (self.position_ids == 0)
        else:
            begins = (columns == 0)[None]
        return begins[..., None]


class KVMPreTrainedModel(PreTrainedModel):
    config: KVMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["KVMDecoderLayer"]
    # `rotary` is a module; accelerate would move it, and with it the model's own.
    _skip_keys_device_placement = ["past_key_values", "cache", "rotary"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": KVMDecoderLayer}
    AUTO_MAP = {
        "AutoConfig": "configuration_kvm.KVMConfig",
        "AutoModel": "modeling_kvm.KVMModel",
        "AutoModelForCausalLM": "modeling_kvm.KVMForCausalLM",
        "AutoModelForSequenceClassification": "modeling_kvm.KVMForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_kvm.KVMForTokenClassification",
        "AutoModelForQuestionAnswering": "modeling_kvm.KVMForQuestionAnswering",
    }
    _num_token_shifts = 0  # layers of the cache behind those of attention

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
        """Also gives what a checkpoint lacks its neutral value: gates and temperatures 1, `state_norm` plain."""
        super()._init_weights(module)
        if isinstance(module, KVMAttention):
            if module.is_gated:
                init.zeros_(module.merge_gate.weight)
            if module.has_temperatures:
                init.ones_(module.state_temperature)
                init.ones_(module.window_temperature)

    def save_pretrained(self, save_directory, *args, **kwargs):
        """As in transformers; the folder also says which of its classes serves which Auto class. `use_cache` is saved as the
        model was made with: Trainer turns it off."""
        self.config.auto_map = dict(self.AUTO_MAP)
        in_training, self.config.use_cache = self.config.use_cache, self._made_with_cache
        try:
            return super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            self.config.use_cache = in_training

    @torch.compiler.disable  # it looks at the values of masks and positions
    def _read_inputs(
        self, input_ids, inputs_embeds, attention_mask, position_ids, cache, past_key_values, use_cache, others
    ) -> "KVMInputs":
        """Makes out of what people and `generate()` give to `forward` what the layers need, or refuses it."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of `input_ids` and `inputs_embeds`.")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        has_cache = cache is not None or past_key_values is not None
        cache = self._resolve_cache(cache, past_key_values, use_cache)
        past = 0 if cache is None else int(cache.get_seq_length())  # a tensor after crop() of some layers
        if inputs_embeds.ndim != 3:
            raise ValueError(f"`input_ids` must be 2D (batch, tokens), got {inputs_embeds.ndim - 1}D.")
        batch, length = inputs_embeds.shape[:2]
        if batch == 0 or length == 0:
            raise ValueError(
                f"The input is empty ({batch} sequences of {length} tokens): give at least one token. (`generate()` cuts "
                "off what the cache has seen already: give it all ids so far, or an `attention_mask` for all of them.)"
            )
        if others.get("output_attentions", self.config.output_attentions):
            raise ValueError(
                "`output_attentions=True` is not available: KVM layers attend to rows that stand for many tokens, so "
                "there is no weight per token."
            )
        if position_ids is not None and tuple(position_ids.shape) not in ((1, length), (batch, length)):
            raise ValueError(
                f"`position_ids` has shape {tuple(position_ids.shape)}, expected (1 or {batch}, {length}) here."
            )

        lengths = self._lengths(cache, attention_mask, (batch, past))
        sliding = "sliding_attention" in self.config.layer_types
        padding = read_padding(attention_mask, batch, past, length, lengths, sliding)
        device, borders = inputs_embeds.device, others.get("cu_seq_lens_q")
        sequences = [[slice(0, length)]]
        if padding is None:
            sequences = read_packing(position_ids, borders, length)
        elif borders is not None:
            raise ValueError("Packed sequences (`cu_seq_lens_q`) cannot be padded: leave `attention_mask` out.")
        packed = any(len(row) > 1 for row in sequences)
        if packed:
            if has_cache:
                raise ValueError(
                    "Packed sequences cannot continue or fill a cache: each of them starts anew. Leave the cache out; "
                    "to generate, give them as rows of a padded batch."
                )
            cache = None
        elif others.get("seq_idx") is not None and position_ids is None:
            raise ValueError("`seq_idx` alone does not say where packed sequences begin: give `position_ids` too.")
        elif position_ids is not None and (length > 1 or set(lengths) != {past}):
            check_first_positions(position_ids.expand(batch, -1), padding, lengths)

        if position_ids is None:
            position_ids = past + packed_positions(sequences[0], device)
            if padding is not None:
                position_ids = padding.positions(lengths, device)
            elif set(lengths) != {past}:
                position_ids = position_ids - past + torch.tensor(lengths, device=device)[:, None]
        if padding is not None:
            position_ids = position_ids.expand(batch, -1)
            check_padded_positions(position_ids, padding)

        masks = dict.fromkeys(KVM_LAYER_TYPES, CausalMasks())
        make_mask = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
        # A mask of ones says nothing, and would hide packed sequences from transformers.
        dense = packed or (padding is None and set(lengths) == {past})
        for layer_type in set(self.config.layer_types) - set(masks):
            masks[layer_type] = make_mask[layer_type](
                self.config,
                inputs_embeds,
                None if dense else attention_mask,
                cache,
                position_ids=position_ids if packed else None,
            )
        return KVMInputs(inputs_embeds, cache, position_ids, padding, sequences, masks)

    def _lengths(self, cache: Cache | None, attention_mask, shape: tuple[int, int]) -> list[int]:
        """Tokens that the cache holds of each sequence: as its layers counted them, or else (transformers' layers alone,
        which count columns) as the mask does, for which the host waits."""
        batch, past = shape
        counted = next((layer.lengths for layer in getattr(cache, "layers", ()) if hasattr(layer, "lengths")), None)
        if counted is not None:
            return counted or [0] * batch
        if past and getattr(attention_mask, "ndim", 0) == 2 and attention_mask.shape[0] == batch:
            return (attention_mask[:, :past] == 1).sum(-1).tolist()
        return [past] * batch

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
            return KVMCache(self.config) if use_cache else None
        self._check_cache(cache)
        return cache

    def _check_cache(self, cache: Cache) -> None:
        """Refuses a cache that was made for other layers, or whose layers are not in step."""
        layers = getattr(cache, "layers", ())
        windows = {"sliding_attention": self.config.sliding_window}
        wanted = [(kind if kind in KVM_LAYER_TYPES else None, windows.get(kind)) for kind in self.config.layer_types]
        kinds = [
            (getattr(layer, "_layer_type", None), getattr(layer, "sliding_window", None))
            for layer in layers[: len(wanted)]
        ]
        extra = len(layers) - len(wanted)
        if kinds != wanted or extra not in (0, self._num_token_shifts):
            raise ValueError(
                f"The cache ({type(cache).__name__}) was not made for this model's layers. Use "
                "`KVMCache(model.config)`, or `DynamicCache(config=model.config)`, or let `generate()` make one."
            )
        if any(getattr(layer, "unfinished", False) for layer in layers):
            raise ValueError("An earlier call with this cache failed half-way. Start again with a new cache.")
        seen = {int(layer.get_seq_length()) for layer in layers}
        if len(seen) > 1:
            raise ValueError(
                f"The layers of the cache have seen different numbers of tokens ({sorted(seen)}): an earlier call failed "
                "half-way, or some of them were cropped. Start again with a new cache."
            )


class KVMModel(KVMPreTrainedModel):
    """The stack of layers without a head."""

    def __init__(self, config: KVMConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(KVMDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = KVMRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = KVMRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """As transformers' `LlamaModel.forward`; `past_key_values` is the older name of `cache`.

        Batches may be padded on the left or the right (`attention_mask`), or packed (`position_ids` that restart at 0,
        or the `cu_seq_lens_q` of transformers' flattening collator): every sequence gives what it gives alone. Packed
        sequences leave no cache behind.

        Raises:
            ValueError: an empty input; masks other than padding, `output_attentions`, and combinations that KVM layers
                do not take; a cache that was not made for this model, or does not fit the mask.
        """
        inputs = self._read_inputs(
            input_ids, inputs_embeds, attention_mask, position_ids, cache, past_key_values, use_cache, kwargs
        )
        hidden = inputs.embeds
        position_embeddings = tuple(table.to(hidden.dtype) for table in self.rotary_emb(inputs.position_ids))
        for layer, layer_type in zip(self.layers, self.config.layer_types):
            hidden = layer(
                hidden,
                position_embeddings=position_embeddings,
                attention_mask=inputs.masks[layer_type],
                cache=inputs.cache,
                position_ids=inputs.position_ids,
                padding=inputs.padding,
                sequences=inputs.sequences,
                rotary=self.rotary_emb,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden), **{CACHE_NAME: inputs.cache})


class KVMForCausalLM(KVMPreTrainedModel, GenerationMixin):
    """KVM model with a language modelling head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}
    model_class = KVMModel

    def __init__(self, config: KVMConfig):
        super().__init__(config)
        self.model = self.model_class(config)
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
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """As transformers' `LlamaForCausalLM.forward`; `past_key_values` is the older name of `cache`. The loss of a
        padded or packed batch counts what a token of the same sequence predicts, and nothing else."""
        if labels is not None:
            given = labels
            labels = labels_within_sequences(given, attention_mask, position_ids, kwargs.get("cu_seq_lens_q"))
            if kwargs.get("num_items_in_batch") is not None and kwargs.get("shift_labels") is None:
                kwargs["num_items_in_batch"] = items_within_sequences(
                    kwargs["num_items_in_batch"], given, labels, trainer="kvm_hf.KVMTrainer"
                )
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.compute_logits(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            **{CACHE_NAME: getattr(outputs, CACHE_NAME)},
        )

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden)

    @wraps(GenerationMixin.prepare_inputs_for_generation)  # `generate()` looks at the names of the arguments
    def prepare_inputs_for_generation(self, *args, **kwargs):
        # The cache under its older name too, by which PEFT (0.21) sees that a learned prompt has been read already.
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        if CACHE_NAME == "cache" and inputs.get("cache") is not None:
            inputs["past_key_values"] = inputs["cache"]
        return inputs


class _KnowsItsBase:
    """Lets transformers' generic heads, which build their base model through `AutoModel`, find it for whatever class
    the config has: loading remote code may import the config's module twice."""

    def __init__(self, config):
        AutoModel.register(type(config), KVMModel, exist_ok=True)
        super().__init__(config)


class KVMForSequenceClassification(_KnowsItsBase, GenericForSequenceClassification, KVMPreTrainedModel):
    """KVM model that classifies a sequence by its last token."""


class KVMForTokenClassification(_KnowsItsBase, GenericForTokenClassification, KVMPreTrainedModel):
    """KVM model that classifies every token."""


class KVMForQuestionAnswering(_KnowsItsBase, GenericForQuestionAnswering, KVMPreTrainedModel):
    """KVM model that marks the span of an answer."""


KVMModel.register_for_auto_class("AutoModel")
KVMForCausalLM.register_for_auto_class("AutoModelForCausalLM")
KVMForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
KVMForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")
KVMForQuestionAnswering.register_for_auto_class("AutoModelForQuestionAnswering")

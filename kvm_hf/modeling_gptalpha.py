"""GPTAlpha-2, the backbone of the Key-Value Means paper, over the same attention core and cache as the Llama-style model.

Our specification, section 7, in its order: embeddings with a norm, blocks (attention with value residual, token shift and
LayerNorms on queries and keys; an MLP of squared ReLUs with token shift), head. Depends on `configuration_gptalpha`,
`modeling_kvm`, `parallel_kvm` and `shift_kvm` beside it, and on transformers.
"""

from functools import partial
from types import SimpleNamespace

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_gptalpha import GPTAlphaConfig
from .modeling_kvm import (
    CACHE_NAME,
    KVM_LAYER_TYPES,
    KVMAttention,
    KVMDotProductAttention,
    KVMForCausalLM,
    KVMPreTrainedModel,
    KVMRotaryEmbedding,
    apply_rotary,
)
from .parallel_kvm import of_this_process, shared_by_heads
from .shift_kvm import TokenShiftLayer

EPS = 1e-5


@torch.compiler.disable  # as `KVMLayer.update`
def shifted(features, cache, index, begins, padding, starts_from_itself):
    """The token before each of `features` `[B, T, D]`, remembered in layer `index` of the cache, if there is one."""
    update = TokenShiftLayer().update if cache is None else partial(cache.update, layer_idx=index)
    return update(features, features, begins=begins, padding=padding, starts_from_itself=starts_from_itself)[0]


class GPTAlphaValueGate(nn.Module):
    """How much of the first layer's value a channel takes: `sigmoid(bias + (x W1) W2)`."""

    def __init__(self, config: GPTAlphaConfig):
        super().__init__()
        width = config.num_attention_heads * config.head_dim
        inner = max(32, round(1.3 * config.hidden_size**0.5 / 32) * 32)
        self.down = nn.Linear(config.hidden_size, inner, bias=False)
        self.up = nn.Linear(inner, width, bias=False)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(of_this_process(self.bias, self.up) + self.up(self.down(hidden)))


class GPTAlphaProjections:
    """Queries, keys and values of every kind of attention layer: projection, value residual, token shift, norm, RoPE."""

    def __init__(self, config: GPTAlphaConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        width = config.num_attention_heads * config.head_dim
        self.q_norm = nn.LayerNorm(config.head_dim, eps=EPS)
        self.k_norm = nn.LayerNorm(config.head_dim, eps=EPS)
        self.value_residual = config.value_residual
        if self.value_residual == "gated":
            self.value_gate = GPTAlphaValueGate(config)
        elif self.value_residual == "linear":
            self.value_mix = nn.Parameter(torch.zeros(1))  # FSDP2 takes no scalars
        self.token_shift = config.token_shift_attention
        if self.token_shift:
            self.shift_q, self.shift_k, self.shift_v = (nn.Parameter(torch.zeros(width)) for _ in range(3))

    def project(self, hidden, position_embeddings, first_value, shift):
        """`[B, T, hidden]` to rotated queries and keys, and values, `[B, H, T, D]`.

        Args:
            first_value: `[B, T, H * D]`, the value of the first layer of this kind.
            shift: gives the token before each, of `[B, T, 3 * H * D]`.
        """
        query, key, value = self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)
        if self.value_residual == "gated":
            value = value + (first_value - value) * self.value_gate(hidden)
        elif self.value_residual == "linear":
            mix = of_this_process(self.value_mix, self.v_proj)
            value = (1 - mix) * value + mix * first_value
        if self.token_shift:
            flat = torch.cat([query, key, value], dim=-1)
            shifts = (self.shift_q, self.shift_k, self.shift_v)
            mix = torch.cat([of_this_process(part, self.q_proj) for part in shifts])
            query, key, value = (flat + mix * (shift(flat) - flat)).chunk(3, dim=-1)
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        q_norm, k_norm = shared_by_heads(self.q_norm, self.q_proj), shared_by_heads(self.k_norm, self.k_proj)
        query, key = q_norm(query.view(shape)).transpose(1, 2), k_norm(key.view(shape)).transpose(1, 2)
        if self.use_rope:
            cos, sin = (table.unsqueeze(1) for table in position_embeddings)
            query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
        return query, key, value.view(shape).transpose(1, 2)


class GPTAlphaDotProductAttention(GPTAlphaProjections, KVMDotProductAttention):
    """`full_attention` and `sliding_attention`."""


class GPTAlphaStateAttention(GPTAlphaProjections, KVMAttention):
    """`kvm_attention` and `block_sliding_attention`."""


class GPTAlphaMLP(nn.Module):
    def __init__(self, config: GPTAlphaConfig):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.token_shift = config.token_shift_mlp
        if self.token_shift:
            self.shift = nn.Parameter(torch.zeros(config.hidden_size))

    def forward(self, hidden: torch.Tensor, shift) -> torch.Tensor:
        if self.token_shift:
            hidden = hidden + self.shift * (shift(hidden) - hidden)
        return self.down_proj(torch.relu(self.up_proj(hidden)).square())


class GPTAlphaDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: GPTAlphaConfig, layer_idx: int):
        super().__init__()
        is_state = config.layer_types[layer_idx] in KVM_LAYER_TYPES
        self.self_attn = (GPTAlphaStateAttention if is_state else GPTAlphaDotProductAttention)(config, layer_idx)
        self.mlp = GPTAlphaMLP(config)
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=EPS)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=EPS)
        self.residual_scale = config.residual_scale
        self.has_lambdas = config.block_lambdas
        if self.has_lambdas:
            self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))
        # Places of this layer's token shifts in the cache.
        self.attention_shift = config.num_hidden_layers + layer_idx
        self.mlp_shift = self.attention_shift + config.num_hidden_layers * config.token_shift_attention

    def forward(self, hidden, embeds, first_value, begins, cache, padding, **kwargs):
        """`embeds`: the normed embeddings `[B, T, hidden]`; `first_value`: see `GPTAlphaProjections.project`, None in the first
        layer of its kind, which returns it beside its output; `begins`: where a sequence's tokens begin in this call. The first
        three have gradients, and reentrant checkpointing knows of positional arguments only."""
        makes_value = first_value is None and self.self_attn.value_residual != "none"
        if makes_value:
            first_value = self.self_attn.v_proj(self.input_layernorm(embeds))
        shift = partial(shifted, cache=cache, begins=begins, padding=padding)
        if self.has_lambdas:
            hidden = self.lambdas[0] * hidden + self.lambdas[1] * embeds
        attended, _ = self.self_attn(
            self.input_layernorm(hidden),
            first_value=first_value,
            cache=cache,
            padding=padding,
            shift=partial(shift, index=self.attention_shift, starts_from_itself=True),
            **kwargs,
        )
        hidden = hidden + self.residual_scale * attended
        shift = partial(shift, index=self.mlp_shift, starts_from_itself=False)
        hidden = hidden + self.residual_scale * self.mlp(self.post_attention_layernorm(hidden), shift)
        return (hidden, first_value) if makes_value else hidden


class GPTAlphaPreTrainedModel(KVMPreTrainedModel):
    config: GPTAlphaConfig
    _no_split_modules = ["GPTAlphaDecoderLayer"]
    _can_record_outputs = {"hidden_states": GPTAlphaDecoderLayer}
    AUTO_MAP = {
        "AutoConfig": "configuration_gptalpha.GPTAlphaConfig",
        "AutoModel": "modeling_gptalpha.GPTAlphaModel",
        "AutoModelForCausalLM": "modeling_gptalpha.GPTAlphaForCausalLM",
    }

    @property
    def _num_token_shifts(self) -> int:
        return self.config.num_token_shifts

    @torch.no_grad()
    def _init_weights(self, module):
        """Initial values of the paper's backbone: orthogonal matrices, output projections zero, and the schedules of
        RWKV-7 over depth and channels for token shift and value residual. The scales of embeddings and head are ours: they
        are not known of the paper's own run."""
        super()._init_weights(module)
        if isinstance(module, GPTAlphaDecoderLayer):
            self._init_layer(module)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.uniform_(module.weight, -1e-4, 1e-4)  # a LayerNorm follows
            if module.padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
                init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, GPTAlphaModel) and self.config.skip_connections:
            init.ones_(module.skip_weights)
        elif isinstance(module, GPTAlphaForCausalLM):
            init.orthogonal_(module.lm_head.weight, 0.5)

    def _init_layer(self, layer: GPTAlphaDecoderLayer):
        attention, depth = layer.self_attn, self.config.num_hidden_layers
        down_the_layers = 1.0 - attention.layer_idx / depth
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj, layer.mlp.up_proj):
            init.orthogonal_(projection.weight)
        for projection in (attention.o_proj, layer.mlp.down_proj):
            init.zeros_(projection.weight)
        if attention.token_shift:
            for name, exponent in (("shift_q", 0.2), ("shift_k", 0.7), ("shift_v", 0.7)):
                mix = getattr(attention, name)
                init.copy_(mix, 1.0 - _ramp(mix) ** (exponent * down_the_layers))
        if layer.mlp.token_shift:
            init.copy_(layer.mlp.shift, 1.0 - _ramp(layer.mlp.shift) ** (down_the_layers**4))
        if attention.value_residual == "gated":
            gate = attention.value_gate
            init.zeros_(gate.down.weight)
            init.orthogonal_(gate.up.weight, 0.1)
            width = gate.bias.shape[0]
            init.copy_(gate.bias, 0.73 - 0.4 * (_ramp(gate.bias) * width / max(1, width - 1) - 0.5))
        elif attention.value_residual == "linear":
            init.constant_(attention.value_mix, 0.5)
        if layer.has_lambdas:
            init.copy_(layer.lambdas, torch.tensor([1.0, 0.0]))

    def _resolve_cache(self, *args) -> Cache | None:
        """A cache that transformers made lacks the layers for token shift."""
        cache = super()._resolve_cache(*args)
        if cache is not None and self._num_token_shifts and len(cache.layers) == self.config.num_hidden_layers:
            if cache.get_seq_length():
                raise ValueError(
                    f"The cache ({type(cache).__name__}) was filled by a model without token shift. Use a new one."
                )
            # Full attention can always be cropped and so is never told to record.
            flags = [layer.record_past for layer in cache.layers if hasattr(layer, "record_past")]
            cache.layers += [TokenShiftLayer() for _ in range(self._num_token_shifts)]
            for layer in cache.layers[self.config.num_hidden_layers :]:
                layer.record_past = any(flags) or not flags
        return cache


def _ramp(like: torch.Tensor) -> torch.Tensor:
    """`0, 1/n, ..., (n-1)/n`."""
    # Of `like`, which may be cut between processes.
    return (torch.ones_like(like, dtype=torch.float32).cumsum(0) - 1) / like.numel()


class GPTAlphaModel(GPTAlphaPreTrainedModel):
    """The stack of layers without a head."""

    def __init__(self, config: GPTAlphaConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.embed_norm = nn.LayerNorm(config.hidden_size, eps=EPS)
        self.layers = nn.ModuleList(GPTAlphaDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=EPS)
        if config.skip_connections:
            self.skip_weights = nn.Parameter(torch.ones(config.num_hidden_layers // 2))
        # One table per set of RoPE parameters; `KVMRotaryEmbedding` reads a config with one.
        self.rotary_emb = nn.ModuleDict(
            {
                layer_type: KVMRotaryEmbedding(
                    SimpleNamespace(
                        rope_parameters=config.rope_of(layer_type),
                        rotary_channels=config.rotary_channels_of(layer_type),
                    )
                )
                for layer_type in sorted(set(config.layer_types))
            }
        )
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
        """As `KVMModel.forward`."""
        inputs = self._read_inputs(
            input_ids, inputs_embeds, attention_mask, position_ids, cache, past_key_values, use_cache, kwargs
        )
        hidden = embeds = self.embed_norm(inputs.embeds)
        types = self.config.layer_types
        tables = {
            kind: tuple(table.to(hidden.dtype) for table in rotary(inputs.position_ids))
            for kind, rotary in self.rotary_emb.items()
        }
        first_values = dict.fromkeys(types)
        half, outputs = len(self.layers) // 2, []
        for index, (layer, kind) in enumerate(zip(self.layers, types)):
            if self.config.skip_connections and index >= half:
                skipped = outputs.pop().to(hidden.device)
                hidden = hidden + self.skip_weights[index - half].to(hidden.device) * skipped
            hidden = layer(
                hidden,
                embeds,
                first_values[kind],
                begins=inputs.begins,
                position_embeddings=tables[kind],
                attention_mask=inputs.masks[kind],
                cache=inputs.cache,
                position_ids=inputs.position_ids,
                padding=inputs.padding,
                sequences=inputs.sequences,
                rotary=None,
            )
            if isinstance(hidden, tuple):
                hidden, first_values[kind] = hidden
            if self.config.skip_connections and index < half:
                outputs.append(hidden)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden), **{CACHE_NAME: inputs.cache})


class GPTAlphaForCausalLM(GPTAlphaPreTrainedModel, KVMForCausalLM):
    """GPTAlpha-2 with a language modelling head."""

    model_class = GPTAlphaModel

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits, cap = super().compute_logits(hidden), self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


GPTAlphaModel.register_for_auto_class("AutoModel")
GPTAlphaForCausalLM.register_for_auto_class("AutoModelForCausalLM")

"""What a KVM model remembers between calls: `KVMLayer` for one layer, `KVMCache` for all of them.

A layer holds the state's readout and the window side by side in one buffer, so that a decode step writes one token and
runs one attention call. Only the first token of a chunk pays for more: it absorbs the block that leaves the window and
lays out a new buffer with room for the whole chunk. A forward without a cache is a layer that is thrown away
afterwards; there is no second path, hence the same result for every split of a sequence over calls.

Depends on `state_kvm` for the mathematics and on transformers' cache protocol.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers.cache_utils import CacheLayerMixin, DynamicCache, StaticLayer

from .state_kvm import Block, KeyTreatment, State, StateRule, absorb, found, readout


@dataclass
class KVMStep:
    """What a KVM attention hands to its cache layer beside keys and values: one call's new tokens, and how to treat
    them. The layer is built by transformers without arguments, so everything it needs to know comes from here.
    """

    rule: StateRule
    treatment: KeyTreatment
    queries: torch.Tensor  # [B, H, T, D], times the window temperature
    gates: torch.Tensor | None  # [B, G, T, 1]
    positions: torch.Tensor  # [B, T], what RoPE turned the keys by
    state_scale: Callable[[], torch.Tensor | float]  # [G, 1, 1], state temperature over window temperature
    bias_channels: int  # extra key channels that carry the score bias, for kernels that take no mask
    attend: Callable[..., torch.Tensor]  # (queries, keys, values, bias) -> [B, T, H, D]


class KVMLayer(CacheLayerMixin):
    """The cache of one `kvm_attention` layer.

    Tokens are counted on the host (`seen`), never read back from the device, and all sequences of a batch stand at the
    same position. A sequence's keys are one contiguous range of the buffer, the state before the window. Sequences at
    different positions would differ in where their range begins and ends, and in nothing else.

    Attributes (`M` rows of state, `fill` tokens in the window, at most `L`):
        keys, values: `[B, G, M + L, D]` in the model's dtype: readout of the state (keys times the temperature ratio),
            then the window's keys as RoPE left them. `D` grows by `bias_channels` in `keys`.
        bias: `[B, G, M + L]` added to the scores (`count_bias`); None without one, or if `bias_channels` carry it.
        gates: `[B, G, L, 1]`, or None; positions: `[B, L]`. Those of the window's tokens, for when they leave it.
        state: the raw sums, at least float32; None until the first chunk leaves the window.
        in_graph: whether autograd may still need what the buffers hold, so that they must not be written in place.
        unfinished: whether a call began and did not end, so that nobody knows what is held.
    """

    _layer_type = "kvm_attention"
    is_sliding = False
    is_croppable = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seen = 0
        self._forget()

    def _forget(self):
        self.keys = self.values = self.bias = self.gates = self.positions = self.state = None
        self.rule = None
        self.fill = 0
        self.in_graph = self.unfinished = False
        self.is_initialized = False

    # What transformers asks of a cache layer

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Sizes for the masks of the model's other layers, which may be derived from this one: nothing is dropped."""
        return self.seen + query_length, 0

    def reset(self) -> None:
        self.seen = 0
        self._forget()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor that the layer holds, by name. All of them begin with the batch dimension."""
        held = {name: getattr(self, name) for name in ("keys", "values", "bias", "gates", "positions")}
        held |= {f"state.{name}": part for name, part in self.state._asdict().items()} if self.state else {}
        return {name: tensor for name, tensor in held.items() if tensor is not None}

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every tensor of the layer by `change` of it."""
        for name in self.tensors():
            if not name.startswith("state."):
                setattr(self, name, change(getattr(self, name)))
        if self.state is not None:
            self.state = State(*(change(part) for part in self.state))

    def offload(self) -> None:
        self._map(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.is_initialized and self.keys.device != self.device:
            self._map(lambda tensor: tensor.to(self.device, non_blocking=True))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._map(lambda tensor: tensor[indices.to(tensor.device)])

    def crop(self, tokens_to_remove: int) -> None:
        refuse_crop(tokens_to_remove)

    # The path of new tokens

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor, step: KVMStep) -> None:
        """Reserves the window. `key_states` `[B, G, T, D]`, `value_states` `[B, G, T, D]`."""
        batch, heads, _, dim = key_states.shape
        size = step.rule.window_size
        self.device = key_states.device
        self.rule, self.bias_channels = step.rule, step.bias_channels
        self.keys = key_states.new_zeros(batch, heads, size, dim + step.bias_channels)
        self.values = value_states.new_zeros(batch, heads, size, dim)
        has_bias = step.rule.count_bias and not step.bias_channels
        self.bias = key_states.new_zeros(batch, heads, size) if has_bias else None
        self.gates = None if step.gates is None else step.gates.new_zeros(batch, heads, size, 1)
        self.positions = step.positions.new_zeros(batch, size)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, step: KVMStep, **kwargs
    ) -> tuple[torch.Tensor, None]:
        """Takes `T` new tokens and returns what their queries attend to, `[B, T, H, D]` (specification, section 1).

        The tokens are taken in pieces that fill the window; each piece is one attention call over state and window,
        causal at the lower right. Whenever the window is full and a token is left, a chunk is opened.

        Raises:
            ValueError: the cache belongs to another model, batch size or attention implementation.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states, step)
        self._check(key_states, step)
        tracked = torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in (step.queries, key_states, value_states)
        )
        copy = tracked or self.in_graph or self.keys.is_inference() != torch.is_inference_mode_enabled()

        self.unfinished = True
        total, done, outputs = key_states.shape[2], 0, []
        while done < total:
            if self.fill == self.rule.window_size:
                with _without_autocast(self.keys.device.type):
                    self._open_chunk(step)
            size = min(total - done, self.rule.window_size - self.fill)
            piece = slice(done, done + size)
            self._write(
                key_states[:, :, piece],
                value_states[:, :, piece],
                None if step.gates is None else step.gates[:, :, piece],
                step.positions[:, piece],
                copy,
            )
            stop = self._state_rows + self.fill
            outputs.append(
                step.attend(
                    step.queries[:, :, piece],
                    self.keys[:, :, :stop],
                    self.values[:, :, :stop],
                    None if self.bias is None or self.state is None else self.bias[:, :, :stop],
                )
            )
            done += size
        self.in_graph, self.unfinished = tracked, False
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), None

    @property
    def _state_rows(self) -> int:
        return 0 if self.state is None else self.state.rows

    def _write(self, keys, values, gates, positions, copy: bool) -> None:
        """Puts tokens at the end of the window, in place or in a copy."""
        place = self._state_rows + self.fill
        self.keys = _put(self.keys, F.pad(keys, (0, self.bias_channels)), 2, place, copy)
        self.values = _put(self.values, values, 2, place, copy)
        self.positions = _put(self.positions, positions, 1, self.fill, copy)
        if gates is not None:
            self.gates = _put(self.gates, gates, 2, self.fill, copy)
        self.fill += keys.shape[2]
        self.seen += keys.shape[2]

    def _open_chunk(self, step: KVMStep) -> None:
        """Moves the window on by one chunk: absorbs the block that leaves it and lays out state and window anew."""
        rule, rows, chunk = self.rule, self._state_rows, self.rule.chunk_size
        block = self._leaving_block(step)
        if self.state is None:
            self.state = found(rule, block)
        else:
            self.state = absorb(rule, step.treatment, self.state, block, context=self.seen)

        read = readout(rule, step.treatment, self.state)
        keys = read.keys * step.state_scale()
        if self.bias_channels:
            keys = torch.cat([keys, read.bias[..., None] * keys.shape[-1] ** 0.5], dim=-1)
            keys = F.pad(keys, (0, self.bias_channels - 1))

        def lay_out(state_part, buffer):
            """State, the window less the chunk that left it, room for the chunk that opens."""
            kept = buffer[:, :, rows + chunk :]
            return torch.cat(
                [state_part.to(buffer.dtype), kept, torch.zeros_like(buffer[:, :, rows : rows + chunk])], 2
            )

        self.keys = lay_out(keys, self.keys)
        self.values = lay_out(read.values, self.values)
        self.bias = None if self.bias is None else lay_out(read.bias, self.bias)
        self.gates = None if self.gates is None else self.gates.roll(-chunk, dims=2)
        self.positions = self.positions.roll(-chunk, dims=1)
        self.fill -= chunk

    def _leaving_block(self, step: KVMStep) -> Block:
        """The oldest chunk of the window, in the precision of the state."""
        rows, chunk = self._state_rows, self.rule.chunk_size
        keys = self.keys[:, :, rows : rows + chunk, : self.keys.shape[-1] - self.bias_channels]
        precise = torch.promote_types(keys.dtype, torch.float32)
        keys, values = keys.to(precise), self.values[:, :, rows : rows + chunk].to(precise)
        positions = self.positions[:, None, :chunk, None].expand(*keys.shape[:3], 1)
        gates = torch.ones_like(keys[..., :1]) if self.gates is None else self.gates[:, :, :chunk].to(precise)
        return Block(step.treatment.memory_keys(keys, positions), values, gates, positions.to(precise))

    def _check(self, key_states: torch.Tensor, step: KVMStep) -> None:
        """Refuses tokens that do not continue what the layer holds."""
        if self.unfinished:
            raise ValueError("An earlier call with this cache failed half-way. Start again with a new cache.")
        batch, heads, _, dim = key_states.shape
        held = (self.keys.shape[0], self.keys.shape[1], self.values.shape[-1])
        if held[0] != batch:
            raise ValueError(
                f"The cache holds {held[0]} sequences, the input has {batch}. Use a new cache, or "
                "`cache.batch_repeat_interleave` / `cache.batch_select_indices` to change its rows."
            )
        if held[1:] != (heads, dim) or self.rule != step.rule:
            raise ValueError(
                "The cache belongs to another model: its key/value heads, head dim or KVM settings differ "
                f"({held[1]} heads of {held[2]}, {self.rule}; this model has {heads} heads of {dim}, {step.rule})."
            )
        if self.keys.dtype != key_states.dtype or self.bias_channels != step.bias_channels:
            raise ValueError(
                f"The cache was filled with keys in {self.keys.dtype} for another attention implementation or dtype "
                f"than this call's ({key_states.dtype}). Use a new cache."
            )


class KVMStaticLayer(StaticLayer):
    """What transformers finds when it is asked for a static cache: a refusal."""

    _layer_type = "kvm_attention"

    def __init__(self, *args, **kwargs):
        raise ValueError(
            "A static cache is not available for `kvm_attention` layers, whose state grows by its own rule. Leave "
            "`cache_implementation` out: the default cache of a KVM model is bounded already."
        )


class KVMCache(DynamicCache):
    """The cache of a KVM model: a `KVMLayer` per `kvm_attention` layer, transformers' own layers for the others.

    The same as `DynamicCache(config=model.config)`, which `generate()` makes by itself, with a count of its bytes.

    Args:
        config: the model's `KVMConfig`.
    """

    def __init__(self, config, **kwargs):
        super().__init__(config=config, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        refuse_crop(tokens_to_remove)  # before any layer is touched

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors held, on whatever device."""
        return sum(
            tensor.numel() * tensor.element_size()
            for layer in self.layers
            for tensor in (layer.tensors().values() if hasattr(layer, "tensors") else (layer.keys, layer.values))
            if tensor is not None
        )


def _without_autocast(device_type: str):
    """Which row a token joins must not depend on whether training runs under autocast."""
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def refuse_crop(tokens_to_remove: int) -> None:
    if tokens_to_remove != 0:
        raise ValueError(
            f"A KVM cache cannot drop {abs(tokens_to_remove)} tokens: its state has merged older ones. Assisted "
            "generation and prompt lookup need a model without `kvm_attention` layers for now; to reuse a prompt, "
            "`copy.deepcopy` its cache before continuing."
        )


def _put(buffer: torch.Tensor, new: torch.Tensor, dim: int, start: int, copy: bool) -> torch.Tensor:
    """`buffer` with `new` written at `start`, in place or in a copy."""
    size = new.shape[dim]
    if copy:
        after = buffer.narrow(dim, start + size, buffer.shape[dim] - start - size)
        return torch.cat([buffer.narrow(dim, 0, start), new.to(buffer.dtype), after], dim=dim)
    buffer.narrow(dim, start, size).copy_(new)
    return buffer

"""What a KVM model remembers between calls: `KVMLayer` for one layer, `KVMCache` for all of them.

A layer holds the state's readout and the window side by side in one buffer, so that a decode step writes one token and
runs one attention call. Only the first token of a chunk pays for more: it absorbs the block that leaves the window,
within the buffers that are there if nobody needs what they held (no autograd, no `crop`, no sequences of other lengths),
and into new ones otherwise. A forward without a cache is a layer that is thrown away afterwards, so that the result is the
same for every split of a sequence over calls; `attend_alone` gives that result where autograd has to follow.

Depends on `state_kvm` for the mathematics and on transformers' cache protocol.
"""

import operator
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers.cache_utils import StaticLayer

from .layer_kvm import RECORDED_TOKENS, SequencesCache, SequencesLayer
from .padding_kvm import Padding, take_columns
from .shift_kvm import TokenShiftLayer
from .state_kvm import Block, KeyTreatment, State, StateRule, absorb, choose, found, put_rows, readout, rows_after

# Extra key channels that carry the score bias for kernels that take no mask, against ones in the queries. Flash kernels
# want head dims that are multiples of 8.
BIAS_CHANNELS = 8


# What a layer holds for every sequence: tensors, beside the state, and numbers on the host.
TENSORS = ("keys", "values", "bias", "gates", "positions")
LISTS = ("lengths", "fills", "rows")
# The dimension that counts columns.
DIM = {"queries": 2, "keys": 2, "values": 2, "gates": 2, "positions": 1}


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
    takes_mask: bool  # whether the kernel takes a bias on the scores
    attend: Callable[..., torch.Tensor]  # (queries, keys, values, bias) -> [B, T, H, D]
    padding: Padding | None = None  # which of the tokens are real, if not all
    choose: Callable = choose  # `state_kvm.choose`, or what knows its answers


class KVMLayer(SequencesLayer):
    """The cache of one `kvm_attention` layer.

    The buffer has `S` columns for state rows and after them `W` columns for the window. Sequences of one batch may have
    seen different numbers of tokens. Their state rows then begin at the same column and their windows end at the same
    column, so that a decode step still is one write and one attention call; what a sequence does not fill is hidden by
    a bias on the scores. In a batch of equal lengths nothing is hidden, `S = M` and `W = L`. Everything that says how
    many and where is counted on the host and never read back from the device.

    Attributes:
        fills, rows: per sequence the tokens in its window (at most `L`), and its state rows.
        stop: columns of the window in use: sequence `b` fills `[stop - fills[b], stop)`.
        keys, values: `[B, G, S + W, D]` in the model's dtype: readout of the state (keys times the temperature ratio),
            then the window's keys as RoPE left them. `keys` have `BIAS_CHANNELS` more if they carry the bias.
        bias: `[B, G or 1, S + W]` added to the scores (`count_bias`, hidden columns); None if there is nothing to add.
        gates: `[B, G, W, 1]`, or None; positions: `[B, W]`. Those of the window's tokens, for when they leave it.
        state: the raw sums, at least float32, `S` rows; None until the first chunk leaves the window.
        in_graph: whether autograd may still need what the buffers hold, so that they must not be written in place.
        owns_state: whether the sums are tensors of their own that nothing else refers to, so that they may be.
        unfinished: whether a call began and did not end, so that nobody knows what is held.
        past: the layer as it was before each chunk was opened, oldest first, while `record_past`.
    """

    _layer_type = "kvm_attention"

    def reset(self) -> None:
        self.keys = self.values = self.bias = self.gates = self.positions = self.state = self.rule = None
        self.lengths, self.fills, self.rows, self.past = [], [], [], []
        self.seen = self.stop = self.earliest = 0
        self.in_graph = self.owns_state = self.unfinished = self.is_initialized = False

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor that the layer holds now, by name. All of them begin with the batch dimension."""
        held = {name: getattr(self, name) for name in TENSORS}
        held |= {f"state.{name}": part for name, part in self.state._asdict().items()} if self.state else {}
        return {name: tensor for name, tensor in held.items() if tensor is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, recorded past included."""
        held = [vars(self), *self.past]
        tensors = [part[name] for part in held for name in TENSORS]
        tensors += [tensor for part in held for tensor in part["state"] or ()]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor], rows: Callable[[list], list] = list) -> None:
        self.past = [dict(held) for held in self.past]
        for held in (vars(self), *self.past):
            for name in TENSORS:
                if held[name] is not None:
                    held[name] = change(held[name])
            if held["state"] is not None:
                held["state"] = State(*(change(part) for part in held["state"]))
            for name in LISTS:
                held[name] = rows(held[name])

    def fits(self, config) -> bool:
        """Whether tensors and numbers, read from a file, fit together."""
        batch, heads, dim, state = len(self.lengths), config.num_key_value_heads, config.head_dim, self._state_columns
        columns = self.keys.shape[2]
        shapes = {
            "keys": (batch, heads, columns, self.keys.shape[3]),
            "values": (batch, heads, columns, dim),
            "positions": (batch, columns - state),
        } | {f"state.{name}": (batch, heads, state) for name in State._fields}
        return (
            self.keys.shape[3] >= dim
            and len(self.fills) == len(self.rows) == batch
            and max(self.rows) <= state
            and max(self.fills) <= self.stop <= columns - state
            and all(
                tuple(part.shape[: len(shapes[n])]) == shapes[n] for n, part in self.tensors().items() if n in shapes
            )
        )

    def load(self, facts: dict, tensors: dict[str, torch.Tensor], config) -> None:
        """Takes what a saved cache says of this layer."""
        state = [tensors.pop(f"state.{name}", None) for name in State._fields]
        vars(self).update(facts | tensors)
        self.state = None if state[0] is None else State(*state)
        self.rule = StateRule.from_config(config, self._layer_type)
        self.device, self.is_initialized = self.keys.device, True

    # Rewinding (specification, section 6.5)

    def _remember(self, seen: int) -> None:
        """Opening a chunk makes new buffers, so the old ones only have to be kept."""
        self.past = [held for held in self.past if held["seen"] >= seen - RECORDED_TOKENS]
        self.past.append(
            {name: getattr(self, name) for name in (*TENSORS, *LISTS, "state", "stop", "in_graph")} | {"seen": seen}
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last `-tokens_to_remove` tokens, and forgets the recorded past.

        Once there is a state, this needs `activate_past_recording`: the state has merged what came before.

        Raises:
            ValueError: more than can be taken back; nothing has changed then.
        """
        self.check_crop(tokens_to_remove)
        target = self.seen + operator.index(tokens_to_remove)
        if target < self.seen:
            held = next((held for held in self.past if held["seen"] >= target), None)
            if held is not None:
                vars(self).update(held)
            excess = self.seen - target
            self.lengths = [length - excess for length in self.lengths]
            self.fills = [fill - excess for fill in self.fills]
            self.stop -= excess
            self.seen = target
        self.past = []
        if target == 0:
            self.reset()

    def can_crop(self, tokens: int) -> bool:
        target = self.seen - tokens
        held = next((held for held in self.past if held["seen"] >= target), vars(self))
        # Within a window that has not moved on since then, tokens only have to be forgotten.
        fixed = self.rule.window_size - self.rule.chunk_size if self.rule else 0
        moved = [length > fill for length, fill in zip(held["lengths"], held["fills"])]
        reach = [fill - fixed * has_moved for fill, has_moved in zip(held["fills"], moved)]
        has_moved_on = any(length > fill for length, fill in zip(self.lengths, self.fills))
        return all(held["seen"] - target <= tokens for tokens in reach) and (self.record_past or not has_moved_on)

    # The path of new tokens

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor, step: KVMStep) -> None:
        """Reserves the window. `key_states` `[B, G, T, D]`, `value_states` `[B, G, T, D]`."""
        batch, heads, _, dim = key_states.shape
        size = step.rule.window_size
        self.device = key_states.device
        self.rule, self.takes_mask = step.rule, step.takes_mask
        self.keys = key_states.new_zeros(batch, heads, size, dim)
        self.values = value_states.new_zeros(batch, heads, size, dim)
        self.gates = None if step.gates is None else step.gates.new_zeros(batch, heads, size, 1)
        self.positions = step.positions.new_zeros(batch, size)
        self.lengths, self.fills, self.rows = [0] * batch, [0] * batch, [0] * batch
        self.is_initialized = True

    @torch.compiler.disable  # which steps there are depends on counts: every other length would be compiled anew
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, step: KVMStep, **kwargs
    ) -> tuple[torch.Tensor, None]:
        """Takes `T` new tokens and returns what their queries attend to, `[B, T, H, D]` (specification, section 1).

        The tokens are taken in pieces that fill the window; each piece is one attention call over state and window,
        causal at the lower right. Whenever the window of a sequence is full and it has a token left, it opens a chunk.

        Raises:
            ValueError: the cache belongs to another model, batch size or attention implementation.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states, step)
        self._check(key_states, step)
        self.follow(key_states)
        if not torch.is_inference_mode_enabled():
            parts = (self.keys, self.bias, self.state and self.state.count)  # the others are made with one of these
            if any(part is not None and part.is_inference() for part in parts):
                self.map(torch.clone)  # autograd cannot save inference tensors, nor can they be written in place
        self.unfinished = True

        padding, batch, total = step.padding, key_states.shape[0], key_states.shape[2]
        new = {"keys": key_states, "values": value_states, "gates": step.gates, "positions": step.positions}
        new = {name: part for name, part in new.items() if part is not None}
        tracked = torch.is_grad_enabled() and any(part.requires_grad for part in (step.queries, *new.values()))
        has_room = max(self.fills) < self.rule.window_size and self.stop < self.positions.shape[1]
        if total == 1 and padding is None and has_room and not (tracked or self.in_graph):
            # Between two borders of chunks, a step of decoding is one write and one call.
            self._write(new, [1] * batch, in_place=True)
            output = self._attend(step, step.queries)
            self.took(1, None)
            self.unfinished = False
            return output, None

        columns = total if padding is None else padding.columns
        counts = [total] * batch if padding is None else list(padding.count)
        room = self._make_room(counts)
        whole = None
        if room is not None:
            queries = step.queries.transpose(1, 2)
            whole = torch.empty_like(queries, memory_format=torch.contiguous_format)
        alike = len(set(zip(self.fills, counts))) == 1
        sizes = _sizes(self.rule, self.rule.window_size - self.fills[0], counts[0]) if alike else None
        pieces = _Pieces({"queries": step.queries} | new, batch, whole, sizes)
        while pieces.done != counts:
            left = [count - done for count, done in zip(counts, pieces.done)]
            full = [b for b in range(batch) if self.fills[b] == self.rule.window_size and left[b]]
            if full:
                if self.record_past:
                    self._remember(self.seen + columns - left[0])
                with _without_autocast(self.keys.device.type):
                    # Those that found their state, and those that add to it; rarely both in one step.
                    for opening in ([b for b in full if not self.rows[b]], [b for b in full if self.rows[b]]):
                        if opening and room is None:
                            self._open_chunk(step, opening)
                        elif opening:
                            self._open_chunk_in_place(step, room)
            take = [min(n, self.rule.window_size - fill) for n, fill in zip(left, self.fills)]
            if self.record_past and len(set(left)) == 1:
                take = [min(take)] * batch  # so that every moment to go back to is one column for all sequences
            piece = pieces.next(take)
            # What opening a chunk made may be tracked for the sake of the state's parameters alone.
            tracked = tracked or (torch.is_grad_enabled() and (self.keys.requires_grad or self.values.requires_grad))
            queries = piece.pop("queries")
            self._write(piece, take, not (tracked or self.in_graph))
            self.in_graph = tracked
            pieces.add(self._attend(step, queries))

        self.took(columns, padding)
        if padding is not None and not padding.even:
            self.past = []
        self.unfinished = False
        return pieces.joined(), None

    def _attend(self, step: KVMStep, queries: torch.Tensor) -> torch.Tensor:
        """The newest tokens' `queries` `[B, H, T, D]` against all that the layer holds, `[B, T, H, D]`."""
        stop = self._state_columns + self.stop
        bias = None if self.bias is None or self._bias_is_in_keys else self.bias.narrow(2, 0, stop)
        return step.attend(queries, self.keys.narrow(2, 0, stop), self.values.narrow(2, 0, stop), bias)

    @property
    def _state_columns(self) -> int:
        """`S`"""
        return 0 if self.state is None else self.state.rows

    @property
    def _bias_is_in_keys(self) -> bool:
        return self.keys.shape[-1] > self.values.shape[-1]

    def _write(self, new: dict[str, torch.Tensor], take: list[int], in_place: bool) -> None:
        """Puts the last `take[b]` tokens of each sequence's new columns at the end of its window."""
        size, width = max(take), self.positions.shape[1]
        extra = self.keys.shape[-1] - self.values.shape[-1]
        new["keys"] = F.pad(new["keys"], (0, extra)) if extra else new["keys"]
        after = [fill + count for fill, count in zip(self.fills, take)]
        if len(set(take)) == 1 and self.stop + size <= width:
            for name, tokens in new.items():
                start = self._start(name) + self.stop
                setattr(self, name, _put(getattr(self, name), tokens, DIM[name], start, in_place))
            self.fills, self.stop = after, self.stop + size
        else:
            # Windows move so that all of them end in the same column again, with room for another chunk.
            stop = max(after)
            columns = torch.arange(self.rule.window_size + self.rule.chunk_size, device=self.keys.device)
            fills = _each(self.fills, columns)
            token = columns - stop + _each(after, columns)
            source = torch.where(
                token < fills, token + self.stop - fills, token - fills + width + size - _each(take, columns)
            )
            source = source.clamp(0, width + size - 1).expand(len(take), -1)
            for name, tokens in new.items():
                held, dim, start = getattr(self, name), DIM[name], self._start(name)
                window = torch.cat([held.narrow(dim, start, width), tokens.to(held.dtype)], dim)
                setattr(self, name, torch.cat([held.narrow(dim, 0, start), take_columns(window, dim, source)], dim))
            self.fills, self.stop = after, stop
            has_bias = self.rule.count_bias and self.state is not None
            self._mark(self.bias[:, :, : self._state_columns] if has_bias else None)
        self.lengths = [length + count for length, count in zip(self.lengths, take)]

    def _start(self, name: str) -> int:
        """The column of a buffer in which the window begins."""
        return self._state_columns if name in ("keys", "values") else 0

    def _open_chunk(self, step: KVMStep, opening: list[int]) -> None:
        """Moves the windows of the sequences `opening` on by one chunk: absorbs the blocks that leave them, and lays
        out state and window anew. All of them are full, and all of them have a state, or none has."""
        rule, batch = self.rule, len(self.lengths)
        chosen = None if len(opening) == batch else torch.tensor(opening, device=self.keys.device)

        def of_opening(tensor):
            return tensor if chosen is None else tensor.index_select(0, chosen)

        def with_opening(tensor, part):
            """`tensor` `[B, G, S, ...]` with `part` for the sequences that open a chunk; as many rows as both need."""
            if chosen is None:
                return part
            if tensor is None:
                tensor = part.new_zeros(batch, *part.shape[1:])
            size = max(tensor.shape[2], part.shape[2])
            return _widen(tensor, size).index_copy(0, chosen, _widen(part, size))

        block = self._leaving_block(step, of_opening)
        if self.rows[opening[0]] == 0:
            state, held = found(rule, block), [rule.first_rows] * len(opening)
        else:
            state, held, _ = absorb(
                rule,
                step.treatment,
                State(*map(of_opening, self.state)),
                block,
                held=[self.rows[b] for b in opening],
                contexts=[self.lengths[b] for b in opening],
                choose=step.choose,
            )
        read = readout(rule, step.treatment, state)

        before = self._state_columns
        keys, values = self.keys[..., : self.values.shape[-1]], self.values
        state_keys = with_opening(keys[:, :, :before], (read.keys * step.state_scale()).to(keys.dtype))
        state_values = with_opening(values[:, :, :before], read.values.to(values.dtype))
        state_bias = None
        if read.bias is not None:
            old = self.bias[:, :, :before] if before else None
            state_bias = with_opening(old, read.bias.to(keys.dtype))
        old_state = self.state or [None] * len(state)
        self.state = State(*(with_opening(old, part) for old, part in zip(old_state, state)))
        self.owns_state = False
        changed = dict(zip(opening, held))
        self.rows = [changed.get(b, rows) for b, rows in enumerate(self.rows)]
        self.fills = [fill - rule.chunk_size * (b in changed) for b, fill in enumerate(self.fills)]

        # Columns that no sequence sees any more go to the end, where new tokens will overwrite them.
        free = self.stop - max(self.fills)

        def moved_on(window, dim, *state):
            return torch.cat(
                [*state, window.narrow(dim, free, window.shape[dim] - free), window.narrow(dim, 0, free)], dim
            )

        self.keys = moved_on(keys[:, :, before:], 2, state_keys)
        self.values = moved_on(values[:, :, before:], 2, state_values)
        self.gates = None if self.gates is None else moved_on(self.gates, 2)
        self.positions = moved_on(self.positions, 1)
        self.stop -= free
        self._mark(state_bias)

    def _make_room(self, counts: list[int]) -> State | None:
        """Before a call that opens chunks: buffers with room for the state's readout as it will be after it, and room of that
        many rows for the sums, of which the state is the beginning. Then the call moves through one piece of memory.

        None if that cannot be: autograd or `crop` may need what was held before, or the sequences differ in length.
        """
        bias_in_keys = self._bias_is_in_keys or (self.rule.count_bias and not self.takes_mask)
        if torch.is_grad_enabled() or self.in_graph or self.record_past or bias_in_keys:
            return None
        before = self._state_columns
        even = (
            len(set(zip(self.lengths, counts))) == 1 and set(self.rows) == {before} and set(self.fills) == {self.stop}
        )
        if not even or self.stop + counts[0] <= self.rule.window_size:
            return None
        if not (self.keys.is_contiguous() and self.values.is_contiguous()):
            return None
        gone = (self.lengths[0] - self.fills[0]) // self.rule.chunk_size
        after = rows_after(self.rule, self.lengths[0] + counts[0], gone, before)
        if after == before and self.owns_state:
            return self.state
        precise = torch.promote_types(self.keys.dtype, torch.float32)
        batch, heads, _, dim = self.values.shape
        room = State(
            *(self.values.new_zeros(batch, heads, after, size, dtype=precise) for size in (dim, dim, 1, 1, 1, 1))
        )
        for part, old in zip(room, self.state or ()):
            part[:, :, :before] = old
        if after > before:
            self.keys, self.values = (F.pad(part, (0, 0, 0, after - before)) for part in (self.keys, self.values))
        return room

    def _open_chunk_in_place(self, step: KVMStep, room: State) -> None:
        """As `_open_chunk`, of all sequences alike, within the memory that `_make_room` made, and with a new readout only of
        the rows that changed."""
        rule, before = self.rule, self._state_columns
        block = self._leaving_block(step, lambda tensor: tensor)
        if before == 0:
            after = rule.first_rows
            for part, new in zip(room, found(rule, block)):
                part[:, :, :after] = new
            changed = torch.arange(after, device=self.keys.device).expand(*self.keys.shape[:2], -1)
        else:
            _, held, changed = absorb(
                rule, step.treatment, room.first(before), block, self.rows, self.lengths, room, step.choose
            )
            after = held[0]
        stays = rule.window_size - rule.chunk_size
        for name in ("keys", "values", "gates", "positions"):
            buffer, dim = getattr(self, name), DIM[name]
            if buffer is not None:
                old, new = (before, after) if name in ("keys", "values") else (0, 0)
                window = buffer.narrow(dim, old + rule.chunk_size, stays)
                overlaps = old + rule.chunk_size < new + stays
                buffer.narrow(dim, new, stays).copy_(window.clone() if overlaps else window)
        if changed is not None:
            read = readout(rule, step.treatment, room.select(changed))
            put_rows(self.keys, changed, (read.keys * step.state_scale()).to(self.keys.dtype))
            put_rows(self.values, changed, read.values.to(self.values.dtype))
        state_bias = None
        if rule.count_bias:
            state_bias = self.keys.new_zeros(*self.keys.shape[:2], after)
            if before:
                state_bias[:, :, :before] = self.bias[:, :, :before]
            put_rows(state_bias[..., None], changed, read.bias[..., None].to(state_bias.dtype))
        self.state, self.owns_state, self.rows = room.first(after), True, [after] * len(self.rows)
        self.fills, self.stop = [stays] * len(self.fills), stays
        self._mark(state_bias)

    def _leaving_block(self, step: KVMStep, of_opening: Callable[[torch.Tensor], torch.Tensor]) -> Block:
        """The oldest chunk of full windows."""
        begin, chunk = self.stop - self.rule.window_size, self.rule.chunk_size
        columns = slice(self._state_columns + begin, self._state_columns + begin + chunk)
        return _block(
            step,
            of_opening(self.keys[:, :, columns, : self.values.shape[-1]]),
            of_opening(self.values[:, :, columns]),
            None if self.gates is None else of_opening(self.gates[:, :, begin : begin + chunk]),
            of_opening(self.positions[:, begin : begin + chunk]),
        )

    def _mark(self, state_bias: torch.Tensor | None) -> None:
        """Lays out the bias anew: that of the state `[B, G, S]`, nothing for the window, and for the columns between a
        sequence's last row and its first token in the window what hides them."""
        state, columns = self._state_columns, self.keys.shape[2]
        keys = self.keys[..., : self.values.shape[-1]]
        even = set(self.rows) == {state} and set(self.fills) == {self.stop}
        if state_bias is None and even:
            self.bias, self.keys = None, keys
            return
        if state_bias is None:
            state_bias = keys.new_zeros(keys.shape[0], 1, state)
        self.bias = F.pad(state_bias, (0, columns - state))
        if not even:
            column = torch.arange(columns, device=keys.device)
            first = state + self.stop - _each(self.fills, column)
            hidden = (column >= _each(self.rows, column)) & (column < first)
            # Half of the least number: no score makes up for it, and the scores of a pad, which may see nothing at all,
            # stay finite beside the causal mask.
            least = torch.finfo(keys.dtype).min
            self.bias = self.bias.masked_fill(hidden.reshape(-1, 1, columns), least / 2)
        if not self.takes_mask:
            keys = _with_bias(keys, self.bias)
        self.keys = keys

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
        # The fields of the rules, whose classes may be of two copies of this code.
        same_rule = self.rule is step.rule or vars(self.rule) == vars(step.rule)
        if held[1:] != (heads, dim) or not same_rule:
            raise ValueError(
                "The cache belongs to another model: its key/value heads, head dim or KVM settings differ "
                f"({held[1]} heads of {held[2]}, {self.rule}; this model has {heads} heads of {dim}, {step.rule})."
            )
        if self.keys.dtype != key_states.dtype or self.takes_mask != step.takes_mask:
            raise ValueError(
                f"The cache was filled with keys in {self.keys.dtype} for another attention implementation or dtype "
                f"than this call's ({key_states.dtype}). Use a new cache."
            )


def attend_alone(key_states: torch.Tensor, value_states: torch.Tensor, step: KVMStep) -> torch.Tensor:
    """What the queries of whole sequences attend to, `[B, T, H, D]`, as from a new `KVMLayer`, but of tensors that autograd can
    follow without many copies: nothing is written in place, and nothing is kept for later calls. There is no padding.

    Specification, section 1.
    """
    rule, chunk, window = step.rule, step.rule.chunk_size, step.rule.num_window_chunks
    new = {"keys": key_states, "values": value_states, "gates": step.gates, "positions": step.positions}
    cut = {name: part.split(chunk, DIM[name]) for name, part in new.items() if part is not None}
    opened = range(rule.window_size, key_states.shape[2], chunk)  # where chunks begin that push another from the window
    queries = step.queries.split(_sizes(rule, rule.window_size, key_states.shape[2]), 2)

    outputs = [step.attend(queries[0], torch.cat(cut["keys"][:window], 2), torch.cat(cut["values"][:window], 2), None)]
    state, held = None, [rule.first_rows] * key_states.shape[0]
    for number, context in enumerate(opened):
        with _without_autocast(key_states.device.type):
            block = _block(step, *(cut[name][number] if name in cut else None for name in new))
            if state is None:
                state = found(rule, block)
            else:
                contexts = [context] * len(held)
                state, held, _ = absorb(rule, step.treatment, state, block, held, contexts, choose=step.choose)
            read = readout(rule, step.treatment, state)
            state_keys = (read.keys * step.state_scale()).to(key_states.dtype)
        inside = slice(number + 1, number + 1 + window)
        keys = torch.cat([state_keys, *cut["keys"][inside]], 2)
        values = torch.cat([read.values.to(value_states.dtype), *cut["values"][inside]], 2)
        bias = None
        if read.bias is not None:
            bias = F.pad(read.bias.to(keys.dtype), (0, keys.shape[2] - state.rows))
            if not step.takes_mask:
                keys, bias = _with_bias(keys, bias), None
        outputs.append(step.attend(queries[number + 1], keys, values, bias))
    return torch.cat(outputs, dim=1)


def _sizes(rule: StateRule, room: int, tokens: int) -> list[int]:
    """Of the pieces in which new tokens are taken: as many as there is room for, then a chunk each."""
    sizes = [min(room, tokens)] + [min(rule.chunk_size, tokens - done) for done in range(room, tokens, rule.chunk_size)]
    return sizes if sizes[0] else sizes[1:]


def _block(step: KVMStep, keys, values, gates, positions) -> Block:
    """A chunk of tokens that leaves the window, `[B, G, C, ...]` and `[B, C]`, in the precision of the state."""
    precise = torch.promote_types(keys.dtype, torch.float32)
    keys, values = keys.to(precise), values.to(precise)
    gates = torch.ones_like(keys[..., :1]) if gates is None else gates.to(precise)
    positions = positions[:, None, :, None].expand(*keys.shape[:3], 1)
    return Block(step.treatment.memory_keys(keys, positions), values, gates, positions.to(precise))


def _with_bias(keys: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`[B, G, K, D]` with channels behind them that carry `bias` `[B, G or 1, K]`."""
    # The kernel scales scores by `1 / sqrt(D)`. All channels share the bias: float16 does not reach far.
    carried = bias * (keys.shape[-1] ** 0.5 / BIAS_CHANNELS)
    carried = carried.clamp_min(torch.finfo(keys.dtype).min)[..., None]
    return torch.cat([keys, carried.expand(*keys.shape[:3], BIAS_CHANNELS)], dim=-1)


class _Pieces:
    """The tokens of one call in pieces, of which each sequence takes as many as it has room for. In a piece, a sequence's
    tokens come last.

    Args:
        new: tensors by name, with `total` columns.
        whole: `[B, total, H, D]`, where outputs go if all sequences are alike.
        sizes: of the pieces, if all sequences are alike.
    """

    def __init__(self, new: dict[str, torch.Tensor], batch: int, whole: torch.Tensor | None, sizes: list[int] | None):
        self.new, self.whole, self.total = new, whole, new["queries"].shape[2]
        self.done, self.history, self.outputs = [0] * batch, [], []
        # All at once: the gradient of a piece that is cut out by itself is as large as the whole.
        self.alike = None
        if sizes:
            sizes = [*sizes, self.total - sum(sizes)]  # pads
            self.alike = {name: tensor.split(sizes, DIM[name]) for name, tensor in new.items()}

    def next(self, take: list[int]) -> dict[str, torch.Tensor]:
        """The next `take[b]` tokens of each tensor."""
        number, size = len(self.history), max(take)
        self.history.append((self.done, take))
        self.done = [start + count for start, count in zip(self.done, take)]
        if self.alike:
            return {name: parts[number] for name, parts in self.alike.items()}
        columns = torch.arange(size, device=self.new["queries"].device)
        index = columns + _each(self.done, columns) - size
        index = index.clamp(0, self.total - 1).expand(len(take), -1)
        return {name: take_columns(tensor, DIM[name], index) for name, tensor in self.new.items()}

    def add(self, output: torch.Tensor) -> None:
        """What the tokens of the last piece attended to, `[B, T, H, D]`."""
        if self.whole is None:
            self.outputs.append(output)
        else:
            self.whole[:, self.done[0] - output.shape[1] : self.done[0]] = output

    def joined(self) -> torch.Tensor:
        """The outputs `[B, total, H, D]` of all pieces, in the order of the tokens; anything for pads."""
        if self.whole is not None:
            return self.whole
        if not self.outputs:
            return torch.zeros_like(self.new["queries"].transpose(1, 2))
        outputs = self.outputs[0] if len(self.outputs) == 1 else torch.cat(self.outputs, dim=1)
        if self.alike and outputs.shape[1] == self.total:
            return outputs
        token = torch.arange(self.total, device=outputs.device)
        source, stop = torch.zeros(len(self.done), self.total, dtype=torch.long, device=outputs.device), 0
        for done, take in self.history:
            stop += max(take)
            start, after = _each(done, token), _each([a + b for a, b in zip(done, take)], token)
            source = torch.where((token >= start) & (token < after), token - after + stop, source)
        return take_columns(outputs, 1, source)


class BlockSlidingLayer(KVMLayer):
    """The cache of one `block_sliding_attention` layer: the same window, and sinks in place of the state."""

    _layer_type = "block_sliding_attention"


class KVMStaticLayer(StaticLayer):
    """What transformers finds when it is asked for a static cache: a refusal."""

    _layer_type = "kvm_attention"

    def __init__(self, *args, **kwargs):
        raise ValueError(
            f"A static cache is not available for `{self._layer_type}` layers, whose window and state move by their own "
            "rule. Leave `cache_implementation` out: the default cache of a KVM model is bounded already."
        )


class BlockSlidingStaticLayer(KVMStaticLayer):
    _layer_type = "block_sliding_attention"


class KVMCache(SequencesCache):
    """The cache of a KVM model: a `KVMLayer` per `kvm_attention` layer, transformers' own layers for the others.

    Args:
        config: the model's `KVMConfig`.
    """

    FORMAT = "kvm_cache"
    NEEDS = "num_window_chunks"
    IRRELEVANT = frozenset()

    @staticmethod
    def further_layers(config) -> list[TokenShiftLayer]:
        return [TokenShiftLayer() for _ in range(getattr(config, "num_token_shifts", 0))]

    @property
    def rows(self) -> list[list[int]]:
        """State rows that each layer holds of each sequence; an empty list for layers that have no state."""
        return [list(getattr(layer, "rows", [])) for layer in self.layers]


def _without_autocast(device_type: str):
    """Which row a token joins must not depend on whether training runs under autocast."""
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def _put(buffer: torch.Tensor, new: torch.Tensor, dim: int, start: int, in_place: bool) -> torch.Tensor:
    """`buffer` with `new` written at `start`, in place or in a copy."""
    size = new.shape[dim]
    if in_place:
        buffer.narrow(dim, start, size).copy_(new)
        return buffer
    after = buffer.narrow(dim, start + size, buffer.shape[dim] - start - size)
    return torch.cat([buffer.narrow(dim, 0, start), new.to(buffer.dtype), after], dim=dim)


def _widen(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """`[B, G, M, ...]` with rows added up to `rows`. They hold 1, so that nothing is divided by zero."""
    return F.pad(tensor, (0, 0) * (tensor.ndim - 3) + (0, rows - tensor.shape[2]), value=1.0)


def _each(counts: list[int], like: torch.Tensor) -> torch.Tensor | int:
    """A number per sequence as `[B, 1]`, or the one number if they are all the same."""
    return counts[0] if len(set(counts)) == 1 else torch.tensor(counts, device=like.device)[:, None]

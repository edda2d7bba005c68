"""The recurrence of Key-Value Means: how a growing past becomes a small state. Tensors in, tensors out, no Transformers.

Source: Goldstein & Cheah, Key-Value Means, arXiv 2605.09877; sections 2 to 4 of our specification, and section 8 for
the `positional` treatment of keys, which is ours. Shapes in the letters of the specification: `B` batch, `G` key/value
heads, `M` state rows, `C` chunk size, `D` head dim, `r` rotary channels.

Read top to bottom: what a layer is asked to do (`StateRule`), how many rows it may hold (`budget`), what it holds
(`State`), what is folded in (`Block`), the two ways to turn a key into a memory key (`NormalizedKeys`,
`PositionalKeys`), and the operations `found`, `choose`, `absorb` and `readout`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

# Similarities of tokens and rows that are held at a time, at most: on a CPU what its caches hold, on a GPU 512 MiB.
CPU_SIMILARITIES, GPU_SIMILARITIES = 2**20, 2**27


@dataclass(frozen=True)
class StateRule:
    """Everything about a KVM layer that is not a tensor; the names are those of `KVMConfig`, which checks them."""

    chunk_size: int
    num_window_chunks: int
    num_sink_tokens: int
    state_budget: str
    state_size: int
    state_growth_factor: float
    state_growth_exponent: float
    state_saturation: int | None
    state_round_to: int
    state_max_size: int | None
    gate_keys: bool
    gate_values: bool
    gate_appends: bool
    gate_initial_state: bool
    value_radius: bool
    state_treatment: str
    count_bias: float

    @classmethod
    def from_config(cls, config, layer_type: str = "kvm_attention") -> "StateRule":
        rule = cls(**{field.name: getattr(config, field.name) for field in fields(cls)})
        if layer_type == "kvm_attention":
            return rule
        # Block sliding attention is the window without a state; sinks stay beside it as they are.
        return replace(
            rule,
            state_budget="sinks",
            state_treatment="sinks",
            gate_keys=False,
            gate_values=False,
            value_radius=False,
            count_bias=0.0,
        )

    @property
    def window_size(self) -> int:
        """`L`: the tokens of the block sliding window."""
        return self.chunk_size * self.num_window_chunks

    @property
    def first_rows(self) -> int:
        """Rows of the state when it is founded: the tokens of the first chunk, or only its sinks."""
        return self.num_sink_tokens if self.state_budget == "sinks" else self.chunk_size


def budget(rule: StateRule, context: int, available: int, current: int) -> int:
    """Number of state rows wanted after absorbing a block (specification, section 4).

    Args:
        context: tokens that have been queries so far.
        available: tokens that the state covers after this block.
        current: rows held now; a state never shrinks.
    """
    if rule.state_budget == "fixed":
        want = rule.state_size
    else:
        if rule.state_budget == "power_law":
            target = rule.state_growth_factor * context**rule.state_growth_exponent
        else:
            target = rule.state_saturation * context / (rule.state_saturation + context)
        want = math.floor(target) // rule.state_round_to * rule.state_round_to
        want = max(want, rule.state_size)
    if rule.state_max_size is not None:
        want = min(want, rule.state_max_size)
    return max(min(want, available), current)


def rows_to_append(rule: StateRule, context: int, current: int) -> int:
    """Tokens that found rows when the token at position `context` opens a chunk (section 3, step 1)."""
    if rule.state_budget == "sinks":
        return 0
    available = context - rule.window_size + rule.chunk_size
    return min(budget(rule, context, available, current) - current, rule.chunk_size)


def rows_after(rule: StateRule, tokens: int, gone: int = 0, rows: int = 0) -> int:
    """State rows held once `tokens` tokens of a sequence have been seen, going on from `rows` rows when `gone` chunks have left
    the window: section 3 with the tensors left out."""
    for context in range(rule.window_size + gone * rule.chunk_size, tokens, rule.chunk_size):
        rows = rule.first_rows if context == rule.window_size else rows + rows_to_append(rule, context, rows)
    return rows


class State(NamedTuple):
    """What a layer remembers of the tokens that left its window: raw sums, rows in order of creation, sinks first."""

    key_sum: torch.Tensor  # [B, G, M, D] sum of (gated) memory keys
    value_sum: torch.Tensor  # [B, G, M, D] sum of (gated) values
    radius: torch.Tensor  # [B, G, M, 1] length of the value that founded the row
    count: torch.Tensor  # [B, G, M, 1] tokens in the row
    mass: torch.Tensor  # [B, G, M, 1] sum of their gates
    position_sum: torch.Tensor  # [B, G, M, 1] sum of gate times position

    @property
    def rows(self) -> int:
        return self.key_sum.shape[2]

    def first(self, rows: int) -> "State":
        """Its first `rows` rows, which share its memory."""
        return State(*(part[:, :, :rows] for part in self))

    def select(self, index: torch.Tensor) -> "State":
        """The rows `index` [B, G, c], chosen per sequence and head."""
        return State(*_rows_at(self, index))


class Block(NamedTuple):
    """Tokens that leave the window together, with their memory keys."""

    keys: torch.Tensor  # [B, G, C, D]
    values: torch.Tensor  # [B, G, C, D]
    gates: torch.Tensor  # [B, G, C, 1], ones where the layer has no gate
    positions: torch.Tensor  # [B, G, C, 1]

    def select(self, index: torch.Tensor) -> "Block":
        """The tokens `index` [B, G, c] of the block, chosen per row and head."""
        return Block(*_rows_at(self, index))


class Readout(NamedTuple):
    """The state as attention sees it."""

    keys: torch.Tensor  # [B, G, M, D]
    values: torch.Tensor  # [B, G, M, D]
    bias: torch.Tensor | None  # [B, G, M], added to the scores


class KeyTreatment(Protocol):
    """How a layer turns window keys into memory keys, compares them with rows, and reads rows back as keys."""

    def memory_keys(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor: ...

    def similarity(self, keys: torch.Tensor, key_sum: torch.Tensor) -> torch.Tensor: ...

    def read(self, state: State) -> torch.Tensor: ...


@dataclass
class NormalizedKeys:
    """Section 2: rotary channels zeroed, one LayerNorm on entry, on every comparison and on every read."""

    state_norm: Callable[[torch.Tensor], torch.Tensor]
    rotary_channels: int

    def memory_keys(self, keys, positions):
        """`[B, G, C, D]` window keys (and their positions `[B, G, C, 1]`, unused here) to memory keys."""
        return self.state_norm(F.pad(keys[..., self.rotary_channels :], (self.rotary_channels, 0)))

    def similarity(self, keys, key_sum):
        """`[B, G, C, D]` against `[B, G, M, D]` to `[B, G, C, M]`: a dot product with the normed row."""
        return keys @ self.state_norm(key_sum).transpose(-1, -2)

    def read(self, state):
        return self.state_norm(state.key_sum)


@dataclass
class PositionalKeys:
    """Section 8: rotation undone on entry, the row's mean key rotated to the row's mean position on every read.

    `rotate(keys, positions, inverse)` turns `[B, G, N, D]` keys to positions `[B, G, N]`, which may be real numbers.
    """

    rotate: Callable[[torch.Tensor, torch.Tensor, bool], torch.Tensor]

    def memory_keys(self, keys, positions):
        """`[B, G, C, D]` window keys at `positions` `[B, G, C, 1]` to the keys as they were before RoPE."""
        return self.rotate(keys, positions.squeeze(-1), True)

    def similarity(self, keys, key_sum):
        """`[B, G, C, D]` against `[B, G, M, D]` to `[B, G, C, M]`: the cosine."""
        return F.normalize(keys, dim=-1) @ F.normalize(key_sum, dim=-1).transpose(-1, -2)

    def read(self, state):
        mass = _positive(state.mass)
        return self.rotate(state.key_sum / mass, (state.position_sum / mass).squeeze(-1), False)


@dataclass
class SinkKeys:
    """Block sliding attention: the first tokens' keys as the window has them, and nothing is merged."""

    def memory_keys(self, keys, positions):
        return keys

    def read(self, state):
        return state.key_sum


def found(rule: StateRule, block: Block) -> State:
    """The first state: one row per token of the first chunk. The radius is that of the ungated value in any case."""
    block = Block(*(part[:, :, : rule.first_rows] for part in block))
    state = _rows(rule, block, gated=rule.gate_initial_state)
    return state._replace(radius=block.values.norm(dim=-1, keepdim=True))


def choose(
    rule: StateRule, treatment: KeyTreatment, key_sum: torch.Tensor, block: Block, held: list[int], appended: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The row that each of a block's tokens joins, and whether it founds it, both `[B, G, C]`.

    A few heads at a time, so that their similarities `[B, g, C, M]` stay in the cache of a CPU, or within bounds on a GPU.

    Args:
        key_sum: `[B, G, M, D]`, with room for as many rows as any sequence founds, whatever is there.
        held: rows that each sequence holds; appended: rows that are to be founded.
    """
    batch, heads, chunk, _ = block.keys.shape
    most = CPU_SIMILARITIES if key_sum.device.type == "cpu" else GPU_SIMILARITIES
    size = max(1, most // (batch * chunk * key_sum.shape[2]))
    chosen = []
    for first in range(0, heads, size):
        some = slice(first, first + size)
        block_of_some = Block(*(part[:, some] for part in block))
        chosen.append(_choose(rule, treatment, key_sum[:, some], block_of_some, held, appended))
    return chosen[0] if len(chosen) == 1 else tuple(torch.cat(part, dim=1) for part in zip(*chosen))


def _choose(rule, treatment, key_sum, block, held, appended):
    most, after = max(appended), [rows + count for rows, count in zip(held, appended)]
    before, place = _per_sequence(held, key_sum), torch.arange(rule.chunk_size, device=key_sum.device)
    if min(appended) == rule.chunk_size:
        row = (before + place).expand(block.keys.shape[:3])
        return row, torch.ones_like(row, dtype=torch.bool)

    similarity = treatment.similarity(block.keys, key_sum)  # [B, G, C, M]
    founds = None
    if most > 0:
        novelty = _of_held_rows(similarity[..., : max(held)], held).amax(dim=-1)
        founds = _are_lowest(novelty, appended)  # [B, G, C]
        # In order of position. Where one sequence founds fewer rows than another, others stand behind its founders.
        founders = (~founds).to(torch.uint8).sort(dim=-1, stable=True).indices[..., :most]
        founded = _rows(rule, block.select(founders), gated=rule.gate_appends)
        column = (before + place[:most]).reshape(-1, 1, 1, most).expand(*similarity.shape[:3], -1)
        similarity.scatter_(3, column, treatment.similarity(block.keys, founded.key_sum))
    # Nothing joins a sink: it looks like the row behind the sinks, to which the tie then goes.
    sinks = rule.num_sink_tokens
    similarity[..., :sinks] = similarity[..., sinks : sinks + 1]
    row = _first_highest(_of_held_rows(similarity, after)).clamp_min(sinks)  # [B, G, C]
    if rule.gate_keys:  # scales a token's similarities alike, except by zero, where all of them tie
        row = row.masked_fill(block.gates.squeeze(-1) <= 0, sinks)
    if founds is None:
        return row, torch.zeros_like(row, dtype=torch.bool)
    return torch.where(founds, before + founds.cumsum(-1) - 1, row), founds


class Absorbed(NamedTuple):
    state: State
    held: list[int]  # rows that each sequence holds of it
    joined: torch.Tensor | None  # [B, G, C] the row of each token of the block; None if none joins any


def absorb(
    rule: StateRule,
    treatment: KeyTreatment,
    state: State,
    block: Block,
    held: list[int],
    contexts: list[int],
    room: State | None = None,
    choose: Callable[..., tuple[torch.Tensor, torch.Tensor]] = choose,
) -> Absorbed:
    """Folds one block that leaves the window into the state (section 3, steps 1 to 3).

    Both choices, which tokens found rows and which row a token joins, are constants to autograd; gradients reach keys,
    values and gates through the sums. A token that founds a row joins a row of zeros.

    Args:
        held: rows that each of the `B` sequences holds; where that is fewer than `M`, the rest is not looked at.
        contexts: per sequence the position of the token that opens the new chunk, which is the number of tokens that
            were queries.
        room: contiguous tensors of which `state` is the beginning, with zeros behind it: the block is added in place, and
            the new state is a part of them. All sequences must hold `M` rows, and found equally many.
        choose: another may know the choices already.
    """
    if rule.state_budget == "sinks":
        return Absorbed(state, held, None)
    appended = [rows_to_append(rule, context, rows) for context, rows in zip(contexts, held)]
    after = [rows + count for rows, count in zip(held, appended)]
    state = State(*(_with_new_rows(total, held, appended) for total in state)) if room is None else room.first(after[0])
    with torch.no_grad():
        row, founds = choose(rule, treatment, state.key_sum, block, held, appended)

    if not rule.gate_appends:
        block = block._replace(gates=block.gates.masked_fill(founds[..., None], 1.0))
    tokens = _rows(rule, block, gated=True)
    tokens = tokens._replace(radius=tokens.radius.masked_fill(~founds[..., None], 0.0))
    whole = room or state
    index = _flat(row, whole.rows)
    for total, part in zip(whole, tokens):
        _own_flat_rows(total).index_add_(0, index, _flat_rows(part))
    if room is None:
        state = state.first(max(after))
    return Absorbed(state, after, row)


def readout(rule: StateRule, treatment: KeyTreatment, state: State) -> Readout:
    """The state as keys, values and score bias, "just in time" (section 2; the bias is section 8's)."""
    if rule.value_radius:
        length = state.value_sum.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        values = state.value_sum * (state.radius / length)
    else:
        values = state.value_sum / state.count
    bias = rule.count_bias * _positive(state.mass).squeeze(-1).log() if rule.count_bias else None
    return Readout(treatment.read(state), values, bias)


def _rows(rule: StateRule, block: Block, gated: bool) -> State:
    """Every token of a block as a row of its own."""
    ones = torch.ones_like(block.gates)
    key_gate = block.gates if gated and rule.gate_keys else ones
    value_gate = block.gates if gated and rule.gate_values else ones
    values = value_gate * block.values
    return State(
        key_sum=key_gate * block.keys,
        value_sum=values,
        radius=values.norm(dim=-1, keepdim=True),
        count=ones,
        mass=key_gate,
        position_sum=key_gate * block.positions,
    )


def _per_sequence(counts: list[int], like: torch.Tensor) -> torch.Tensor | int:
    """A number per sequence as `[B, 1, 1]`, or the one number if they are all the same."""
    if len(set(counts)) == 1:
        return counts[0]
    return torch.tensor(counts, device=like.device)[:, None, None]


def _of_held_rows(similarity: torch.Tensor, held: list[int]) -> torch.Tensor:
    """`[B, G, C, M]` in which a row that its sequence does not hold cannot be the first with the highest value."""
    if set(held) == {similarity.shape[-1]}:
        return similarity
    rows = torch.arange(similarity.shape[-1], device=similarity.device)
    absent = (rows >= _per_sequence(held, similarity)).reshape(-1, 1, 1, rows.numel())
    return torch.where(absent, similarity[..., :1], similarity)


def _with_new_rows(total: torch.Tensor, held: list[int], appended: list[int]) -> torch.Tensor:
    """`[B, G, M, d]`, of which each sequence holds `held` rows, with zeros right behind them for `appended` new ones. What no
    sequence holds is 1, so that nothing is divided by zero."""
    rows, most = max(held), max(appended)
    if set(held) == {total.shape[2]} and len(set(appended)) == 1:
        return torch.cat([total, total.new_zeros(*total.shape[:2], most, total.shape[3])], dim=2)
    wide = F.pad(total[:, :, :rows], (0, 0, 0, most), value=1.0)
    row, first, new = (
        torch.arange(rows + most, device=total.device),
        *(_per_sequence(n, total) for n in (held, appended)),
    )
    return wide.masked_fill(((row >= first) & (row < first + new)).reshape(-1, 1, rows + most, 1), 0.0)


def _rows_at(tensors: tuple[torch.Tensor, ...], index: torch.Tensor) -> list[torch.Tensor]:
    """`[B, G, c, d]` of each: the rows `index` `[B, G, c]` of `[B, G, M, d]`."""
    flat = _flat(index, tensors[0].shape[2])
    return [_flat_rows(part).index_select(0, flat).view(*index.shape, part.shape[-1]) for part in tensors]


def put_rows(tensor: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes `rows` `[B, G, c, d]` over the rows `index` `[B, G, c]` of a contiguous `[B, G, M, d]`; rows that are named twice
    must be given twice alike."""
    _own_flat_rows(tensor).index_copy_(0, _flat(index, tensor.shape[2]), _flat_rows(rows))


def _flat_rows(tensor: torch.Tensor) -> torch.Tensor:
    """`[B, G, M, d]` as `[B * G * M, d]`."""
    return tensor.flatten(0, 2)


def _own_flat_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The same to write to: where this could only be a copy, PyTorch raises, and nothing is lost in silence."""
    return tensor.view(-1, tensor.shape[-1])


def _flat(index: torch.Tensor, rows: int) -> torch.Tensor:
    """`[B, G, c]` places among `rows` rows as places `[B * G * c]` among those of all heads: moving whole rows by one index
    each is several times as fast as `gather` and `scatter_add`."""
    heads = index.flatten(0, 1)
    head = torch.arange(heads.shape[0], device=index.device)[:, None]
    return (heads + rows * head).flatten()


def _first_highest(similarity: torch.Tensor) -> torch.Tensor:
    """Index `[...]` of the highest of `[..., M]`, the lowest index on a tie. Writes over `similarity`.

    A token that occurs twice has the same key in the first layer, so exact ties are common; rounding must not decide
    them, or the result would depend on how a sequence was split over calls. Hence the tolerance.
    """
    bound = similarity.amax(dim=-1, keepdim=True) - _rounding(similarity)
    # The least column among those that miss the bound by nothing, in as few passes over the tensor as can be. (Boolean tensors
    # and `argmax` take several times as long.)
    missed = torch.sub(bound, similarity, out=similarity).clamp_min_(0)
    column = torch.arange(similarity.shape[-1], dtype=similarity.dtype, device=similarity.device)
    most = torch.finfo(similarity.dtype).max
    return torch.add(column, missed, alpha=most, out=missed).amin(dim=-1).nan_to_num_(0).long()


def _are_lowest(values: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Which of `[B, G, C]` are the `counts[b]` lowest; among ties for the last place the first ones."""
    count = _per_sequence(counts, values)
    place = torch.zeros_like(values[..., :1], dtype=torch.long) + count - 1
    last = values.sort(dim=-1).values.gather(-1, place.clamp_min(0))
    tolerance = _rounding(values)
    rank = (values >= last - tolerance).to(torch.uint8) + (values > last + tolerance).to(torch.uint8)
    order = rank.sort(dim=-1, stable=True).indices
    is_low = (torch.arange(values.shape[-1], device=values.device) < count).expand(values.shape)
    return torch.zeros_like(is_low).scatter(-1, order, is_low)


def _rounding(values: torch.Tensor) -> torch.Tensor:
    """Differences in the last dimension that rounding may have made."""
    largest = torch.maximum(values.amax(dim=-1, keepdim=True), -values.amin(dim=-1, keepdim=True))
    return 64 * torch.finfo(values.dtype).eps * largest


def _positive(mass: torch.Tensor) -> torch.Tensor:
    """Gates are positive but may underflow; a row must never be divided by zero."""
    return mass.clamp_min(torch.finfo(mass.dtype).tiny ** 0.5)

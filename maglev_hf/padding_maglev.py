"""Which columns of a batch are tokens: padded batches and packed sequences, read once per forward on the host.

Depends on PyTorch alone. Specification, section 6.2: a sequence gives the same results in any company.
"""

import warnings
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Padding:
    """Where the tokens of each sequence lie among the columns of one call: `count[b]` of them from `first[b]` on."""

    first: tuple[int, ...]
    count: tuple[int, ...]
    columns: int

    @property
    def width(self) -> int:
        """Columns that are left when every sequence begins in the first one."""
        return max(1, max(self.count))

    @property
    def even(self) -> bool:
        """Whether all sequences have the same number of tokens, which end in the last column."""
        return len(set(self.count)) == 1 and all(n + self.count[0] == self.columns for n in self.first)

    def align(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """`T` columns in dimension `dim` to `width`, the tokens of each sequence from the first column on."""
        if not any(self.first):
            return tensor.narrow(dim, 0, self.width)
        index = self._first(tensor.device) + torch.arange(self.width, device=tensor.device)
        return take_columns(tensor, dim, index.clamp_max(self.columns - 1))

    def restore(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[B, width, D]` to `[B, T, D]`: each token where it came from, zero for pads."""
        index = torch.arange(self.columns, device=hidden.device) - self._first(hidden.device)
        real = (index >= 0) & (index < torch.tensor(self.count, device=hidden.device)[:, None])
        return take_columns(hidden, 1, index.clamp(0, self.width - 1)).masked_fill(~real[..., None], 0)

    def positions(self, lengths: list[int], device: torch.device) -> torch.Tensor:
        """`[B, T]` positions of tokens that continue sequences of `lengths` tokens; anything for pads."""
        start = torch.tensor(lengths, device=device)[:, None] - self._first(device)
        return (torch.arange(self.columns, device=device) + start).clamp_min(0)

    def _first(self, device: torch.device) -> torch.Tensor:
        return torch.tensor(self.first, device=device)[:, None]


def take_columns(tensor: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """For every entry `b` of the batch the columns `index[b]` of dimension `dim`; `index` is `[B, columns]`."""
    shape = [1] * tensor.ndim
    shape[0], shape[dim] = index.shape
    size = list(tensor.shape)
    size[dim] = index.shape[1]
    return tensor.gather(dim, index.reshape(shape).expand(size))


def read_padding(
    attention_mask: torch.Tensor | None, batch: int, past: int, columns: int, lengths: list[int], sliding: bool
) -> Padding | None:
    """What a 2D `attention_mask` `[B, past + columns]` says of the new columns; None if all of them are tokens.

    Args:
        lengths: tokens that the cache holds of each sequence.
        sliding: whether the model has sliding-attention layers, which count their window in columns.

    Raises:
        ValueError: the mask is not 2D or not of 0 and 1, has another shape, is neither left nor right padding, or does
            not say of the past what the cache holds.
    """
    if len(lengths) != batch:
        raise ValueError(
            f"The cache holds {len(lengths)} sequences, the input has {batch}. Use a new cache, or "
            "`cache.batch_repeat_interleave` / `cache.batch_select_indices` to change its rows."
        )
    if attention_mask is None:
        if any(length != past for length in lengths):
            raise ValueError(
                "The cache holds padded sequences: give the `attention_mask` of all tokens so far, of shape "
                f"({batch}, {past + columns})."
            )
        return None
    if getattr(attention_mask, "ndim", None) != 2:
        raise ValueError(
            "`attention_mask` must be 2D (batch, tokens so far): the layers are causal within each sequence and "
            "take no other pattern."
        )
    if tuple(attention_mask.shape) != (batch, past + columns):
        raise ValueError(
            f"`attention_mask` has shape {tuple(attention_mask.shape)}, expected {(batch, past + columns)}: one entry "
            "for every token so far, those in the cache included."
        )

    real = attention_mask == 1
    known = real | (attention_mask == 0)
    place = torch.arange(past + columns, device=real.device)
    new = real[:, past:]
    facts = (
        known.all(-1).long(),
        real[:, :past].sum(-1),
        torch.where(real[:, :past], place[:past] + 1, 0).amax(-1) if past else real.new_zeros(batch, dtype=torch.long),
        new.sum(-1),
        torch.where(new, place[past:] - past, columns).amin(-1),
        torch.where(new, place[past:] - past + 1, 0).amax(-1),
    )
    rows = torch.stack(facts, dim=1).tolist()  # all facts at once: here the host waits for the device

    for number, (is_known, before, before_stop, count, first, stop) in enumerate(rows):
        if not is_known:
            raise ValueError("`attention_mask` must hold 1 for tokens and 0 for padding, nothing else.")
        if count and (stop - first != count or (first > 0 and stop < columns)):
            raise ValueError(
                f"`attention_mask` of sequence {number} is neither left nor right padding: its tokens must be one run "
                "at the beginning or the end of the new columns."
            )
        if before != lengths[number]:
            raise ValueError(
                f"`attention_mask` counts {before} tokens of sequence {number} before this call, the cache holds "
                f"{lengths[number]}. Give the mask of all tokens so far, with the padding in the columns where it was."
            )
        if sliding and before and count and before_stop != past + first:
            raise ValueError(
                f"`attention_mask` of sequence {number} has padding between its tokens, but sliding-attention layers "
                "count their window in columns. Pad on the left, before a sequence's first token."
            )
    if all(count == columns for *_, count, _, _ in rows):
        return None
    return Padding(
        first=tuple(first if count else 0 for *_, count, first, _ in rows),
        count=tuple(count for *_, count, _, _ in rows),
        columns=columns,
    )


def check_first_positions(position_ids: torch.Tensor, padding: Padding | None, lengths: list[int]) -> None:
    """Raises ValueError if the positions `[B, T]` of new tokens do not go on from the tokens that the cache holds."""
    first = position_ids[:, :1]
    if padding is not None:
        first = take_columns(position_ids, 1, torch.tensor(padding.first, device=position_ids.device)[:, None])
    # The host waits: wrong positions would be computed with in silence.
    for number, (position, length) in enumerate(zip(first.squeeze(1).tolist(), lengths)):
        if position != length and (padding is None or padding.count[number]):
            raise ValueError(
                f"`position_ids` of sequence {number} begin at {position}, but it has {length} tokens so far: count each "
                "sequence's own tokens from 0, padding not included, or leave `position_ids` out. (`generate()` counts them "
                "itself, which needs prompts that are padded on the left, `tokenizer(..., padding_side='left')`, have a token "
                "each, and go on from what a cache has seen.)"
            )


def check_padded_positions(position_ids: torch.Tensor, padding: Padding) -> None:
    """Raises ValueError if the positions of a sequence's tokens do not go up by one."""
    steps = padding.align(position_ids).diff(dim=-1)
    later = torch.arange(1, padding.width, device=steps.device)
    inside = later < torch.tensor(padding.count, device=steps.device)[:, None]
    if ((steps != 1) & inside).any():
        raise ValueError(
            "`position_ids` must go up by one from token to token. Packed sequences cannot be padded: give them without "
            "`attention_mask`."
        )


def read_packing(
    position_ids: torch.Tensor | None, cu_seq_lens: torch.Tensor | None, columns: int
) -> list[list[slice]]:
    """Where packed sequences lie, from `position_ids` `[1 or B, T]` that restart at 0, or from `cu_seq_lens` `[N + 1]`,
    the borders that transformers' flattening collator gives.

    Returns:
        Per row of `position_ids` (one for all, without them) its sequences; a single one if nothing is packed.

    Raises:
        ValueError: positions that neither go up by one nor restart at 0, or that restart elsewhere than at the borders.
    """
    borders = None
    if cu_seq_lens is not None:
        given = torch.as_tensor(cu_seq_lens).tolist()  # the host cuts by them, as by restarts below
        if not isinstance(given, list) or not given or not all(isinstance(border, int) for border in given):
            raise ValueError(f"`cu_seq_lens_q` must be a list of whole numbers, the borders of sequences, got {given}.")
        borders = sorted(set(given))
        if borders[0] != 0 or borders[-1] != columns or given != sorted(given):
            raise ValueError(f"`cu_seq_lens_q` must go up from 0 to the number of tokens, {columns}, got {given}.")
    found = [[0, columns]]
    if position_ids is not None and columns > 1:
        restarts = F.pad(position_ids.diff(dim=-1) != 1, (1, 0))
        if restarts.any():
            if (position_ids[restarts] != 0).any():
                raise ValueError(
                    "`position_ids` must go up by one from token to token, or restart at 0 with a new packed sequence."
                )
            found = [[0, *row.nonzero().squeeze(-1).tolist(), columns] for row in restarts]
    if borders is not None:
        if position_ids is not None and found != [borders]:
            raise ValueError(f"`cu_seq_lens_q` puts borders at {borders}, but `position_ids` restart at {found}.")
        found = [borders]
    return [[slice(start, stop) for start, stop in pairwise(row)] for row in found]


def packed_positions(sequences: list[slice], device: torch.device) -> torch.Tensor:
    """`[1, T]` positions that restart with every sequence."""
    parts = [torch.arange(part.stop - part.start, device=device) for part in sequences]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]


def labels_within_sequences(
    labels: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    cu_seq_lens: torch.Tensor | None,
) -> torch.Tensor:
    """Labels `[B, T]` with -100 where no token of the same sequence stands before: at pads and at first tokens, which
    the shifted loss would take as predicted by a pad or by another sequence."""
    if getattr(attention_mask, "ndim", None) == 2:
        real = attention_mask[:, -labels.shape[1] :] == 1  # it also counts what a cache has seen
        labels = labels.masked_fill(~(real & F.pad(real[:, :-1], (1, 0))), -100)
    if position_ids is not None:
        labels = labels.masked_fill(position_ids == 0, -100)
    if cu_seq_lens is not None:
        borders = torch.as_tensor(cu_seq_lens).to(labels.device, torch.long)
        labels = labels.index_fill(1, borders[borders < labels.shape[1]], -100)
    return labels


def batch_within_sequences(batch):
    """The same of a whole batch of training, whose labels are then those that the loss counts."""
    if "labels" in batch:
        inputs = (batch.get(name) for name in ("attention_mask", "position_ids", "cu_seq_lens_q"))
        batch["labels"] = labels_within_sequences(batch["labels"], *inputs)
    return batch


def items_within_sequences(num_items: torch.Tensor | int, given: torch.Tensor, kept: torch.Tensor, trainer: str):
    """`num_items`, the labels `[..., 1:]` of one or more batches as counted before `labels_within_sequences` kept fewer of
    this batch's. Exact for one batch; of several, this one's share stands for that of all, and a warning says so."""
    if kept is given:
        return num_items
    given, kept = (given[:, 1:] != -100).sum(), (kept[:, 1:] != -100).sum()
    if not torch.compiler.is_compiling() and kept != given and num_items != given:
        warnings.warn(
            "`num_items_in_batch` also counts labels of tokens that no token of their sequence predicts (first tokens "
            f"behind left padding), so accumulated batches are not weighed exactly. {trainer} counts them right.",
            stacklevel=2,
        )
    return num_items * torch.where(kept > 0, kept / given.clamp_min(1), 1)

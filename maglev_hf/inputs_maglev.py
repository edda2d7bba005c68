"""One call's inputs as Maglev's stacks take them: which columns are tokens of which sequence, positions, masks.

Depends on `padding_maglev` and `cache_maglev` beside it, and on transformers' masks.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from .cache_maglev import MaglevCache, snapshot
from .configuration_maglev import MaglevConfig
from .padding_maglev import (
    Padding,
    check_first_positions,
    check_padded_positions,
    packed_positions,
    read_packing,
    read_padding,
)

MAKE_MASK = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}


class MaglevInputs(NamedTuple):
    """One call's inputs as the stacks take them."""

    embeds: torch.Tensor  # [B, T, d], normed if the model norms them
    cache: Cache | None
    past: int  # columns that the cache has seen
    position_ids: torch.Tensor  # [1 or B, T]
    position_embeddings: tuple[torch.Tensor, torch.Tensor]  # [1 or B, T, r]
    attention_mask: torch.Tensor | None  # [B, past + T], None if every column is a token
    padding: Padding | None  # of the new columns
    sequences: list[list[slice]]  # packed sequences per row, or for all rows; one of them if nothing is packed

    @property
    def length(self) -> int:
        return self.embeds.shape[1]

    @property
    def columns(self) -> slice:
        return slice(0, self.length)

    @property
    def is_packed(self) -> bool:
        return any(len(row) > 1 for row in self.sequences)

    def without_pads(self, memory: torch.Tensor, columns: slice) -> torch.Tensor:
        """Memories of some of the columns, zero at pads."""
        if self.padding is None:
            return memory
        real = self.attention_mask[:, self.past + columns.start : self.past + columns.stop] == 1
        return memory.masked_fill(~real[..., None].to(memory.device), 0)

    def shifted(self, first: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """What each column reads: the memory of the one before, `first` `[B, 1, d]` in the first column, and zero where
        a packed sequence begins."""
        fed = torch.cat([first.to(memory), memory[:, :-1]], dim=1)
        if self.is_packed:
            fed = fed.masked_fill((self.position_ids == 0)[..., None].to(fed.device), 0)
        return fed

    def masks(self, config: MaglevConfig, layer_types: list[str], columns: slice) -> dict:
        """What the layers of each type take as `attention_mask` for some of the columns."""
        mask = self.attention_mask
        return {
            layer_type: MAKE_MASK[layer_type](
                config,
                self.embeds[:, columns],
                None if mask is None else mask[:, : self.past + columns.stop],
                self.cache,
                position_ids=self.position_ids if self.is_packed else None,
            )
            for layer_type in set(layer_types)
        }

    def apart(self, config: MaglevConfig) -> "MaglevInputs":
        """The same tokens with a cache that is thrown away, where no cache is to change, or there is none: packed
        sequences each in a row of its own, padded on the right."""
        if not self.is_packed:
            cache = MaglevCache(config) if self.cache is None else snapshot(self.cache)
            return self._replace(cache=cache)
        counts = [part.stop - part.start for _, part in self._parts()]
        embeds = self.unpacked(self.embeds)
        columns = torch.arange(embeds.shape[1], device=embeds.device)
        padding = Padding(first=(0,) * len(counts), count=tuple(counts), columns=embeds.shape[1])
        longest = counts.index(max(counts))
        row, part = self._parts()[longest]
        tables = (table.expand(self.embeds.shape[0], -1, -1)[row : row + 1, part] for table in self.position_embeddings)
        return MaglevInputs(
            embeds=embeds,
            cache=MaglevCache(config),
            past=0,
            position_ids=columns[None],
            position_embeddings=tuple(tables),
            attention_mask=(columns < torch.tensor(counts, device=columns.device)[:, None]).long(),
            padding=padding if len(set(counts)) > 1 else None,
            sequences=[[slice(0, embeds.shape[1])]],
        )

    def _parts(self) -> list[tuple[int, slice]]:
        """Row and columns of every packed sequence."""
        rows = range(self.embeds.shape[0])
        return [(row, part) for row in rows for part in self.sequences[row if len(self.sequences) > 1 else 0]]

    def unpacked(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[B, T, d]` to one row per packed sequence, padded on the right with zeros."""
        return pad_sequence([tensor[row, part] for row, part in self._parts()], batch_first=True)

    def packed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The inverse of `unpacked`."""
        parts = [row[: part.stop - part.start] for row, (_, part) in zip(tensor, self._parts())]
        return torch.cat(parts).unflatten(0, self.embeds.shape[:2])


def read_inputs(
    embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    cache: Cache | None,
    was_given: bool,
    rotary: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    others: dict,
) -> MaglevInputs:
    """Makes out of what people and `generate()` give to `forward` what the stacks need.

    Args:
        embeds: `[B, T, d]`.
        was_given: whether the cache is the caller's, not one that was made for this call.
        rotary: positions to cosines and sines.
        others: further arguments of `forward` (`cu_seq_lens_q`, `seq_idx`).

    Raises:
        ValueError: an empty input, a mask other than padding, positions that do not count each sequence's own tokens, or
            what does not fit the cache.
    """
    past = 0 if cache is None else int(cache.get_seq_length())  # a tensor after crop() of some layers
    if embeds.ndim != 3:
        raise ValueError(f"`input_ids` must be 2D (batch, tokens), got {embeds.ndim - 1}D.")
    batch, length = embeds.shape[:2]
    if batch == 0 or length == 0:
        raise ValueError(
            f"The input is empty ({batch} sequences of {length} tokens): give at least one token. (`generate()` cuts "
            "off what the cache has seen already: give it all ids so far, or an `attention_mask` for all of them.)"
        )
    if position_ids is not None and tuple(position_ids.shape) not in ((1, length), (batch, length)):
        raise ValueError(
            f"`position_ids` has shape {tuple(position_ids.shape)}, expected (1 or {batch}, {length}) here."
        )

    lengths = _lengths(cache, attention_mask, (batch, past))
    # Windows are counted in columns, so there must be no padding between a sequence's tokens.
    padding = read_padding(attention_mask, batch, past, length, lengths, sliding=True)
    device, borders = embeds.device, others.get("cu_seq_lens_q")
    sequences = [[slice(0, length)]]
    if padding is None:
        sequences = read_packing(position_ids, borders, length)
    elif borders is not None:
        raise ValueError("Packed sequences (`cu_seq_lens_q`) cannot be padded: leave `attention_mask` out.")
    packed = any(len(row) > 1 for row in sequences)
    if packed:
        if was_given:
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

    # A mask of ones says nothing, and would hide packed sequences from transformers.
    dense = packed or (padding is None and set(lengths) == {past})
    return MaglevInputs(
        embeds=embeds,
        cache=cache,
        past=past,
        position_ids=position_ids,
        position_embeddings=rotary(position_ids),
        attention_mask=None if dense else attention_mask,
        padding=padding,
        sequences=sequences,
    )


def _lengths(cache: Cache | None, attention_mask, shape: tuple[int, int]) -> list[int]:
    """Tokens that the cache holds of each sequence: as the memory's layer counted them, or else (a plain decoder,
    whose layers count columns) as the mask does, for which the host waits."""
    batch, past = shape
    counted = next((layer.lengths for layer in getattr(cache, "layers", ()) if hasattr(layer, "lengths")), None)
    if counted is not None:
        return counted or [0] * batch
    if past and getattr(attention_mask, "ndim", 0) == 2 and attention_mask.shape[0] == batch:
        return (attention_mask[:, :past] == 1).sum(-1).tolist()
    return [past] * batch

"""What token shift remembers between calls: the last token of each sequence, in a small cache layer of its own.

Token shift mixes a token's features with those of the token before it (specification, section 7). Each place in a model
that does so has a `TokenShiftLayer` in the cache, behind the layers of attention, so that everything that is done to a
cache (beams, rewinding, offloading) is done to it too.

Depends on `padding_kvm` and on transformers' cache protocol.
"""

import operator
from collections.abc import Callable

import torch

from .layer_kvm import RECORDED_TOKENS, SequencesLayer
from .padding_kvm import Padding, take_columns


class TokenShiftLayer(SequencesLayer):
    """Features of the last token of each sequence, of more tokens while the past is recorded for `crop`.

    Attributes:
        tail: `[B, n, D]`, the last tokens of each sequence; the last one is in the last column. None before the first.
    """

    kind = "token shift"

    def reset(self) -> None:
        self.tail, self.lengths = None, []
        self.seen = self.earliest = 0
        self.is_initialized = False

    def lazy_initialization(self, features: torch.Tensor, _) -> None:
        """Nothing is reserved."""
        self.device, self.lengths, self.is_initialized = features.device, [0] * features.shape[0], True

    def update(
        self, features: torch.Tensor, _, begins: torch.Tensor, padding: Padding | None, starts_from_itself: bool
    ) -> tuple[torch.Tensor, None]:
        """Takes `T` new tokens and returns the token before each of them, `[B, T, D]`.

        Args:
            features: `[B, T, D]`.
            begins: `[B or 1, T, 1]`, where a sequence's tokens begin in this call.
            padding: which of the columns are tokens, None if all.
            starts_from_itself: what stands before a sequence's first token: the token itself, or else zero.
        """
        if not self.is_initialized:
            self.lazy_initialization(features, None)
        if self.lengths and len(self.lengths) != features.shape[0]:
            raise ValueError(f"The cache holds {len(self.lengths)} sequences, the input has {features.shape[0]}.")
        if self.tail is not None and self.tail.shape[2] != features.shape[2]:
            raise ValueError(
                f"The cache belongs to another model: it holds token shifts of {self.tail.shape[2]} features, this model's "
                f"have {features.shape[2]}."
            )
        self.follow(features)
        batch, columns, _ = features.shape
        start = features if starts_from_itself else torch.zeros_like(features[:, :1])
        if self.tail is not None:
            last = self.tail[:, -1:]
            if 0 in self.lengths:
                new = torch.tensor([length == 0 for length in self.lengths], device=features.device)[:, None, None]
                last = torch.where(new, start, last)
            start = last
        before = torch.cat([features[:, :1], features[:, :-1]], dim=1)
        before = torch.where(begins, start, before)

        counts = [columns] * batch if padding is None else list(padding.count)
        kept = RECORDED_TOKENS + 1 if self.record_past else 1
        held = 0 if self.tail is None or (padding is None and columns >= kept) else self.tail.shape[1]
        tail = torch.cat([self.tail, features], dim=1) if held else features
        if padding is None:
            self.tail = tail[:, -kept:].clone()  # a view would keep the whole prompt
        else:
            # The last tokens of each sequence: of this call, and before them those that were held.
            size = min(kept, held + max(counts)) or 1
            stop = torch.tensor([f + n for f, n in zip(padding.first, counts)], device=features.device)[:, None]
            count = torch.tensor(counts, device=features.device)[:, None]
            back = torch.arange(-size, 0, device=features.device)
            source = torch.where(-back <= count, held + stop + back, held + count + back)
            self.tail = take_columns(tail, 1, source.clamp_min(0))
        self.lengths = [length + count for length, count in zip(self.lengths, counts)]
        self.took(columns, padding)
        return before, None

    def tensors(self) -> dict[str, torch.Tensor]:
        return {} if self.tail is None else {"tail": self.tail}

    @property
    def nbytes(self) -> int:
        return 0 if self.tail is None else self.tail.nbytes

    def map(self, change: Callable[[torch.Tensor], torch.Tensor], rows: Callable[[list], list] = list) -> None:
        self.tail = None if self.tail is None else change(self.tail)
        self.lengths = rows(self.lengths)

    def can_crop(self, tokens: int) -> bool:
        return self.tail is not None and (tokens < self.tail.shape[1] or set(self.lengths) == {tokens})

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last `-tokens_to_remove` tokens, and forgets the recorded past.

        Raises:
            ValueError: more than was recorded.
        """
        self.check_crop(tokens_to_remove)
        tokens = -operator.index(tokens_to_remove)
        if self.tail is not None:
            left = self.tail.shape[1] - tokens
            self.tail = self.tail[:, left - 1 : left].clone() if left > 0 else None
        self.lengths = [length - tokens for length in self.lengths]
        self.seen -= tokens
        if tokens and self.seen == 0:
            self.reset()

    def fits(self, config) -> bool:
        """Whether tensors and numbers, read from a file, fit together."""
        widths = (3 * config.num_attention_heads * config.head_dim, config.hidden_size)
        return self.tail.ndim == 3 and self.tail.shape[0] == len(self.lengths) and self.tail.shape[2] in widths

    def load(self, facts: dict, tensors: dict[str, torch.Tensor], config) -> None:
        """Takes what a saved cache says of this layer."""
        vars(self).update(facts | tensors)
        self.device, self.is_initialized = self.tail.device, True

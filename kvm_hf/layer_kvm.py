"""What every cache layer of ours can do with its sequences: choose, repeat, copy and move them, and refuse a `crop`.

Depends on `padding_kvm` and on transformers' cache protocol.
"""

import copy
import operator
from abc import abstractmethod
from collections.abc import Callable

import torch
from transformers.cache_utils import CacheLayerMixin

from .padding_kvm import Padding

# How far back `crop` can go at least while the past is recorded. Drafts are far shorter.
RECORDED_TOKENS = 512


class SequencesLayer(CacheLayerMixin):
    """A cache layer that knows its tensors, all of which begin with the batch dimension, and counts on the host.

    Attributes:
        seen: columns of the caller's input so far, pads included.
        lengths: tokens seen per sequence.
        record_past: whether to keep what `crop` needs; earliest: the number of columns below which it cannot go.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False
    supports_early_init = False

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.record_past = False
        self.reset()

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor that the layer holds now, by name."""

    @abstractmethod
    def map(self, change: Callable[[torch.Tensor], torch.Tensor], rows: Callable[[list], list] = list) -> None:
        """Replaces every tensor of the layer, those of its recorded past included, by `change` of it, and every list
        with an entry per sequence by `rows` of it."""

    @abstractmethod
    def can_crop(self, tokens: int) -> bool:
        """Whether the last `tokens` > 0 tokens can be taken back."""

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Sizes for the masks of the model's other layers, which may be derived from this one: nothing is dropped."""
        return self.seen + query_length, 0

    def took(self, columns: int, padding: Padding | None) -> None:
        """Counts a call's columns. Those of a padded call are not tokens of every sequence, so `crop` stops there."""
        self.seen += columns
        if padding is not None:
            self.earliest = self.seen - (padding.count[0] if padding.even else 0)

    def __deepcopy__(self, memo):
        """Also of a layer that was filled with gradients, where PyTorch refuses to copy tensors."""
        other = copy.copy(self)
        other.map(torch.clone)
        return other

    def offload(self) -> None:
        self.map(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self.map(lambda tensor: tensor.to(self.device, non_blocking=True))

    def follow(self, tensor: torch.Tensor) -> None:
        """Moves to where `tensor` is, if the layer was loaded elsewhere."""
        if self.device != tensor.device:
            self.device = tensor.device
            self.prefetch()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._select(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        indices = torch.as_tensor(indices).reshape(-1)
        if indices.dtype == torch.bool:
            indices = indices.nonzero().squeeze(-1)
        self._select(indices)

    def _select(self, indices: torch.LongTensor) -> None:
        def rows(entries):
            if len(set(entries)) <= 1:  # beams of one prompt: nothing to read back from the device
                return entries[:1] * indices.numel()
            return [entries[index] for index in indices.tolist()]

        self.map(lambda tensor: tensor[indices.to(tensor.device)], rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.map(
            lambda tensor: tensor.repeat_interleave(repeats, dim=0),
            lambda entries: [entry for entry in entries for _ in range(repeats)],
        )

    def activate_past_recording(self) -> None:
        """From now on `crop` can take back what is added, the last `RECORDED_TOKENS` tokens at least."""
        self.record_past = True

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raises what `crop` would raise."""
        tokens_to_remove = operator.index(tokens_to_remove)  # generate() gives a tensor before transformers 5.24
        if getattr(self, "unfinished", False):
            raise ValueError("An earlier call with this cache failed half-way. Start again with a new cache.")
        if tokens_to_remove > 0:
            raise ValueError(
                f"`crop` takes the number of tokens to remove as a negative number, got {tokens_to_remove}. (Before "
                "transformers 5.15 a positive number was the length to crop to.)"
            )
        below = self.seen + tokens_to_remove < self.earliest
        if tokens_to_remove and (below or not self.can_crop(-tokens_to_remove)):
            raise ValueError(
                f"The cache cannot drop its last {-tokens_to_remove} tokens: what it held before them is merged or gone, and "
                "the past was not recorded (that far). Call `cache.activate_past_recording()` before adding tokens that may "
                f"be dropped (at least {RECORDED_TOKENS} of them can be, if they are not padded), or `copy.deepcopy` the "
                "cache beforehand."
            )

"""What a Maglev model remembers between calls: transformers' own layers for keys and values, and one memory per sequence.

The memory lives in a small cache layer of its own behind those of attention, so that everything that is done to a cache
(beams, rewinding, saving) is done to it too. Specification, section 2. Depends on `layer_maglev` beside it.
"""

import copy
import operator
from collections.abc import Callable

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from .layer_maglev import RECORDED_TOKENS, SequencesCache, SequencesLayer, is_ours
from .padding_maglev import Padding


class MemoryLayer(SequencesLayer):
    """The memory after the last token of each sequence, of more tokens while the past is recorded for `crop`.

    Attributes:
        tail: `[B, n, d]`, the last memories; that of the last token is in the last column. None before the first.
    """

    kind = "memory"

    def reset(self) -> None:
        self.tail, self.lengths = None, []
        self.seen = self.earliest = 0
        self.is_initialized = False

    def lazy_initialization(self, memory: torch.Tensor, _) -> None:
        """Nothing is reserved."""
        self.device, self.lengths, self.is_initialized = memory.device, [0] * memory.shape[0], True

    def last(self, like: torch.Tensor) -> torch.Tensor:
        """`[B, 1, d]`, what the next token of each sequence reads: zero before its first. In dtype and place of `like`."""
        if self.tail is None:
            return torch.zeros_like(like[:, :1])
        return self.tail[:, -1:].to(like)

    def update(self, memory: torch.Tensor, _, padding: Padding | None = None) -> tuple[torch.Tensor, None]:
        """Takes the memories `[B, T, d]` of new tokens, zero at pads, which come before a sequence's tokens (after them
        if the sequence will not go on)."""
        if not self.is_initialized:
            self.lazy_initialization(memory, None)
        self.follow(memory)
        kept = RECORDED_TOKENS + 1 if self.record_past else 1
        whole = self.tail is None or memory.shape[1] >= kept
        tail = memory if whole else torch.cat([self.tail, memory.to(self.tail.dtype)], dim=1)
        self.tail = tail[:, -kept:].clone()  # a view would keep the whole prompt
        counts = [memory.shape[1]] * memory.shape[0] if padding is None else padding.count
        self.lengths = [length + count for length, count in zip(self.lengths, counts)]
        self.took(memory.shape[1], padding)
        return memory, None

    def tensors(self) -> dict[str, torch.Tensor]:
        return {} if self.tail is None else {"tail": self.tail}

    @property
    def nbytes(self) -> int:
        return 0 if self.tail is None else self.tail.nbytes

    def map(self, change: Callable[[torch.Tensor], torch.Tensor], rows: Callable[[list], list] = list) -> None:
        self.tail = None if self.tail is None else change(self.tail)
        self.lengths = rows(self.lengths)

    def offload(self) -> None:
        """One vector per sequence, which is read before the first layer runs, stays where it is."""

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
        return self.tail.ndim == 3 and self.tail.shape[::2] == (len(self.lengths), config.hidden_size)

    def load(self, facts: dict, tensors: dict[str, torch.Tensor], config) -> None:
        """Takes what a saved cache says of this layer."""
        vars(self).update(facts | tensors)
        self.device, self.is_initialized = self.tail.device, True


class MaglevCache(SequencesCache):
    """The cache of a Maglev model: the last `W - 1` keys and values of each layer, and one memory per sequence.

    Args:
        config: the model's `MaglevConfig`.
    """

    FORMAT = "maglev_cache"
    NEEDS = "memory_injection"
    # What the prefiller is like, and how memories are found, changes nothing in what they mean.
    IRRELEVANT = frozenset(
        {
            "consistency_weight",
            "detach_memory",
            "detach_target",
            "prefiller_layer_types",
            "rollout",
            "rollout_tolerance",
            "self_feeding_sweeps",
            "share_prefiller",
        }
    )

    @staticmethod
    def further_layers(config) -> list[MemoryLayer]:
        return [] if config.memory_injection == "none" else [MemoryLayer()]

    @property
    def memory(self) -> torch.Tensor | None:
        """`[B, d]`, the memory after the last token of each sequence; None before the first token."""
        tail = getattr(self.layers[-1], "tail", None)
        return None if tail is None else tail[:, -1]

    @classmethod
    def of(cls, cache: DynamicCache, config) -> "MaglevCache":
        """A new, empty cache that transformers made, as one of these."""
        add_memory(cache, config)
        made = cls.__new__(cls)
        vars(made).update(vars(cache) | {"identity": cls.identify(config)})
        return made


def add_memory(cache: DynamicCache, config) -> None:
    """Gives an empty cache that transformers made the layers that it lacks.

    Raises:
        ValueError: it was filled already, by another model.
    """
    further = MaglevCache.further_layers(config)
    if not further or len(cache.layers) != config.num_hidden_layers:
        return
    if cache.get_seq_length():
        raise ValueError(f"The cache ({type(cache).__name__}) was filled by a model without memory. Use a new one.")
    # Full attention can always be cropped and so is never told to record.
    flags = [layer.record_past for layer in cache.layers if hasattr(layer, "record_past")]
    for layer in further:
        layer.record_past = any(flags) or not flags
    cache.layers += further


def check_cache(cache: Cache, config) -> None:
    """Refuses a cache that was made for other layers, or whose layers are not in step."""
    layers = getattr(cache, "layers", ())
    attention, further = layers[: config.num_hidden_layers], layers[config.num_hidden_layers :]
    wanted = [
        (DynamicSlidingWindowLayer, config.sliding_window) if kind == "sliding_attention" else (DynamicLayer, None)
        for kind in config.layer_types
    ]
    other = [layer for layer in attention if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer)]
    if other and not is_ours(other[0]):
        raise ValueError(
            f"A cache of {type(other[0]).__name__} is not available: while memories are searched for, nothing may be "
            "written to it. Leave `cache_implementation` out: the default cache of a Maglev model is bounded already."
        )
    held = [(type(layer), getattr(layer, "sliding_window", None)) for layer in attention]
    if held != wanted or len(further) not in (0, len(MaglevCache.further_layers(config))):
        raise ValueError(
            f"The cache ({type(cache).__name__}) was not made for this model's layers. Use `MaglevCache(model.config)`, or "
            "`DynamicCache(config=model.config)`, or let `generate()` make one."
        )
    identity = getattr(cache, "identity", None)
    if identity is not None and getattr(cache, "checked_for", None) != id(config):
        if identity != MaglevCache.identify(config):
            raise ValueError(
                "The cache was not made for this model: its config says otherwise. Use `MaglevCache(model.config)`."
            )
        cache.checked_for = id(config)  # at every step it would take longer than all else
    seen = {int(layer.get_seq_length()) for layer in layers}
    if len(seen) > 1:
        raise ValueError(
            f"The layers of the cache have seen different numbers of tokens ({sorted(seen)}): an earlier call failed "
            "half-way, or some of them were cropped. Start again with a new cache."
        )


def snapshot(cache: Cache) -> Cache:
    """A cache that goes on from where this one is, and leaves it as it is: its layers replace their tensors, and write
    into none."""
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    return other


def restore(cache: Cache, other: Cache) -> None:
    """Makes the layers of a cache those of one that went on from it."""
    for layer, ahead in zip(cache.layers, other.layers):
        added = ahead.get_seq_length() - layer.get_seq_length()
        vars(layer).update(vars(ahead))
        is_view = hasattr(layer, "sliding_window") and not layer.record_past and layer.keys.device == layer.device
        if is_view and added > 1:  # of the keys of all tokens that were added, which it would keep alive
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()


def part_of(padding: Padding | None, columns: slice) -> Padding | None:
    """What a call's padding says of some of its columns; None if all of them are tokens."""
    if padding is None:
        return None
    first = [min(max(start, columns.start), columns.stop) for start in padding.first]
    stops = [min(max(start + count, columns.start), columns.stop) for start, count in zip(padding.first, padding.count)]
    count = tuple(stop - start for start, stop in zip(first, stops))
    width = columns.stop - columns.start
    if all(n == width for n in count):
        return None
    return Padding(tuple(start - columns.start if n else 0 for start, n in zip(first, count)), count, width)

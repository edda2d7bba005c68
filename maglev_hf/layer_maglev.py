"""What every cache layer of ours can do with its sequences: choose, repeat, copy and move them, and refuse a `crop`;
and what a cache of such layers can do as a whole: be rewound, copied, measured, and saved.

Depends on `padding_maglev`, `parallel_maglev` and on transformers' cache protocol.
"""

import copy
import json
import operator
import os
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import fields

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicCache

from .padding_maglev import Padding
from .parallel_maglev import tp_size_of

# A saved cache: its file, the version of its format, and what a layer's file entry says beside its tensors.
CACHE_FILE = "cache.safetensors"
FILE_VERSION = 1
SAVED = ("seen", "lengths", "fills", "rows", "stop", "earliest", "takes_mask", "cumulative_length")
# Fields of a config that may differ between the model that filled a cache and the one that continues it.
IRRELEVANT = {
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "attention_dropout",
    "initializer_range",
    "max_position_embeddings",
    "vocab_size",
}
# How far back `crop` can go at least while the past is recorded. Drafts are far shorter.
RECORDED_TOKENS = 512


class SequencesLayer(CacheLayerMixin):
    """A cache layer that knows its tensors, all of which begin with the batch dimension, and counts on the host.

    Attributes:
        seen: columns of the caller's input so far, pads included.
        lengths: tokens seen per sequence.
        kind: what the layer is called in a summary, if not after a type of attention.
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
            return [entries[index] for index in indices.tolist()]  # counts are kept on the host

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
        if self.seen + tokens_to_remove < 0:
            raise ValueError(f"The cache cannot drop {-tokens_to_remove} tokens: it has seen {self.seen}.")
        below = self.seen + tokens_to_remove < self.earliest
        if tokens_to_remove and (below or not self.can_crop(-tokens_to_remove)):
            raise ValueError(
                f"The cache cannot drop its last {-tokens_to_remove} tokens: what it held before them is merged or gone, and "
                "the past was not recorded (that far). Call `cache.activate_past_recording()` before adding tokens that may "
                f"be dropped (at least {RECORDED_TOKENS} of them can be, if they are not padded), or `copy.deepcopy` the "
                "cache beforehand."
            )


class SequencesCache(DynamicCache):
    """A cache of our layers and transformers' own, which can tell what it holds, be rewound as a whole, and be saved.

    Works as `DynamicCache(config=model.config)`, which `generate()` makes by itself.

    Attributes:
        FORMAT: under which key a saved file says what it is.
        NEEDS: a field that only configs of such models have.
        IRRELEVANT: fields of a config that may differ between the model that filled a cache and the one that goes on.
    """

    FORMAT: str
    NEEDS: str
    IRRELEVANT: frozenset[str]

    def __init__(self, config, **kwargs):
        if not hasattr(config, self.NEEDS):
            raise TypeError(
                f"`{type(self).__name__}` takes the config of its kind of model, `model.config`, got {type(config).__name__}."
            )
        super().__init__(config=config, **kwargs)
        self.tp_size = tp_size_of(config)
        self.layers += self.further_layers(config)
        self.identity = self.identify(config)

    @staticmethod
    def further_layers(config) -> list[SequencesLayer]:
        """New layers that stand behind those of attention."""
        return []

    @classmethod
    def identify(cls, config) -> dict:
        """The fields of a config that decide what a cache's tensors mean, as JSON has them."""
        common = {field.name for field in fields(PreTrainedConfig)}
        own = [field.name for field in fields(config) if field.name not in common | IRRELEVANT | cls.IRRELEVANT]
        return json.loads(json.dumps({name: getattr(config, name) for name in own}))

    def crop(self, tokens_to_remove: int) -> None:
        tokens_to_remove = operator.index(tokens_to_remove)
        for layer in self.layers:  # before any layer is touched
            if is_ours(layer):
                layer.check_crop(tokens_to_remove)
            elif hasattr(layer, "sliding_window"):
                _check_sliding_crop(layer, tokens_to_remove)
        for layer in self.layers:
            if tokens_to_remove or getattr(layer, "record_past", True):  # transformers' refuses to remove nothing
                layer.crop(tokens_to_remove)
        if tokens_to_remove and self.get_seq_length() == 0:
            self.reset()

    def reset(self) -> None:
        super().reset()
        for layer in self.layers:
            if not is_ours(layer):  # older transformers keep the length
                layer.keys, layer.values, layer.is_initialized = None, None, False

    def __deepcopy__(self, memo) -> "SequencesCache":
        """Also of a cache that was filled with gradients, where PyTorch refuses to copy tensors."""
        other = copy.copy(self)
        other.layers = [copy.deepcopy(layer) if is_ours(layer) else copy.copy(layer) for layer in self.layers]
        for layer in other.layers:
            if not is_ours(layer) and layer.is_initialized:
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
        return other

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors held, recorded past included, on whatever device."""
        return sum(layer_nbytes(layer) for layer in self.layers)

    @property
    def lengths(self) -> list[int]:
        """Tokens seen of each sequence, padding not counted; empty before the first token."""
        return next((list(layer.lengths) for layer in self.layers if hasattr(layer, "lengths")), [])

    def summary(self) -> None:
        """Prints a short table: what the layers hold, those that hold the same in one line."""
        lines = []
        kinds = self.identity["layer_types"]
        for index, layer in enumerate(self.layers):
            kind = kinds[index] if index < len(kinds) else layer.kind
            in_window = getattr(layer, "fills", [])
            if not is_ours(layer) and layer.is_initialized:
                in_window = [layer.keys.shape[2]]
            facts = (kind, _span(getattr(layer, "rows", [])), _span(in_window), layer_nbytes(layer))
            if lines and lines[-1][2] == facts:
                lines[-1][1] = index
            else:
                lines.append([index, index, facts])
        tokens = _span(self.lengths or [self.get_seq_length()])
        print(
            f"{type(self).__name__}: {tokens} tokens in each of {len(self.lengths)} sequences, {self.nbytes / 2**20:.2f} MiB"
        )
        print(f"{'layers':>9}  {'type':<20}{'state rows':>12}{'tokens kept':>13}{'KiB each':>12}")
        for first, last, (kind, rows, kept, size) in lines:
            layers = f"{first}" if first == last else f"{first}-{last}"
            print(f"{layers:>9}  {kind:<20}{rows:>12}{kept:>13}{size / 1024:>12.1f}")

    def save_pretrained(self, save_directory: str | os.PathLike) -> None:
        """Writes what the cache holds to `cache.safetensors` in a folder, which is made if need be; a file that is
        there is replaced once the new one is whole. What was recorded for `crop` is not saved.

        Raises:
            ValueError: a call with the cache failed half-way, so that nobody knows what it holds; or it holds only some of the
                heads (tensor parallelism).
        """
        self._check_whole()
        seen = {int(layer.get_seq_length()) for layer in self.layers}
        if len(seen) > 1 or any(getattr(layer, "unfinished", False) for layer in self.layers):
            raise ValueError("An earlier call with this cache failed half-way, so it cannot be saved.")
        trimmed = copy.deepcopy(self)
        trimmed.crop(0)
        layers, tensors = [], {}
        for number, layer in enumerate(trimmed.layers):
            facts = {name: getattr(layer, name) for name in SAVED if hasattr(layer, name)}
            if "cumulative_length" in facts:
                facts["cumulative_length"] = int(facts["cumulative_length"])
            held = layer.tensors() if hasattr(layer, "tensors") else {"keys": layer.keys, "values": layer.values}
            held = {name: tensor for name, tensor in held.items() if tensor is not None}
            layers.append(facts | {"tensors": sorted(held)})
            # Views may share storage, which the format does not take.
            tensors |= {f"{number}.{name}": tensor.detach().clone().contiguous() for name, tensor in held.items()}
        facts = {"version": FILE_VERSION, "identity": self.identity, "layers": layers}
        os.makedirs(save_directory, exist_ok=True)
        path = os.path.join(save_directory, CACHE_FILE)
        save_file(tensors, path + ".incomplete", metadata={self.FORMAT: json.dumps(facts)})
        os.replace(path + ".incomplete", path)

    @classmethod
    def from_pretrained(
        cls, directory: str | os.PathLike, config, device: str | torch.device = "cpu"
    ) -> "SequencesCache":
        """Reads a cache that `save_pretrained` wrote, to continue where it ended.

        Args:
            config: that of the model that will continue. It must say the same of everything that shapes the cache; the
                weights are not compared.
            device: where the tensors go. Our layers move on from there to the device of the model's layer.

        Raises:
            FileNotFoundError: there is no `cache.safetensors`.
            ValueError: the file is damaged, not a cache, of a later version, or of another model; or the model is cut between
                processes (tensor parallelism).
        """
        path = os.path.join(directory, CACHE_FILE)
        if not os.path.isfile(path):
            raise FileNotFoundError(f"There is no {CACHE_FILE} in {directory}: `cache.save_pretrained` writes it.")
        device = torch.device(device)
        damaged = f"{path} is damaged, perhaps cut short: {{}}. Make the cache anew."
        try:
            with safe_open(path, framework="pt") as file:
                facts = json.loads((file.metadata() or {}).get(cls.FORMAT, "null"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except (SafetensorError, json.JSONDecodeError) as error:
            raise ValueError(damaged.format(error)) from error
        if not isinstance(facts, dict) or not {"version", "identity", "layers"} <= facts.keys():
            raise ValueError(f"{path} was not written by `{cls.__name__}.save_pretrained`.")
        if facts["version"] != FILE_VERSION:
            raise ValueError(f"{path} has version {facts['version']!r} of the format; this code reads {FILE_VERSION}.")
        cache = cls(config)
        cache._check_whole()
        names = cache.identity.keys() | facts["identity"].keys()
        other = [name for name in sorted(names) if cache.identity.get(name) != facts["identity"].get(name)]
        if other:
            name = other[0]
            raise ValueError(
                f"{path} is the cache of another model: {', '.join(other)} differ (`{name}` is "
                f"{facts['identity'].get(name)} there, {cache.identity.get(name)} here)."
            )
        if len(facts["layers"]) != len(cache.layers):
            raise ValueError(damaged.format(f"it has {len(facts['layers'])} layers of {len(cache.layers)}"))
        for number, (layer, saved) in enumerate(zip(cache.layers, facts["layers"])):
            held = {name: tensors.get(f"{number}.{name}") for name in saved.pop("tensors")}
            if any(tensor is None for tensor in held.values()):
                raise ValueError(damaged.format(f"it lacks tensors of layer {number}"))
            # Copies lie in memory as new tensors do; rounding of the last bit depends on it.
            held = {name: tensor.to(device, copy=True) for name, tensor in held.items()}
            if held and is_ours(layer):
                layer.load(saved, held, config)
                if not layer.fits(config):
                    raise ValueError(damaged.format(f"the tensors of layer {number} do not fit together"))
            elif held:
                layer.lazy_initialization(held["keys"], held["values"])
                vars(layer).update(saved | held)
        return cache

    def _check_whole(self) -> None:
        if self.tp_size > 1:
            raise ValueError(
                f"A cache file holds all heads, and each of {self.tp_size} processes has some of them here (tensor parallelism). "
                "Load the model whole to write or read one; `copy.deepcopy(cache)` works in any case."
            )


def is_ours(layer) -> bool:
    """Whether it is a `SequencesLayer`, of whichever copy of this code: layer types are registered process-wide, so the
    layers may come from a folder's code and the cache from the package, or from two folders."""
    return hasattr(layer, "check_crop")


def _check_sliding_crop(layer, tokens_to_remove: int) -> None:
    """Raises before transformers' sliding layer does, or where it would go on without the keys that it needs."""
    seen, window = int(layer.get_seq_length()), layer.sliding_window
    left = seen + tokens_to_remove
    held = layer.keys.shape[2] if layer.is_initialized else 0
    if tokens_to_remove and (
        held + tokens_to_remove < min(window - 1, left) or (seen >= window and not layer.record_past)
    ):
        raise ValueError(
            f"The cache cannot drop its last {-tokens_to_remove} tokens: a sliding-attention layer has dropped older ones. "
            "Call `cache.activate_past_recording()` before adding tokens that may be dropped."
        )


def layer_nbytes(layer) -> int:
    if is_ours(layer):
        return layer.nbytes
    return sum(tensor.nbytes for tensor in (layer.keys, layer.values) if tensor is not None)


def _span(counts: list[int]) -> str:
    """What a table says of a number per sequence."""
    if not counts:
        return "-"
    return f"{counts[0]}" if len(set(counts)) == 1 else f"{min(counts)}-{max(counts)}"

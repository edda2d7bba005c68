"""What a conversion will do and what it will cost, worked out before a single weight is read."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import ClassVar, Self

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kvm_hf import KVMConfig, KVMForCausalLM
from kvm_hf.state_kvm import StateRule, rows_after

from .errors import RetrofitError
from .families import Origin, family_of, kvm_fields
from .source import Source

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
DEFAULT_GROWTH, DEFAULT_STATE_SIZE = 16.0, 256
PLANNED_LENGTHS = (4096, 32768, 131072)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The choices of every conversion; the command line has the same names (its shard size is in gigabytes).

    Attributes:
        dtype: of the target's weights, or `"auto"` for the source's.
        shard_size: most bytes per file.

    Raises:
        RetrofitError: by name, for a value that cannot be.
    """

    dtype: str = "auto"
    shard_size: int = 5 * 10**9

    def __post_init__(self):
        if self.dtype not in ("auto", *DTYPES):
            raise RetrofitError(f"`--dtype {self.dtype}` is not known; use auto, {', '.join(DTYPES)}.")
        if self.shard_size < 1:
            raise RetrofitError(f"`--shard-size` must be positive, got {self.shard_size}.")


@dataclass(frozen=True)
class RetrofitOptions(Options):
    """The choices of `to-kvm`.

    Attributes:
        layers: `"all"` (every layer that is full attention in the source), `"every:N"` (layers 0, N, 2N, ...),
            numbers and ranges such as `"0,3,8-11"`, or `"auto:N"` (all but the N that it costs most to convert, which
            `convert` measures first).
        budget: `"sqrt"` (`growth * sqrt(tokens)` rows), `"fixed"` (`state_size` rows) or `"saturation"`
            (`state_size * tokens / (state_size + tokens)` rows).
        growth: the factor of the `sqrt` budget, 16 if None; only for `sqrt`.
        state_size: rows, 256 if None; only for `fixed` and `saturation`.
        chunk_size, window_chunks: `C` and `n` of the window of `C * n` tokens.
        sinks: first tokens whose rows nothing is merged into.
    """

    layers: str = "all"
    budget: str = "sqrt"
    growth: float | None = None
    state_size: int | None = None
    chunk_size: int = 128
    window_chunks: int = 4
    sinks: int = 4


@dataclass(frozen=True)
class TargetTensor:
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    origin: Origin

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass
class Plan(ABC):
    """Everything `convert` will do. Every kind of target has a subclass.

    Attributes:
        shards: file name to its tensors, in order.
        model_class: whose parameters are written.
        kind: of target, in words.
        new_values: last parts of the names of parameters that Llama-style models do not have, and what fills them.
    """

    source: Source
    options: Options
    config: PreTrainedConfig
    shards: dict[str, list[TargetTensor]]

    model_class: ClassVar[type[PreTrainedModel]]
    kind: ClassVar[str]
    new_values: ClassVar[Mapping[str, float]]

    @classmethod
    def make(cls, source: Source, options: Options) -> Self:
        """Decides everything. Of the weights it reads only a head that may differ from the embeddings.

        Raises:
            RetrofitError: the source or the options cannot work, by name.
        """
        config = cls.target_config(source.config, options)
        config.dtype = _target_dtype(source, options)
        config.tie_word_embeddings = config.tie_word_embeddings and not _has_own_head(source)
        tensors = target_tensors(cls, source, config, options.dtype == "auto")
        return cls(source, options, config, into_shards(tensors, options.shard_size))

    @classmethod
    @abstractmethod
    def target_config(cls, source_config: PreTrainedConfig, options: Options) -> PreTrainedConfig:
        """The target's config but for its dtype: what can be decided, or refused, from the source's config alone."""

    @classmethod
    def llama_name(cls, name: str) -> str:
        """The name in a Llama-style model of the parameter that the target's parameter `name` is a copy of."""
        return name

    @abstractmethod
    def cache_bytes(self, tokens: int) -> int:
        """Bytes of the target's cache per sequence, in its dtype."""

    @property
    @abstractmethod
    def summary(self) -> list[str]:
        """What becomes of the source, line by line."""

    @property
    @abstractmethod
    def card_facts(self) -> dict:
        """What the model card says of this kind of target and no other."""

    @property
    def tensors(self) -> list[TargetTensor]:
        return [tensor for shard in self.shards.values() for tensor in shard]

    @property
    def new_parameters(self) -> list[TargetTensor]:
        return [tensor for tensor in self.tensors if tensor.origin.name is None]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def dtype(self) -> torch.dtype:
        return self.config.dtype

    @property
    def cache_table(self) -> list[tuple[str, int, int]]:
        """Lengths, in words, with the cache's bytes for full attention and for the target, both in its dtype."""
        full, positions = full_config(self.source.config), self.config.max_position_embeddings
        return [
            (
                f"{tokens // 1024}k tokens" + ("" if tokens <= positions else " (beyond the model's positions)"),
                cache_bytes(full, tokens, self.dtype),
                self.cache_bytes(tokens),
            )
            for tokens in PLANNED_LENGTHS
        ]

    def fingerprint(self) -> str:
        """Identifies the result: a rerun with the same plan may keep what an interrupted run has written."""
        facts = {
            "options": asdict(self.options),
            "config": self.config.to_dict(),
            "source": [
                (str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in self.source.weight_files
            ],
            "shards": {name: [tensor.name for tensor in shard] for name, shard in self.shards.items()},
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


class RetrofitPlan(Plan):
    """A KVM model: chosen layers get a window and a compressed state."""

    options: RetrofitOptions
    config: KVMConfig

    model_class = KVMForCausalLM
    kind = "KVM model"
    new_values = {"state_temperature": 1.0, "window_temperature": 1.0}  # they change nothing there

    @classmethod
    def target_config(cls, source_config: PreTrainedConfig, options: RetrofitOptions) -> KVMConfig:
        fields = kvm_fields(source_config)
        converted = select_layers(options.layers, fields["layer_types"])
        kinds = ["kvm_attention" if i in converted else kind for i, kind in enumerate(fields["layer_types"])]
        if "sliding_attention" not in kinds:
            fields["sliding_window"] = None
        fields |= {"layer_types": kinds, "state_treatment": "positional"} | _state_fields(options)
        return make_config(KVMConfig, fields)

    def cache_bytes(self, tokens: int) -> int:
        return cache_bytes(self.config, tokens, self.dtype)

    @property
    def converted(self) -> list[int]:
        return kvm_layers(self.config)

    @property
    def budget(self) -> str:
        """Rows of the state over tokens, in words."""
        config = self.config
        if config.state_budget == "fixed":
            return f"{config.state_size} rows"
        if config.state_budget == "power_law":
            return f"{config.state_growth_factor:g} * sqrt(tokens) rows"
        return f"{config.state_saturation} * tokens / ({config.state_saturation} + tokens) rows"

    @property
    def summary(self) -> list[str]:
        config, new = self.config, self.new_parameters
        kinds = sorted({tensor.name.rsplit(".", 1)[-1] for tensor in new})
        return [
            f"Layers: {len(self.converted)} of {config.num_hidden_layers} converted: {ranges(self.converted)}",
            f"Window: {config.num_window_chunks} chunks of {config.chunk_size} = {config.window_size} tokens; "
            f"state: {self.budget}, {config.num_sink_tokens} sinks",
            f"New parameters: {numel(new)} ({', '.join(kinds)}), at values that change nothing",
        ]

    @property
    def card_facts(self) -> dict:
        return {
            "converted": len(self.converted),
            "layer_list": ranges(self.converted),
            "window": self.config.window_size,
            "chunk": self.config.chunk_size,
            "budget": self.budget,
        }


def kvm_layers(config: KVMConfig) -> list[int]:
    return [i for i, kind in enumerate(config.layer_types) if kind == "kvm_attention"]


def numel(tensors: list[TargetTensor]) -> int:
    return sum(prod(tensor.shape) for tensor in tensors)


def ranges(numbers: list[int]) -> str:
    """`[0, 1, 2, 5]` as `0-2, 5`."""
    parts = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in parts)


def select_layers(choice: str, layer_types: list[str]) -> list[int]:
    """The layers that `--layers` names.

    Raises:
        RetrofitError: the choice cannot be read, names a layer that is not there, or selects nothing.
    """
    count = len(layer_types)
    if choice == "all":
        selected = [i for i, kind in enumerate(layer_types) if kind == "full_attention"]
        if not selected:
            raise RetrofitError(
                "No layer of the source is full attention (all have a sliding window already). Name the layers to "
                f"convert, for example `--layers 0-{count - 1}`."
            )
        return selected
    try:
        if choice.startswith("every:"):
            step = int(choice.removeprefix("every:"))
            if step < 1:
                raise ValueError(step)
            return list(range(0, count, step))
        selected = set()
        for part in choice.split(","):
            first, dash, last = part.partition("-")
            selected |= set(range(int(first), int(last if dash else first) + 1))
    except ValueError as error:
        raise RetrofitError(
            f"`--layers {choice}` is not understood; use `all`, `every:N`, numbers and ranges like `0,3,8-11`, or (in "
            "`to-kvm`) `auto:N`."
        ) from error
    outside = sorted(i for i in selected if not 0 <= i < count)
    if outside or not selected:
        raise RetrofitError(f"`--layers {choice}` names {outside or 'nothing'}; the model has layers 0 to {count - 1}.")
    return sorted(selected)


def cache_bytes(config: KVMConfig, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of cache per sequence after `tokens` tokens (specification, section 6.4), every tensor counted, for the
    attention implementations that take masks."""
    kinds = Counter(config.layer_types)
    return sum(count * layer_bytes(config, kind, tokens, dtype) for kind, count in kinds.items())


def layer_bytes(config: KVMConfig, kind: str, tokens: int, dtype: torch.dtype) -> int:
    """The same for one layer of a kind."""
    if kind == "kvm_attention":
        return kvm_layer_bytes(config, tokens, dtype)
    row = 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize  # a key and a value per head
    return row * (tokens if kind == "full_attention" else min(tokens, config.sliding_window - 1))


def kvm_layer_bytes(config: KVMConfig, tokens: int, dtype: torch.dtype) -> int:
    """The same for one `kvm_attention` layer."""
    heads, dim, window = config.num_key_value_heads, config.head_dim, config.window_size
    rows = rows_at(config, tokens)
    buffer = heads * (rows + window) * (2 * dim + (1 if config.count_bias and rows else 0)) * dtype.itemsize
    gates = heads * window * dtype.itemsize if config.gate_keys or config.gate_values else 0
    precise = torch.promote_types(dtype, torch.float32)
    sums = heads * rows * (2 * dim + 4) * precise.itemsize
    return buffer + gates + sums + window * torch.long.itemsize


def rows_at(config: KVMConfig, tokens: int) -> int:
    """Rows of one layer's state after `tokens` tokens."""
    return rows_after(StateRule.from_config(config), tokens)


def merges_nothing(config: KVMConfig, tokens: int) -> bool:
    """Whether the state then has a row for each token that has left the window, so that a retrofit does what its source does."""
    return rows_at(config, tokens) >= tokens - config.window_size


def full_config(source_config: PreTrainedConfig) -> KVMConfig:
    """The source as a KVM config: all layers as they are there."""
    return make_config(KVMConfig, kvm_fields(source_config))


def make_config(config_class: type[PreTrainedConfig], fields: dict) -> PreTrainedConfig:
    try:
        return config_class(**fields)
    except Exception as error:  # `strict` wraps the ValueErrors of a config in its own classes
        raise RetrofitError(
            f"These settings do not make a {config_class.__name__}: {error.__cause__ or error}"
        ) from error


def _state_fields(options: RetrofitOptions) -> dict:
    window = {
        "chunk_size": options.chunk_size,
        "num_window_chunks": options.window_chunks,
        "num_sink_tokens": options.sinks,
    }
    if options.budget == "sqrt":
        if options.state_size is not None:
            raise RetrofitError("`--state-size` is for `--budget fixed` and `saturation`; `sqrt` grows by `--growth`.")
        growth = DEFAULT_GROWTH if options.growth is None else options.growth
        return window | {
            "state_budget": "power_law",
            "state_growth_factor": growth,
            "state_growth_exponent": 0.5,
            "state_size": options.chunk_size,
        }
    if options.growth is not None:
        raise RetrofitError(f"`--growth` is for `--budget sqrt`; `{options.budget}` takes `--state-size`.")
    size = DEFAULT_STATE_SIZE if options.state_size is None else options.state_size
    if options.budget == "fixed":
        return window | {"state_budget": "fixed", "state_size": size}
    if options.budget == "saturation":
        return window | {"state_budget": "saturation", "state_saturation": size, "state_size": options.chunk_size}
    raise RetrofitError(f"`--budget {options.budget}` is not known; use sqrt, fixed or saturation.")


def _target_dtype(source: Source, options: Options) -> torch.dtype:
    """What the target's config says; with `auto` each tensor keeps its own."""
    if options.dtype != "auto":
        return DTYPES[options.dtype]
    if source.config.dtype is not None:
        return source.config.dtype
    dtypes = [info.dtype for info in source.tensors.values()]
    return max(set(dtypes), key=dtypes.count)


def _has_own_head(source: Source) -> bool:
    """Whether a model that calls its head tied has stored another one; transformers then does not tie them."""
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if not {head, embedding} <= set(source.tensors):
        return False
    rows = source.tensors[head].shape[0]
    return any(
        not torch.equal(*(source.read(name, start, start + 4096) for name in (head, embedding)))
        for start in range(0, rows, 4096)
    )


def target_tensors(
    plan_class: type[Plan], source: Source, config: PreTrainedConfig, keeps_dtypes: bool
) -> list[TargetTensor]:
    """Every parameter of the target with its origin; every tensor of the source must be used, in full."""
    family = family_of(source.config)
    with torch.device("meta"):
        model = plan_class.model_class(config)
    tied = set(model.all_tied_weights_keys) if config.tie_word_embeddings else set()
    tensors, used = [], {}
    for name, parameter in model.state_dict().items():
        if name in tied:
            continue
        shape = tuple(parameter.shape)
        fills = [value for ending, value in plan_class.new_values.items() if name.endswith(ending)]
        origin = Origin(None, fill=fills[0]) if fills else family.origin(plan_class.llama_name(name), source.config)
        if origin.name is None:
            tensors.append(TargetTensor(name, shape, config.dtype, origin))
            continue
        info = source.tensors.get(origin.name)
        if info is None:
            raise RetrofitError(f"The source has no tensor {origin.name!r}, which {name!r} is made from.")
        rows = info.shape[0] if origin.start is None else origin.stop - origin.start
        if (rows, *info.shape[1:]) != shape or (origin.stop or 0) > info.shape[0]:
            raise RetrofitError(
                f"Tensor {origin.name!r} of the source has shape {info.shape}, but its config asks for "
                f"{shape} in {name!r}."
            )
        dtype = info.dtype if keeps_dtypes else config.dtype
        tensors.append(TargetTensor(name, shape, dtype, origin))
        # Rows that are copied to several places count once.
        used.setdefault(origin.name, {})[origin.start] = rows
    # A tied head may be stored all the same, and old checkpoints hold RoPE tables that follow from the config.
    spare = tied | {name for name in source.tensors if name.endswith("rotary_emb.inv_freq")}
    left = sorted(
        name
        for name, info in source.tensors.items()
        if name not in spare and sum(used.get(name, {}).values()) != info.shape[0]
    )
    if left:
        raise RetrofitError(
            f"{len(left)} tensors of the source have no place in the target, so it would be another model: "
            f"{', '.join(left[:5])}{', ...' if len(left) > 5 else ''}."
        )
    return tensors


def into_shards(tensors: list[TargetTensor], shard_size: int) -> dict[str, list[TargetTensor]]:
    groups, room = [[]], shard_size
    for tensor in tensors:
        if groups[-1] and tensor.nbytes > room:
            groups.append([])
            room = shard_size
        groups[-1].append(tensor)
        room -= tensor.nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}

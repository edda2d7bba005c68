"""`retrofit rank-layers`: what it costs to convert each layer alone, so that `--layers` can be chosen.

Layers are ranked by the divergence of the next token's distribution from the source's, KL(source || one layer converted),
beyond the window. It is zero only if nothing changes and looks at every token that might come next, so that it tells layers
apart on little text, where the loss on the text itself moves either way. The loss is reported beside it.

The source and its KVM layers are two trees of modules over the same tensors. Before the converted layer both compute the
same: the layer and those behind it are called again with what the source's were called with, on average half a model.
"""

import hashlib
import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedConfig

from kvm_hf import KVMConfig, KVMForCausalLM

from .divergence import compare
from .errors import RetrofitError
from .plan import (
    DTYPES,
    Options,
    RetrofitOptions,
    RetrofitPlan,
    cache_bytes,
    full_config,
    kvm_layers,
    layer_bytes,
    merges_nothing,
    ranges,
)
from .source import Source, open_source
from .tensors import make_model, make_tensor
from .verification import TEXT, Journal, check_journal, check_place, find_device, load_tokenizer, text_pieces

RANKING, RANKING_PLOT = "rank.json", "rank.png"
AUTO = "auto:"
DEFAULT_TOKENS = 3072
MOST_CONTEXT = 1 << 24  # rows of a state are counted chunk by chunk


@dataclass(frozen=True)
class RankOptions:
    """How to measure.

    Attributes:
        tokens: length of a piece of text; if None 3072, or six windows if these are more, but no more than the model's
            positions.
        pieces: pieces of text, one after the other.
        context: tokens at which the cache's bytes are compared.
        dtype: of the model that is measured. (Bytes are those of the target's dtype.)
        device: `"auto"` is a GPU if there is one.

    Raises:
        RetrofitError: by name, for a value that cannot be.
    """

    tokens: int | None = None
    pieces: int = 1
    context: int = 32768
    dtype: str = "float32"
    device: str = "auto"

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise RetrofitError(f"`--dtype {self.dtype}` is not known; use one of {', '.join(DTYPES)}.")
        for name in ("pieces", "context"):
            if getattr(self, name) < 1:
                raise RetrofitError(f"`--{name} {getattr(self, name)}` is too few; use 1 or more.")
        if self.context > MOST_CONTEXT:
            raise RetrofitError(f"`--context {self.context}` is too many; use {MOST_CONTEXT} or less.")


def rank_layers(
    source: str | Path,
    retrofit: RetrofitOptions = RetrofitOptions(),
    options: RankOptions = RankOptions(),
    *,
    text: Path | None = None,
    output: str | Path | None = None,
    on_step: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> dict:
    """Measures what `retrofit` would cost for each of its layers alone; writes `rank.json` and `rank.png`.

    Args:
        source: local folder, hub id, or GGUF file; needs a tokenizer.
        retrofit: what would be done; its `layers` are those that are ranked.
        text: a long text file; the default is Genesis in the King James Version.
        output: folder for the two files; the default is the source's name with `-ranking` behind it, here.
        on_step: called before each of the measurements with their number.

    Raises:
        RetrofitError: the source or the options cannot work, or the text is too short.
    """
    output = Path(f"{Path(source).resolve().name.removesuffix('.gguf')}-ranking" if output is None else output)
    if output.exists() and not output.is_dir():
        raise RetrofitError(f"`--output {output}` is a file; name a folder.")
    check_place(output, "output")
    journal, ranking = output / "rank.partial.json", output / RANKING
    check_journal(journal, "output")
    if ranking.exists() and '"divergence"' not in ranking.read_text(errors="replace"):
        raise RetrofitError(f"{ranking} exists and is no ranking. Move it, or choose another output.")
    with (
        tempfile.TemporaryDirectory() as scratch,
        open_source(
            source,
            Path(scratch) / "source",
            check=lambda config: _text_length(RetrofitPlan.target_config(config, retrofit), options),
        ) as opened,
    ):
        report = measure_layers(RetrofitPlan.make(opened, retrofit), options, journal, text=text, on_step=on_step)
    write_ranking(report, output)
    journal.unlink()
    return report


def is_automatic(options: Options) -> bool:
    """Whether the layers of a conversion are to be ranked first (`--layers auto:N`)."""
    return isinstance(options, RetrofitOptions) and options.layers.startswith(AUTO)


def check_automatic(source_config: PreTrainedConfig, options: RetrofitOptions) -> None:
    """Refuses, by the source's config alone, an `auto:N` that cannot be."""
    everything = RetrofitPlan.target_config(source_config, replace(options, layers="all"))
    _text_length(everything, RankOptions())
    _number_kept(options.layers, len(kvm_layers(everything)))


def choose_layers(
    source: Source, options: RetrofitOptions, journal: Path, on_step: Callable[[int, int, str], None]
) -> tuple[RetrofitOptions, dict]:
    """Ranks the layers for `auto:N`: the options with all of them but the N most sensitive, and the ranking."""
    report = measure_layers(
        RetrofitPlan.make(source, replace(options, layers="all")), RankOptions(), journal, on_step=on_step
    )
    kept = _number_kept(options.layers, len(report["layers"]))
    return replace(options, layers=report["choices"][kept]["layers"]), report


def measure_layers(
    plan: RetrofitPlan,
    options: RankOptions,
    journal: Path,
    *,
    text: Path | None = None,
    on_step: Callable[[int, int, str], None],
) -> dict:
    """What `rank_layers` reports. The file `journal` keeps what was measured; with all of it there no weight is read."""
    full, layers = full_config(plan.source.config), plan.converted
    length = _text_length(plan.config, options)
    device = find_device(options.device)
    pieces, _ = text_pieces(load_tokenizer(plan.source.folder), text or TEXT, length, options.pieces)
    words = hashlib.sha256(torch.cat(pieces).numpy().tobytes()).hexdigest()
    identity = [plan.fingerprint(), asdict(options), words, transformers.__version__]
    journal.parent.mkdir(parents=True, exist_ok=True)
    kept = Journal(journal, identity, len(pieces) * len(layers), on_step)

    models = cache(partial(load_models, plan, DTYPES[options.dtype], device))
    measured = []
    for number, piece in enumerate(pieces, 1):
        reading = cache(partial(Reading, models, piece, first=2 * plan.config.window_size))
        what = "layer {}" + (f", piece {number} of {len(pieces)}" if len(pieces) > 1 else "")
        measured.append([kept.measure(what.format(layer), _cost, reading, layer) for layer in layers])
    on_step(kept.total, kept.total, "done")

    divergences, losses, source_losses = torch.tensor(measured, dtype=torch.float64).mean(0).T.tolist()
    if not all(map(math.isfinite, divergences)):
        raise RetrofitError(
            f"`--dtype {options.dtype}` is too narrow for this model: its values overflow. Use float32 or bfloat16."
        )
    converted = layer_bytes(plan.config, "kvm_attention", options.context, plan.dtype)
    ranked = sorted(
        (
            {
                "layer": layer,
                "divergence": divergence,
                "loss_above_source": loss - source_loss,
                "bytes_saved": layer_bytes(full, full.layer_types[layer], options.context, plan.dtype) - converted,
            }
            for layer, divergence, loss, source_loss in zip(layers, divergences, losses, source_losses)
        ),
        key=lambda entry: -entry["divergence"],
    )
    report = {
        "source": plan.source.label,
        "text": str(text) if text else "Genesis, King James Version (bundled)",
        "retrofit": asdict(plan.options),
        "options": asdict(options) | {"tokens": length},
        "from_token": 2 * plan.config.window_size,
        "source_loss": source_losses[0],
        "layers": ranked,
        "cache_bytes": {
            "dtype": str(plan.dtype).removeprefix("torch."),
            "source": cache_bytes(full, options.context, plan.dtype),
            "target": plan.cache_bytes(options.context),
        },
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
    }
    report["choices"] = [
        {
            "kept": count,
            "layers": ranges(sorted(entry["layer"] for entry in ranked[count:])).replace(" ", ""),
            "cache_bytes": report["cache_bytes"]["target"] + sum(entry["bytes_saved"] for entry in ranked[:count]),
        }
        for count in range(len(ranked))
    ]
    return report


def load_models(plan: RetrofitPlan, dtype: torch.dtype, device: torch.device) -> tuple[KVMForCausalLM, KVMForCausalLM]:
    """The source, and the plan's target over the same tensors."""
    weights = {tensor.name: make_tensor(plan.source, tensor).to(device, dtype) for tensor in plan.tensors}
    source_config = full_config(plan.source.config)
    source_config.tie_word_embeddings = plan.config.tie_word_embeddings
    return make_model(source_config, weights), make_model(plan.config, weights)


class Reading:
    """What the source makes of a piece of text, with all that its layers were called with."""

    @torch.no_grad()
    def __init__(self, models: Callable[[], tuple[KVMForCausalLM, KVMForCausalLM]], ids: torch.Tensor, first: int):
        self.source, self.target = models()
        self.ids, self.first, self.calls = ids.to(self.source.device), first, []
        hooks = [
            layer.register_forward_pre_hook(
                lambda module, args, kwargs: self.calls.append((args[0], kwargs)), with_kwargs=True
            )
            for layer in self.source.model.layers
        ]
        try:
            self.hidden = self.source.model(self.ids, use_cache=False).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def cost(self, index: int) -> tuple[float, float, float]:
        """With one layer converted: the divergence from the source, and the loss of both, from token `first` on."""
        hidden, arguments = self.calls[index]
        hidden = self.target.model.layers[index](hidden, **arguments)
        for layer, (_, arguments) in zip(self.source.model.layers[index + 1 :], self.calls[index + 1 :]):
            hidden = layer(hidden, **arguments)
        hidden = self.source.model.norm(hidden)

        sums = compare(self.source, self.source, hidden, self.hidden, self.ids, self.first - 1)
        return tuple((sums / (self.ids.shape[1] - self.first)).tolist())


def _cost(reading: Callable[[], Reading], layer: int) -> tuple[float, float, float]:
    return reading().cost(layer)


def _number_kept(choice: str, candidates: int) -> int:
    """N of `auto:N`, which leaves some of the candidates to convert and some to keep."""
    number = choice.removeprefix(AUTO)
    if candidates < 2:
        raise RetrofitError(
            f"`--layers {choice}`: there is only one layer to convert, so nothing to choose. Use `all`."
        )
    if not number.isdecimal() or not 1 <= int(number) < candidates:
        raise RetrofitError(
            f"`--layers {choice}` is not understood: `auto:N` keeps N of the {candidates} layers that `all` converts, so N is "
            f"a number from 1 to {candidates - 1}."
        )
    return int(number)


def _text_length(config: KVMConfig, options: RankOptions) -> int:
    """Tokens per piece, of which some are beyond twice the window and some are merged."""
    positions, window = config.max_position_embeddings, config.window_size
    length = min(max(DEFAULT_TOKENS, 6 * window), positions) if options.tokens is None else options.tokens
    if not 2 * window < length <= positions:
        raise RetrofitError(
            f"Layers cannot be ranked on {length} tokens: these have to be more than twice the window of {window}, and at most "
            f"the model's {positions} positions. Use a smaller window, or other `--tokens` of `rank-layers`."
        )
    if merges_nothing(config, length):
        raise RetrofitError(
            f"Layers cannot be ranked on {length} tokens: the state has a row for each of them, so that no layer costs "
            "anything. Use fewer rows, or more `--tokens` of `rank-layers`."
        )
    return length


def write_ranking(report: dict, folder: Path) -> None:
    (folder / RANKING).write_text(json.dumps(report, indent=2) + "\n")
    plot(report, folder / RANKING_PLOT)


def print_ranking(report: dict, out: Console) -> None:
    """The most sensitive layers first, then what to give to `--layers`."""
    tokens, total = report["options"]["context"], report["cache_bytes"]["source"]
    dtype = report["cache_bytes"]["dtype"]
    table = Table("layer", "divergence", "loss above source", f"saved at {tokens} tokens, {dtype}")
    for entry in report["layers"]:
        table.add_row(
            str(entry["layer"]),
            f"{entry['divergence']:z.5f}",
            f"{entry['loss_above_source']:+z.5f}",
            f"{entry['bytes_saved'] / 2**20:.1f} MiB",
        )
    out.print(table)
    out.print(
        f"Each layer converted alone, on text from token {report['from_token']} on; the loss of the source is "
        f"{report['source_loss']:.3f}.",
        highlight=False,
        soft_wrap=True,
    )
    for choice in report["choices"]:
        if choice["kept"].bit_count() <= 1:  # 0, 1, 2, 4, 8, ...
            held = choice["cache_bytes"]  # lines rather than a table, which would cut the layers short
            out.print(
                f"Keep {choice['kept']}: {held / 2**20:.1f} MiB of cache at {tokens} tokens, "
                f"{held / total:.3f} of the source's: --layers {choice['layers']}",
                highlight=False,
                soft_wrap=True,
            )


def plot(report: dict, path: Path) -> None:
    """Cost by layer, and what is left of cost and cache when the most sensitive layers are kept, as one picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ranked, choices = report["layers"], report["choices"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.4), layout="constrained")
    figure.suptitle(f"Layers of {Path(report['source']).name}, converted one at a time")

    costs = [entry["divergence"] for entry in ranked]
    left.bar([entry["layer"] for entry in ranked], costs, color="tab:blue")
    left.set(
        title=f"Divergence from the source, from token {report['from_token']} on",
        xlabel="layer",
        ylabel="nats per token",
    )

    right.plot(
        [choice["cache_bytes"] / 2**20 for choice in choices],
        [sum(costs[choice["kept"] :]) for choice in choices],
        "o-",
        color="tab:blue",
        markersize=3,
    )
    for choice in choices:
        if choice["kept"].bit_count() <= 1:
            place = (choice["cache_bytes"] / 2**20, sum(costs[choice["kept"] :]))
            right.annotate(f"keep {choice['kept']}", place, textcoords="offset points", xytext=(6, 6))
    right.set(
        title="The most sensitive layers kept as they are",
        xlabel=f"MiB of cache at {report['options']['context']} tokens, {report['cache_bytes']['dtype']}",
        ylabel="sum of the single costs (not measured together)",
    )
    right.margins(y=0.12)
    figure.savefig(path, dpi=120)
    plt.close(figure)

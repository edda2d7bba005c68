"""How much of its source a retrofit keeps: exactness within the window, loss by position, recall, bytes.

Every number is measured, with these two models and these settings; an interrupted run is continued. Two kinds of
baseline are run on the source itself: attention sinks with a sliding window of the target's window (the StreamingLLM
pattern, arXiv 2309.17453), and the same with windows as long as the target's cache allows, counted in rows attended to
and in bytes held.
"""

import json
import os
import random
import re
import tempfile
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)

from kvm_hf import KVMConfig
from kvm_hf.modeling_kvm import CACHE_NAME

from .card import add_measurements
from .errors import RetrofitError
from .plan import DTYPES, PLANNED_LENGTHS, cache_bytes, full_config, kvm_layer_bytes, kvm_layers, rows_at
from .source import open_source

TEXT = Path(__file__).parent / "data" / "genesis.txt"
# Worded so that a small model with full attention finds the key every time; then what is missed is the cache's fault.
NEEDLE = "\n\nImportant: the secret pass key is {key}. Remember it, the secret pass key is {key}.\n\n"
QUESTION = "\n\nQuestion: what is the secret pass key?\nAnswer: the secret pass key is"
# What a healed model's folder has: it need not equal its source within the window.
HEAL_REPORT = "heal.json"
CURVE_LENGTHS = tuple(2**power for power in range(9, 18))  # 512 to 128k
FULL, WINDOW, ROWS, BYTES, TARGET = (
    "full attention",
    "sinks + window",
    "sinks + window, same rows",
    "sinks + window, same bytes",
    "KVM",
)


@dataclass(frozen=True)
class VerifyOptions:
    """What to measure.

    Attributes:
        tokens: length of a piece of text.
        pieces: pieces of text, one after the other.
        needles: passkeys per length, at depths spread evenly over what has left the window.
        needle_tokens: prompt lengths for the passkeys.
        seed: of the passkeys.
        dtype: of both models; exactness is only meaningful in float32 and wider.
        device: `"auto"` is a GPU if there is one.
    """

    tokens: int = 3072
    pieces: int = 1
    needles: int = 10
    needle_tokens: tuple[int, ...] = (1800, 3000)
    seed: int = 0
    dtype: str = "float32"
    device: str = "auto"


@torch.no_grad()
def verify(
    source: str | Path,
    target: str | Path,
    options: VerifyOptions = VerifyOptions(),
    *,
    text: Path | None = None,
    output: Path | None = None,
    on_step: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> dict:
    """Measures `target` against the `source` it was made from; writes `verify.json` and `verify.png`, and into the target's
    card, unless the output is elsewhere.

    Args:
        text: a long text file; the default is Genesis in the King James Version.
        output: folder for the two files; the default is the target.
        on_step: called before each of the measurements with their number.

    Raises:
        RetrofitError: the two models do not belong together, or the text is too short.
    """
    config = _target_config(target)
    _check_options(options, config)
    output = Path(output if output is not None else target)
    if output.exists() and not output.is_dir():
        raise RetrofitError(f"`--output {output}` is a file; name a folder.")
    with tempfile.TemporaryDirectory() as scratch, open_source(source, Path(scratch) / "source") as opened:
        if opened.config.num_hidden_layers != config.num_hidden_layers:
            raise RetrofitError(f"{target} was not made from {source}: their layers differ.")
        tokenizer = load_tokenizer(opened.folder)
        longest = max(options.needle_tokens) if options.needles else 0
        pieces, filler = text_pieces(tokenizer, text or TEXT, options.tokens, options.pieces, at_least=longest)
        prompts = {
            length: _needle_prompts(tokenizer, filler, length, config.window_size, options)
            for length in (options.needle_tokens if options.needles else ())
        }
        load = {"dtype": DTYPES[options.dtype], "device_map": find_device(options.device)}
        full = AutoModelForCausalLM.from_pretrained(opened.folder, attn_implementation="sdpa", **load).eval()
        kvm = AutoModelForCausalLM.from_pretrained(target, trust_remote_code=True, **load).eval()

    converted = kvm_layers(config)
    windows = _windows(config, options.tokens, full.dtype)
    runs = {FULL: (full, nullcontext)}
    for name, size in windows.items():
        runs[name] = (full, partial(windowed, full, converted, size, config.num_sink_tokens))
    runs[TARGET] = (kvm, nullcontext)
    recalling = (FULL, WINDOW, TARGET)

    output.mkdir(parents=True, exist_ok=True)
    total = 1 + len(runs) * len(pieces) + len(recalling) * sum(map(len, prompts.values()))
    weights = [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for folder in (Path(source), Path(target))
        for path in sorted(folder.glob("*.safetensors"))
    ]
    identity = [
        str(source),
        str(target),
        weights,
        str(text),
        asdict(options),
        config.to_dict(),
        transformers.__version__,
    ]
    journal = Journal(output / "verify.partial.json", identity, total, on_step)

    exactness = journal.measure("window exactness", _window_exactness, full, kvm, pieces[0], config.window_size)

    spans = _blocks(config.window_size, options.tokens)
    losses, held = {}, {}
    for name, (model, context) in runs.items():
        measured = []
        for number, piece in enumerate(pieces, 1):
            what = f"loss, {name}" + (f", piece {number} of {len(pieces)}" if len(pieces) > 1 else "")
            with context():
                measured.append(journal.measure(what, _token_losses, model, piece))
        losses[name] = torch.tensor([row for row, _ in measured])
        held[name] = measured[0][1]
    blocks = {
        name: [row[:, max(first, 1) - 1 : last - 1].mean().item() for first, last in spans]
        for name, row in losses.items()
    }
    beyond = {name: row[:, 2 * config.window_size - 1 :].mean().item() for name, row in losses.items()}
    gap = beyond[WINDOW] - beyond[FULL]

    needles = {length: {"depths": [depth for depth, _, _ in found]} for length, found in prompts.items()}
    for length, found in prompts.items():
        for name in recalling:
            model, context = runs[name]
            with context():
                needles[length][name] = [
                    journal.measure(
                        f"passkey of {length} tokens at {depth}, {name}", _recalls, model, tokenizer, ids, key
                    )
                    for depth, key, ids in found
                ]

    report = {
        "source": str(source),
        "target": str(target),
        "text": str(text) if text else "Genesis, King James Version (bundled)",
        "options": asdict(options),
        "state": {"layers": converted, "window": config.window_size, "rows": rows_at(config, options.tokens)},
        "healed": (Path(target) / HEAL_REPORT).is_file(),
        "window_exactness": exactness,
        "windows": windows,
        "loss": {
            "blocks": spans,
            "by_block": blocks,
            "from_token": 2 * config.window_size,
            "beyond": beyond,
            "gap": gap,
            "gap_closed": {name: (beyond[WINDOW] - value) / gap if gap else None for name, value in beyond.items()},
        },
        "needles": needles,
        "cache_bytes": {
            "measured": {"tokens": options.tokens, FULL: held[FULL], TARGET: held[TARGET]},
            "by_formula": {
                str(tokens): {
                    FULL: cache_bytes(full_config(opened.config), tokens, full.dtype),
                    TARGET: cache_bytes(config, tokens, full.dtype),
                }
                for tokens in CURVE_LENGTHS
            },
        },
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
    }
    written = json.dumps(report, indent=2)
    (output / "verify.json").write_text(written + "\n")
    report = json.loads(written)
    plot(report, output / "verify.png")
    if output == Path(target):
        add_measurements(output, _for_the_card(report))
    journal.close()
    return report


def print_report(report: dict, out: Console) -> None:
    """The report as tables."""
    window = report["state"]["window"]
    out.print(
        f"Largest logit difference within the first {window} tokens: [bold]{report['window_exactness']:.1e}[/bold]"
    )
    if report["window_exactness"] > 1e-2 and not report["healed"]:
        out.print("[bold red]That is far more than rounding: the target was not made from this source.[/bold red]")
    loss = report["loss"]
    table = Table("Mean loss at tokens", *(f"{first}-{last}" for first, last in loss["blocks"]), "gap closed")
    for name, values in loss["by_block"].items():
        closed = loss["gap_closed"][name]
        label = f"{name} ({report['windows'][name]})" if name in report["windows"] else name
        table.add_row(label, *(f"{value:.3f}" for value in values), "-" if closed is None else f"{100 * closed:.0f} %")
    out.print(table)
    out.print(
        f"Gap closed: from token {loss['from_token']} on, of {loss['gap']:.3f} between the window and full attention.",
        highlight=False,
    )
    if report["needles"]:
        names = [name for name in next(iter(report["needles"].values())) if name != "depths"]
        table = Table("Passkeys recalled", *names)
        for length, hits in report["needles"].items():
            table.add_row(f"{length} tokens", *(f"{sum(hits[name])} of {len(hits[name])}" for name in names))
        out.print(table)
    held = report["cache_bytes"]
    table = Table(f"Cache per sequence, {report['options']['dtype']}", FULL, TARGET, "ratio")
    rows = {f"{held['measured']['tokens']} tokens (measured)": held["measured"]} | {
        f"{tokens // 1024}k tokens (formula)": held["by_formula"][str(tokens)] for tokens in PLANNED_LENGTHS
    }
    for label, row in rows.items():
        before, after = row[FULL], row[TARGET]
        table.add_row(label, f"{before / 2**20:.1f} MiB", f"{after / 2**20:.1f} MiB", f"{after / before:.2f}")
    out.print(table)


def _for_the_card(report: dict) -> str:
    """What a reader of the card wants to see first; the rest is in `verify.json`."""
    loss, options, needles = report["loss"], report["options"], report["needles"]
    spans = [f"{first}-{last}" for first, last in loss["blocks"]]
    rows = [
        ["mean loss at tokens", *spans, "gap closed", *(f"passkeys, {length} tokens" for length in needles)],
        ["---"] * (len(spans) + 2 + len(needles)),
    ]
    for name, values in loss["by_block"].items():
        closed = loss["gap_closed"][name]
        found = [f"{sum(hits[name])} of {len(hits[name])}" if name in hits else "" for hits in needles.values()]
        label = f"{name} ({report['windows'][name]})" if name in report["windows"] else name
        rows.append(
            [label, *(f"{value:.3f}" for value in values), "" if closed is None else f"{100 * closed:.0f} %", *found]
        )
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return (
        f"With `retrofit verify`, on {options['pieces']} piece(s) of {options['tokens']} tokens of {Path(report['text']).name}, "
        f"against the source with full attention, in {options['dtype']}. Largest logit difference within the first "
        f"{report['state']['window']} tokens: {report['window_exactness']:.1e}. Gap closed: from token {loss['from_token']} on, "
        f"of {loss['gap']:.3f} between the window and full attention. Every number is in `verify.json`.\n\n{table}\n\n"
        "![Loss, recall and cache](verify.png)"
    )


def plot(report: dict, path: Path) -> None:
    """Loss over position, recall over depth, cache over context, as one picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colors = {FULL: "black", WINDOW: "tab:red", ROWS: "tab:orange", BYTES: "tab:olive", TARGET: "tab:blue"}
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    figure.suptitle(f"{Path(report['target']).name} against {Path(report['source']).name}")

    loss = report["loss"]
    ends = [last for _, last in loss["blocks"]]
    for name, values in loss["by_block"].items():
        above = [value - full for value, full in zip(values, loss["by_block"][FULL])]
        label = f"{name} ({report['windows'][name]} tokens)" if name in report["windows"] else name
        left.stairs(above, [0, *ends], baseline=None, color=colors[name], label=label, linewidth=2)
    left.set(title="Loss above full attention, by position", xlabel="position", ylabel="nats per token")
    left.legend()

    recalling = (FULL, WINDOW, TARGET)
    for place, hits in enumerate(report["needles"].values()):
        for offset, name in enumerate(recalling):
            found = sum(hits[name])
            bar = middle.bar(
                place + 0.27 * (offset - 1),
                found / len(hits[name]),
                0.25,
                color=colors[name],
                label=None if place else name,
            )
            middle.bar_label(bar, [f"{found} of {len(hits[name])}"])
    middle.set_xticks(range(len(report["needles"])), [f"{length} tokens" for length in report["needles"]])
    middle.set(title="Passkeys recalled from beyond the window", ylim=(0, 1.25), ylabel="share of keys")
    if report["needles"]:
        middle.legend(loc="upper center", ncols=3)

    formula = report["cache_bytes"]["by_formula"]
    for name in (FULL, TARGET):
        right.loglog(
            [int(t) for t in formula], [row[name] / 2**20 for row in formula.values()], color=colors[name], label=name
        )
    right.set(title=f"Cache per sequence, {report['options']['dtype']}", xlabel="tokens", ylabel="MiB")
    right.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


@contextmanager
def windowed(model: PreTrainedModel, layers: list[int], size: int, sinks: int):
    """Within the context, `layers` of a Llama-style model see `sinks` first tokens and the last `size`, and no more."""

    def hide(module, args, kwargs):
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        cache, length = kwargs.get(CACHE_NAME), hidden.shape[1]
        past = 0 if cache is None else cache.get_seq_length(module.layer_idx)
        query = torch.arange(past, past + length, device=hidden.device)[:, None]
        key = torch.arange(past + length, device=hidden.device)[None]
        visible = (key <= query) & ((query - key < size) | (key < sinks))
        return args, kwargs | {"attention_mask": visible[None, None]}

    hooks = [
        model.base_model.layers[layer].self_attn.register_forward_pre_hook(hide, with_kwargs=True) for layer in layers
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Journal:
    """Results of finished measurements, kept on disk so that an interrupted run goes on where it was."""

    def __init__(self, path: Path, identity, total: int, on_step):
        self.path, self.total, self.on_step, self.done = path, total, on_step, 0
        self.identity = json.loads(json.dumps(identity, default=str))
        try:
            kept = json.loads(path.read_text())
            self.results = kept["results"] if kept["identity"] == self.identity else {}
        except (OSError, ValueError, KeyError, TypeError):
            self.results = {}  # nothing to go on from

    def measure(self, what: str, function: Callable, *args):
        """The result of `function(*args)`, from this run or the one that was interrupted."""
        self.on_step(self.done, self.total, what)
        self.done += 1
        key = f"{self.done} {what}"  # the number, since two measurements may read alike
        if key not in self.results:
            self.results[key] = function(*args)
            unfinished = self.path.with_suffix(".tmp")
            unfinished.write_text(json.dumps({"identity": self.identity, "results": self.results}))
            unfinished.replace(self.path)
        return self.results[key]

    def close(self) -> None:
        self.on_step(self.total, self.total, "done")
        self.path.unlink()


def check_place(path: Path, what: str) -> None:
    """Refuses a path below a file, or where nothing may be written.

    Args:
        what: the option that names it.
    """
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise RetrofitError(f"The {what} {path} cannot be made: {parent} is no folder that can be written to.")


def check_journal(path: Path, what: str) -> None:
    """Refuses a file that `Journal` did not write.

    Args:
        what: the option that says where it is.
    """
    try:
        is_ours = not path.exists() or json.loads(path.read_text()).keys() == {"identity", "results"}
    except (OSError, ValueError, AttributeError):
        is_ours = False
    if not is_ours:
        raise RetrofitError(
            f"{path}, where the measurements would be kept, exists and is not ours. Move it, or choose another {what}."
        )


def _check_options(options: VerifyOptions, config: KVMConfig) -> None:
    if options.dtype not in DTYPES:
        raise RetrofitError(f"`--dtype {options.dtype}` is not known; use one of {', '.join(DTYPES)}.")
    for name, least in (("pieces", 1), ("needles", 0), ("tokens", 1)):
        if getattr(options, name) < least:
            raise RetrofitError(f"`--{name} {getattr(options, name)}` is too few; use {least} or more.")
    if options.tokens <= 2 * config.window_size:
        raise RetrofitError(
            f"`--tokens {options.tokens}` does not reach beyond twice the window of {config.window_size}; use more."
        )


def load_tokenizer(folder: Path, what: str = "source"):
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # transformers has many, depending on which file is missing
        raise RetrofitError(f"The {what} {folder} has no tokenizer that can be loaded: {error}") from error


def find_device(choice: str) -> torch.device:
    if choice == "auto":
        choice = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(choice)
        torch.empty(0, device=device).cpu()  # "meta" gives nothing back
        return device
    except (RuntimeError, AssertionError) as error:
        raise RetrofitError(f"The device {choice!r} cannot be used: {error}") from error


def read_config(target) -> PreTrainedConfig:
    """The config of a model folder of ours, or of a hub id."""
    if not Path(target).is_dir() and not re.fullmatch(r"[\w.-]*\w/[\w.-]+", str(target)):
        raise RetrofitError(
            f"{target} is not a model folder: there is none of that name. `retrofit to-kvm` and `to-maglev` make them."
        )
    try:
        return AutoConfig.from_pretrained(target)
    except Exception as error:
        raise RetrofitError(f"{target} is not a model folder: {error}") from error


def _target_config(target) -> KVMConfig:
    config = read_config(target)
    if config.model_type != "kvm":
        raise RetrofitError(
            f"{target} is a {config.model_type} model, not a KVM model. Make one with `retrofit to-kvm`."
        )
    return config


def text_pieces(
    tokenizer, text: Path, tokens: int, count: int, at_least: int = 0
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """`count` pieces of a text, `[1, tokens]` each, spread evenly over it, and all its ids.

    Raises:
        RetrofitError: the text cannot be read, or is shorter than its pieces or `at_least`.
    """
    try:
        ids = torch.tensor(tokenizer(Path(text).read_text(encoding="utf-8")).input_ids)
    except (OSError, UnicodeDecodeError) as error:
        raise RetrofitError(f"The text {text} cannot be read: {error}") from error
    need = max(tokens * count, at_least)
    if len(ids) < need:
        raise RetrofitError(f"{text} has {len(ids)} tokens; {need} are needed. Use a longer text or fewer tokens.")
    spread = (len(ids) - tokens) // max(count - 1, 1)
    return [ids[None, i * spread : i * spread + tokens] for i in range(count)], ids


def _windows(config: KVMConfig, tokens: int, dtype: torch.dtype) -> dict[str, int]:
    """Window lengths of the baselines: the target's own, and what its rows and its bytes would pay for."""
    row = 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize
    held = kvm_layer_bytes(config, tokens, dtype)
    return {
        WINDOW: config.window_size,
        ROWS: config.window_size + rows_at(config, tokens) - config.num_sink_tokens,
        BYTES: held // row - config.num_sink_tokens,
    }


def _blocks(window: int, tokens: int) -> list[tuple[int, int]]:
    """Spans of positions between 0, L, 2L, 4L, ... and the end."""
    edges = [0, window]
    while 2 * edges[-1] < tokens:
        edges.append(2 * edges[-1])
    return list(pairwise([*edges, tokens]))


def _window_exactness(full, kvm, piece, window: int) -> float:
    """Largest difference between the logits of the two models within the window."""
    ids = piece[:, :window].to(full.device)
    return (full(ids).logits - kvm(ids).logits).abs().max().item()


def _token_losses(model, ids) -> tuple[list[float], int]:
    """Loss of each token after the first, `T - 1` in all, and the bytes of cache held at the end."""
    ids = ids.to(model.device)
    outputs = model.base_model(ids, use_cache=True)
    head, parts = model.get_output_embeddings(), []
    for hidden, labels in zip(outputs.last_hidden_state[:, :-1].split(512, 1), ids[:, 1:].split(512, 1)):
        parts.append(torch.nn.functional.cross_entropy(head(hidden).transpose(1, 2), labels, reduction="none"))
    return torch.cat(parts, dim=1)[0].tolist(), _held_bytes(getattr(outputs, CACHE_NAME))


def _held_bytes(cache: DynamicCache) -> int:
    if hasattr(cache, "nbytes"):
        return cache.nbytes
    return sum(part.numel() * part.element_size() for layer in cache.layers for part in (layer.keys, layer.values))


def _needle_prompts(tokenizer, filler, length, window, options: VerifyOptions):
    """`(depth, key, ids)` per passkey: text of `length` tokens in all, the key where every window has lost it."""
    rng = random.Random(f"{options.seed}-{length}")
    question = tokenizer(QUESTION, add_special_tokens=False, return_tensors="pt").input_ids[0]
    prompts = []
    for index in range(options.needles):
        key = str(rng.randrange(10000, 100000))
        needle = tokenizer(NEEDLE.format(key=key), add_special_tokens=False, return_tensors="pt").input_ids[0]
        room = length - len(needle) - len(question)
        start = rng.randrange(max(1, len(filler) - room))
        last = length - window - len(needle)
        if last < 0:
            raise RetrofitError(f"`--needle-tokens {length}` leaves nothing beyond the window of {window}; use more.")
        depth = round(last * index / max(options.needles - 1, 1))
        text = filler[start : start + room]
        prompts.append((depth, key, torch.cat([text[:depth], needle, text[depth:], question])[None]))
    return prompts


def _recalls(model, tokenizer, ids, key: str) -> bool:
    ids = ids.to(model.device)
    new = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(key) + 3, do_sample=False)
    return tokenizer.decode(new[0, ids.shape[1] :]).strip().startswith(key)

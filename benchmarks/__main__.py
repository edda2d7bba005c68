"""Speed and memory of our models against Llama and against the floor, side by side in one process.

    python -m benchmarks prefill | decode | train | memory | folding | profile [--full] [--help]

`floor` is Llama with attention replaced by its value projection: the time that no cache can change. Ratios are of
medians over rounds in which all models take turns (decode: of means, so that borders of chunks count). By default a small
model, in minutes; `--full` takes the size of the paper's 120M runs and long contexts, and tens of minutes to hours on two
cores. Writes `COMMAND.json` and `COMMAND.png` (to `benchmarks/results/speed/` by default, `--full` to
`benchmarks/results/speed-full/`).
"""

import json
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import PreTrainedModel

from kvm_hf.attention_kvm import repeat_heads
from kvm_hf.cache_kvm import KVMLayer

from .folding import compare_folding
from .measuring import in_own_process, interleaved, machine, spread, timed
from .models import COLOURS, FLOOR, LLAMA, MODELS, MOST_TOKENS, SIZES, make_model, prompt
from .tasks import prefill_memory, read, step, train_step, training_memory

RESULTS = Path(__file__).parent / "results"
# Operations by parts of their names; the first kind that fits.
KINDS = {
    "linear layers": ("aten::mm", "aten::addmm"),
    "attention": ("scaled_dot_product",),
    "looking up rows": ("aten::bmm", "aten::amax", "aten::amin", "aten::sort"),
    "copies": ("aten::cat", "aten::copy_", "aten::index", "aten::scatter", "aten::gather", "aten::fill_"),
    "everything else": ("",),
}
RAGGED = 8  # rows of the batch of very different lengths
console = Console()
app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__.split("\n\n")[0])

Models = Annotated[list[str] | None, typer.Option("--model", help=f"May be given again. Of: {', '.join(MODELS)}.")]
Lengths = Annotated[list[int] | None, typer.Option("--tokens", help="Context length; may be given again.")]
Rounds = Annotated[int, typer.Option(min=1, help="Times that each is measured.")]
Full = Annotated[bool, typer.Option("--full", help="The paper's size and long contexts.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, ...", callback=lambda name: check_device(name))]
Output = Annotated[Path | None, typer.Option(help="Folder for the JSON file and the picture.", file_okay=False)]


@app.command()
def prefill(
    models: Models = None,
    lengths: Lengths = None,
    rounds: Rounds = 3,
    full: Full = False,
    device: Device = "cpu",
    output: Output = None,
) -> None:
    """Time of a prompt that fills a cache."""
    output = _folder(output, full)
    size = _size(full)
    cells = _cells(models, lengths or ([1024, 4096, 16384] if full else [512, 1024, 2048, 4096]))
    loaded = _load({name for name, _ in cells}, size, device)

    def run(name: str, tokens: int) -> float:
        ids = prompt(size, tokens, device)
        return timed(lambda: read(loaded[name], ids), device)

    with torch.inference_mode():
        taken = interleaved({cell: partial(run, *cell) for cell in cells}, rounds, "Prefill")
    rows = [
        {"model": name, "tokens": tokens, "seconds": spread(seconds)}
        | {"per_token": statistics.median(seconds) / tokens}
        for (name, tokens), seconds in taken.items()
    ]
    _finish("prefill", rows, "milliseconds per token of the prompt", rounds, device, output, full)


@app.command()
def decode(
    models: Models = None,
    lengths: Lengths = None,
    rounds: Annotated[int, typer.Option(min=1, help="Chunks of 64 tokens that each decodes.")] = 4,
    full: Full = False,
    device: Device = "cpu",
    output: Output = None,
) -> None:
    """Time of a token after a context. Four rounds of 64 tokens pass just one border of chunks."""
    output = _folder(output, full)
    size = _size(full)
    cells = _cells(models, lengths or ([512, 1024, 4096, 16384] if full else [512, 2048, 8192]))
    loaded = _load({name for name, _ in cells}, size, device)
    steps, caches = {cell: [] for cell in cells}, {}
    attention = {cell: {"update": [], "call": [], "plain": []} for cell in cells}

    def run(name: str, tokens: int) -> float:
        model, cell = loaded[name], (name, tokens)
        for token in prompt(size, 64, device)[0]:
            # In the round that warms up: the plain call takes time itself.
            watched = name.startswith("kvm") and len(steps[cell]) < 64
            with _attention_times(device, attention[cell] if watched else None):
                steps[cell].append(timed(lambda token=token: step(model, caches[cell], token.view(1, 1)), device))
        return sum(steps[cell][-64:])

    with torch.inference_mode():
        for name, tokens in tqdm(cells, desc="Filling caches"):
            caches[name, tokens] = read(loaded[name], prompt(size, tokens, device))
        interleaved({cell: partial(run, *cell) for cell in cells}, rounds, "Decoding")
        ragged = _ragged(
            [name for name in loaded if name.startswith("kvm")],
            loaded,
            size,
            max(tokens for _, tokens in cells),
            rounds,
            device,
        )
    rows = []
    for name, tokens in cells:
        measured = steps[name, tokens][64:]  # the first ones were to warm up
        row = {"model": name, "tokens": tokens, "seconds": spread(measured), "per_token": statistics.mean(measured)}
        if attention[name, tokens]["plain"]:
            update, call, plain = (statistics.median(times) for times in attention[name, tokens].values())
            row["attention_over_one_sdpa_call"] = call / plain
            row["attention_and_write_over_one_sdpa_call"] = update / plain
            row["share_of_chunk_borders"] = 1 - statistics.median(measured) * len(measured) / sum(measured)
        rows.append(row)
    _finish("decode", rows, "milliseconds per token, borders of chunks included", rounds, device, output, full, ragged)


@app.command()
def train(
    models: Models = None,
    lengths: Lengths = None,
    rounds: Rounds = 3,
    layers: Annotated[int | None, typer.Option(min=2, help="So many, for contexts that would not fit.")] = None,
    full: Full = False,
    device: Device = "cpu",
    output: Output = None,
) -> None:
    """Time and memory of a training step, forward and backward, without checkpointing."""
    output = _folder(output, full)
    size = _size(full, layers)
    names = [name for name in models or MODELS if not name.startswith("maglev")]
    cells = _cells(names, lengths or ([1024, 4096] if full else [512, 1024, 2048, 4096]))
    loaded = _load(set(names), size, device)

    def run(name: str, tokens: int) -> float:
        ids = prompt(size, tokens, device)
        seconds = timed(lambda: train_step(loaded[name], ids), device)
        loaded[name].zero_grad()  # others need the memory
        return seconds

    taken = interleaved({cell: partial(run, *cell) for cell in cells}, rounds, "Training")
    loaded.clear()  # what follows needs the memory
    memory = {}
    for name, tokens in tqdm(cells, desc="Memory, in processes of their own"):
        memory[name, tokens] = _memory_of(training_memory, name, size, tokens, device)
    rows = [
        {
            "model": name,
            "tokens": tokens,
            "seconds": spread(seconds),
            "per_token": statistics.median(seconds) / tokens,
            "added_bytes": memory[name, tokens],
        }
        for (name, tokens), seconds in taken.items()
    ]
    _finish("train", rows, "milliseconds per token of a training step", rounds, device, output, full, layers=layers)


@app.command()
def memory(
    models: Models = None,
    lengths: Lengths = None,
    full: Full = False,
    device: Device = "cpu",
    output: Output = None,
) -> None:
    """Bytes of cache after a prompt, against the formula of the specification, and the memory that the prompt needed."""
    output = _folder(output, full)
    size = _size(full)
    names = [name for name in models or MODELS if name != FLOOR]
    cells = _cells(names, lengths or ([1024, 4096, 16384] if full else [512, 1024, 2048, 4096]))
    rows = []
    for name, tokens in tqdm(cells, desc="Memory, in processes of their own"):
        if found := _memory_of(prefill_memory, name, size, tokens, device):
            rows.append({"model": name, "tokens": tokens} | found)
    if not rows:
        raise typer.Exit(1)
    _finish("memory", rows, "MiB of cache", 1, device, output, full)


@app.command()
def folding(rounds: Rounds = 10, full: Full = False, device: Device = "cpu", output: Output = None) -> None:
    """Attention of many chunks over their states and windows: one call per chunk, as our models do it, against one call for
    all of them, with the chunks as entries of a batch."""
    output = _folder(output, full)
    size = _size(full)
    rows = [
        compare_folding(chunks, state, size["num_attention_heads"], size["hidden_size"], rounds, device)
        for chunks in (4, 16)
        for state in (256, 1024)
    ]
    facts = {"command": _command(), "machine": machine(device), "rounds": rounds, "rows": rows}
    (output / "folding.json").write_text(json.dumps(facts, indent=1) + "\n")
    table = Table("chunks", "rows of state", "one call per chunk, ms", "folded", "folded, without its copies")
    for row in rows:
        times = (f"{1000 * row[name]['median']:.1f}" for name in ("per_chunk", "folded", "folded_without_copies"))
        table.add_row(str(row["chunks"]), str(row["state"]), *times)
    console.print(table)
    console.print(output / "folding.json", soft_wrap=True)


@app.command()
def profile(
    models: Models = None,
    tokens: Annotated[int, typer.Option(min=2, help="Length of the prompt.")] = 4096,
    layers: Annotated[int, typer.Option(min=2, help="Of the model.")] = 2,
    training: Annotated[bool, typer.Option("--training", help="A training step in place of a prompt.")] = False,
    full: Full = False,
    output: Output = None,
) -> None:
    """Where the time of a prompt, or of a training step, goes, by kinds of operations, on the CPU."""
    output, stem = _folder(output, full), "profile-training" if training else "profile"
    size, shares = _size(full, layers), {}
    names = [name for name, _ in _cells(models or [FLOOR, LLAMA, "kvm-fixed", "kvm-sqrt"], [tokens])]
    for name in tqdm(names, desc="Profile"):
        model, ids = make_model(name, size, "cpu"), prompt(size, tokens, "cpu")
        with torch.inference_mode(not training):
            run = partial(train_step if training else read, model, ids)
            run()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
                run()
        shares[name] = dict.fromkeys(KINDS, 0.0)
        for event in recorded.key_averages():
            kind = next(kind for kind, parts in KINDS.items() if any(part in event.key for part in parts))
            shares[name][kind] += event.self_cpu_time_total / 1e6
    facts = {"command": _command(), "machine": machine("cpu"), "size": size, "tokens": tokens, "seconds": shares}
    (output / f"{stem}.json").write_text(json.dumps(facts, indent=1) + "\n")
    table = Table("seconds", *shares)
    for kind in KINDS:
        table.add_row(kind, *(f"{found[kind]:.3f}" for found in shares.values()))
    console.print(table)
    figure, axes = plt.subplots(figsize=(7.5, 3), layout="constrained")
    left = [0.0] * len(shares)
    for kind in KINDS:
        width = [found[kind] for found in shares.values()]
        axes.barh(list(shares), width, left=left, label=kind)
        left = [a + b for a, b in zip(left, width)]
    axes.invert_yaxis()
    axes.set(xlabel=f"seconds for {tokens} tokens, {layers} layers")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(output / f"{stem}.png", dpi=150)
    plt.close(figure)
    console.print(f"{output / f'{stem}.json'}\n{output / f'{stem}.png'}", soft_wrap=True)


@contextmanager
def _attention_times(device: str, found: dict[str, list[float]] | None):
    """Within it, the sum over all KVM layers of a step goes to `found`: in turns of the time of their attention (`"call"`), of
    that and what leads to it (`"update"`), and of one plain attention call over the same rows (`"plain"`). Not of two in one
    step, since the second one would find all rows in the processor's cache."""
    if found is None:
        yield
        return
    kind = min(found, key=lambda kind: len(found[kind]))
    name = "update" if kind == "update" else "_attend"
    method, times = getattr(KVMLayer, name), []

    def timed_method(layer, *args, **kwargs):
        if kind == "plain":
            queries, stop = args[1], layer._state_columns + layer.stop
            groups = queries.shape[1] // layer.keys.shape[1]
            keys, values = (repeat_heads(part[:, :, :stop], groups) for part in (layer.keys, layer.values))
            times.append(timed(lambda: F.scaled_dot_product_attention(queries, keys, values), device))
            return method(layer, *args, **kwargs)
        outputs = []
        times.append(timed(lambda: outputs.append(method(layer, *args, **kwargs)), device))
        return outputs[0]

    setattr(KVMLayer, name, timed_method)
    try:
        yield
    finally:
        setattr(KVMLayer, name, method)
    found[kind].append(sum(times))


def _ragged(names: list[str], loaded: dict, size: dict, tokens: int, rounds: int, device: str) -> list[dict]:
    """Decoding of a batch whose rows differ in length against one of equal rows, as many tokens each on average."""
    lengths = [max(1, round(tokens / 8 * (row + 1) / RAGGED)) for row in range(RAGGED)]
    mean, runs, masks, caches = sum(lengths) // RAGGED, {}, {}, {}

    def run(name: str, kind: str) -> float:
        total = 0.0
        for token in prompt(size, 64, device)[0]:
            masks[name, kind] = F.pad(masks[name, kind], (0, 1), value=1)
            ids = token.expand(RAGGED, 1)
            one = partial(step, loaded[name], caches[name, kind], ids, attention_mask=masks[name, kind])
            total += timed(one, device)
        return total

    for name in names:
        for kind, rows in (("uniform", [mean] * RAGGED), ("ragged", lengths)):
            width = max(rows)
            mask = torch.arange(width, device=device) >= width - torch.tensor(rows, device=device)[:, None]
            masks[name, kind] = mask.long()
            caches[name, kind] = read(
                loaded[name], prompt(size, width, device, RAGGED), attention_mask=masks[name, kind]
            )
            runs[name, kind] = partial(run, name, kind)
    taken = {pair: statistics.median(seconds) for pair, seconds in interleaved(runs, rounds, "Ragged batches").items()}
    return [
        {"model": name, "lengths": lengths, "ragged_over_uniform": taken[name, "ragged"] / taken[name, "uniform"]}
        for name in names
    ]


def _cells(models: list[str] | None, lengths: list[int]) -> list[tuple[str, int]]:
    """What is measured: each model at each length that it can do."""
    names = list(MODELS if models is None else models)
    unknown = sorted(set(names) - set(MODELS))
    if unknown:
        raise typer.BadParameter(f"--model {', '.join(unknown)}: known are {', '.join(MODELS)}.")
    if min(lengths) < 2:
        raise typer.BadParameter(f"--tokens {min(lengths)}: must be 2 or more.")
    cells = [(name, tokens) for tokens in lengths for name in names if tokens <= MOST_TOKENS.get(name, tokens)]
    if not cells:
        raise typer.BadParameter("--model and --tokens leave nothing to measure.")
    return cells


def check_device(name: str) -> str:
    try:
        torch.empty(0, device=name).cpu()  # "meta" gives nothing back
    except (RuntimeError, AssertionError) as error:
        raise typer.BadParameter(f"{name}: {str(error).splitlines()[0]}") from error
    return name


def _folder(output: Path | None, full: bool) -> Path:
    """Where results go; made before anything is measured."""
    output = output or RESULTS / ("speed-full" if full else "speed")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"--output {output} cannot be made: {error.strerror}.") from error
    return output


def _command() -> str:
    return shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])


def _size(full: bool, layers: int | None = None) -> dict:
    size = SIZES["paper" if full else "small"]
    return size if layers is None else size | {"num_hidden_layers": layers}


def _load(names: set[str], size: dict, device: str) -> dict[str, PreTrainedModel]:
    return {name: make_model(name, size, device) for name in MODELS if name in names}


def _memory_of(function: Callable, name: str, size: dict, tokens: int, device: str):
    """What `function` finds in a process of its own, or None, with a message, if that process has not enough memory: what was
    measured before is not lost."""
    try:
        return in_own_process(function, name, size, tokens, device)
    except RuntimeError as error:  # PyTorch's, or that the system killed the process
        console.print(f"The memory of {name} at {tokens} tokens could not be measured: {error}")
        return None


def _finish(
    command: str,
    rows: list[dict],
    what: str,
    rounds: int,
    device: str,
    output: Path,
    full: bool,
    ragged: Sequence[dict] = (),
    layers: int | None = None,
) -> None:
    """Ratios, then JSON, picture and table."""
    key = "cache_bytes" if command == "memory" else "per_token"
    for row in rows:
        for other in (LLAMA, FLOOR):
            beside = [r for r in rows if r["model"] == other and r["tokens"] == row["tokens"]]
            if beside and other != row["model"]:
                row[f"over_{other}"] = row[key] / beside[0][key]
                # None if it was too much, 0 where a call fits into what was held already.
                if other == LLAMA and beside[0].get("added_bytes") and row["added_bytes"] is not None:
                    row["added_over_llama"] = row["added_bytes"] / beside[0]["added_bytes"]
    facts = {
        "command": _command(),
        "machine": machine(device),
        "size": _size(full, layers),
        "rounds": rounds,
        "rows": rows,
        "ragged": list(ragged),
    }
    (output / f"{command}.json").write_text(json.dumps(facts, indent=1) + "\n")
    _draw(rows, what, key, output / f"{command}.png")
    _print(rows, ragged, key)
    console.print(f"{output / f'{command}.json'}\n{output / f'{command}.png'}", soft_wrap=True)


def _draw(rows: list[dict], what: str, key: str, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7.5, 4.8), layout="constrained")
    unit: Callable[[float], float] = (
        (lambda value: value / 2**20) if key == "cache_bytes" else (lambda value: 1000 * value)
    )
    for name in dict.fromkeys(row["model"] for row in rows):
        points = [(row["tokens"], unit(row[key])) for row in rows if row["model"] == name]
        axes.loglog(*zip(*points), marker="o", markersize=4, color=COLOURS[name], label=name)
    ticks = sorted({row["tokens"] for row in rows})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set(xlabel="tokens of context", ylabel=what)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _print(rows: list[dict], ragged: Sequence[dict], key: str) -> None:
    further = [
        name
        for name in (
            f"over_{LLAMA}",
            f"over_{FLOOR}",
            "added_over_llama",
            "attention_over_one_sdpa_call",
            "attention_and_write_over_one_sdpa_call",
            "share_of_chunk_borders",
        )
        if any(name in row for row in rows)
    ]
    table = Table("model", "tokens", "MiB of cache" if key == "cache_bytes" else "ms per token", *further)
    for row in rows:
        value = row[key] / 2**20 if key == "cache_bytes" else 1000 * row[key]
        cells = [f"{row[name]:.2f}" if name in row else "" for name in further]
        table.add_row(row["model"], str(row["tokens"]), f"{value:.3g}", *cells)
    console.print(table)
    for row in ragged:
        console.print(
            f"{row['model']}: a batch of {RAGGED} rows of {row['lengths'][0]} to {row['lengths'][-1]} tokens takes "
            f"{row['ragged_over_uniform']:.2f} times one of equal rows."
        )


if __name__ == "__main__":
    app()

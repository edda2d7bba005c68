"""Prompts of a Maglev model by fixed point against one token after the other: sweeps, ratio of times, largest deviation.

    python benchmarks/maglev_prefill.py [--model FOLDER] [--output FOLDER]

Random weights are as the config initialises them, in the model's size. Trained ones are FOLDER's, or those of a small
model of bytes that is trained here first, for a few minutes, on Genesis. Both rollouts run alternately in one process.
"""

import json
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Annotated

import matplotlib
import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from maglev_hf import MaglevConfig, MaglevForPreTraining

TEXT = Path(__file__).parents[1] / "conversion" / "data" / "genesis.txt"
HELD_OUT = 8192  # bytes at the end of the text, which prompts are taken from
LENGTHS = [16, 64, 256, 1024]
SIZE = dict(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    sliding_window=16,
    share_prefiller=False,
)


def train(steps: int, text: torch.Tensor) -> MaglevForPreTraining:
    """A small model of bytes, taught by its prefiller with one self-fed sweep."""
    torch.manual_seed(0)
    model = MaglevForPreTraining(MaglevConfig(**SIZE, self_feeding_sweeps=1)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in tqdm(range(steps), desc="Training"):
        starts = torch.randint(len(text) - HELD_OUT - 128, (8,)).tolist()
        ids = torch.stack([text[start : start + 128] for start in starts])
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model


@torch.no_grad()
def compare(model: MaglevForPreTraining, prompts: torch.Tensor, tolerance: float, guessed: bool, repeats: int) -> dict:
    """Both rollouts of `prompts` `[n, T]`, one prompt at a time."""
    model.config.rollout_tolerance = tolerance
    prefiller = model.prefiller if guessed else None
    times, deviations, sweeps = {"sequential": [], "fixed_point": []}, [], []
    for prompt in prompts[:, None]:
        for _ in range(repeats):
            memories = {}
            for rollout, taken in times.items():
                start = time.perf_counter()
                outputs = model.model(prompt, rollout=rollout, prefiller=prefiller, use_cache=True)
                taken.append(time.perf_counter() - start)
                memories[rollout] = outputs.last_hidden_state
                if rollout == "fixed_point":
                    sweeps += outputs.sweeps
        difference = memories["sequential"] - memories["fixed_point"]
        deviations.append(difference.pow(2).mean(-1).sqrt().max().item())
    return {
        "tokens": prompts.shape[1],
        "tolerance": tolerance,
        "start": "targets" if guessed else "zeros",
        "sweeps_mean": statistics.mean(sweeps),
        "sweeps_max": max(sweeps),
        "time_ratio": statistics.median(times["sequential"]) / statistics.median(times["fixed_point"]),
        "largest_deviation": max(deviations),
    }


def draw(results: dict[str, list[dict]], file: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for weights, color in (("random", "#0072B2"), ("trained", "#D55E00")):
        for start, style in (("zeros", "--"), ("targets", "-")):
            of = [row for row in results[weights] if row["start"] == start]
            tolerance = min(row["tolerance"] for row in of)
            of = [row for row in of if row["tolerance"] == tolerance]
            lengths = [row["tokens"] for row in of]
            label = f"{weights} weights, from {start}"
            left.plot(lengths, [row["sweeps_mean"] for row in of], style, color=color, marker="o", label=label)
            right.plot(lengths, [row["time_ratio"] for row in of], style, color=color, marker="o", label=label)
    left.set(xlabel="tokens of the prompt", ylabel=f"sweeps per block, to {tolerance:g}", xscale="log", ylim=(0, None))
    right.set(xlabel="tokens of the prompt", ylabel="time, sequential / fixed point", xscale="log", ylim=(0, None))
    right.axhline(1, color="0.8", zorder=0)
    left.legend(frameon=False, fontsize=8)
    figure.suptitle("Prompts of a Maglev model in parallel")
    figure.savefig(file, dpi=150)


def main(
    model: Annotated[Path | None, typer.Option(help="Folder of a trained `MaglevForPreTraining` of bytes.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = Path(__file__).parent
    / "results"
    / "maglev-prefill",
    lengths: Annotated[
        list[int] | None, typer.Option(help="Tokens of a prompt; may be given again. [default: 16 64 256 1024]")
    ] = None,
    prompts: Annotated[int, typer.Option(help="Prompts per length.")] = 4,
    repeats: Annotated[int, typer.Option(help="Times that each is run.")] = 3,
    steps: Annotated[int, typer.Option(help="Steps of training, if there is no model.")] = 400,
) -> None:
    """Compares the two rollouts on held-out prompts."""
    lengths = lengths or LENGTHS
    if max(lengths) > HELD_OUT:
        raise typer.BadParameter(f"--lengths {max(lengths)}: only {HELD_OUT} bytes of the text are held out.")
    text = torch.tensor(list(TEXT.read_bytes()))
    trained = train(steps, text) if model is None else MaglevForPreTraining.from_pretrained(model)
    if trained.config.vocab_size < 256:
        raise typer.BadParameter(
            f"--model {model}: its vocabulary of {trained.config.vocab_size} does not hold all bytes."
        )
    torch.manual_seed(0)
    random = MaglevForPreTraining(trained.config)
    results = {}
    settings = [(length, tolerance, guessed) for length in lengths for tolerance in (1e-3, 1e-4) for guessed in (0, 1)]
    for weights, one in (("random", random.eval()), ("trained", trained.eval())):
        results[weights] = []
        for length, tolerance, guessed in tqdm(settings, desc=f"Prompts, {weights} weights"):
            starts = torch.linspace(len(text) - HELD_OUT, len(text) - length, prompts).long().tolist()
            batch = torch.stack([text[start : start + length] for start in starts])
            results[weights].append(compare(one, batch, tolerance, bool(guessed), repeats))

    output.mkdir(parents=True, exist_ok=True)
    facts = {
        "results": results,
        "config": {name: getattr(trained.config, name) for name in SIZE},
        "training": f"{steps} steps of 8 * 128 bytes of Genesis" if model is None else str(model),
        "prompts": prompts,
        "repeats": repeats,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": str(date.today()),
        "command": "python benchmarks/maglev_prefill.py",
    }
    (output / "maglev-prefill.json").write_text(json.dumps(facts, indent=1) + "\n")
    draw(results, output / "maglev-prefill.png")
    table = Table("weights", "tokens", "tolerance", "from", "sweeps, mean", "most", "time ratio", "deviation")
    for weights, rows in results.items():
        for row in rows:
            table.add_row(
                weights,
                str(row["tokens"]),
                f"{row['tolerance']:g}",
                row["start"],
                f"{row['sweeps_mean']:.1f}",
                str(row["sweeps_max"]),
                f"{row['time_ratio']:.2f}",
                f"{row['largest_deviation']:.1e}",
            )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)

"""How much of a context do Key-Value Means recall? Small models of the paper's backbone learn multi-query associative recall.

    python examples/train_recall.py [--help]

Each sequence states pairs of a key and a value, all the way through, and asks for the values of earlier keys (as in
Arora et al., arXiv 2312.04927, but with pairs and questions mixed). Five models see the same tokens: the window alone,
a state of fixed size, one that grows like the square root of the context, one that saturates in every other layer (the
others slide), and full attention.

Writes `train-recall.json` and `train-recall.png` (to `benchmarks/results/train-recall/` by default). A run that is
finished is not repeated, and one that was interrupted goes on from its last checkpoint.
"""

import hashlib
import json
import shlex
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import date
from itertools import pairwise, product
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from kvm_hf import GPTAlphaConfig, GPTAlphaForCausalLM
from kvm_hf.state_kvm import StateRule, rows_after

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "train-recall"
WORK = Path(tempfile.gettempdir()) / "train-recall"
# Tokens: a filler, the keys, the values.
KEYS, VALUES, FILLER = 128, 32, 0
VOCABULARY = 1 + KEYS + VALUES
# A sequence is a row of slots of two tokens: `key value` for a pair, `key filler` for a question.
SLOTS, STATED = 128, 0.5
LENGTH, BATCH, HELD_OUT, EVALUATIONS = 2 * SLOTS, 32, 256, 12
DISTANCES = [2, 8, 16, 32, 64, 128, LENGTH]  # borders of the bins, in tokens

CHUNK, WINDOW = 8, 16
BACKBONE = dict(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    ffn_expansion=2.0,
    vocab_size=VOCABULARY,
    max_position_embeddings=LENGTH,
    chunk_size=CHUNK,
    num_window_chunks=WINDOW // CHUNK,
)
WINDOW_ALONE, FIXED, SQRT, SATURATING, FULL = MODELS = ("window", "fixed", "sqrt", "saturating-hybrid", "full")
SETTINGS = {
    WINDOW_ALONE: dict(layer_types=["block_sliding_attention"] * 2, num_sink_tokens=0),
    FIXED: dict(state_budget="fixed", state_size=16),
    SQRT: dict(state_budget="power_law", state_growth_factor=4.0, state_growth_exponent=0.5, state_size=16),
    SATURATING: dict(
        layer_types=["sliding_attention", "kvm_attention"],
        sliding_window=WINDOW,
        state_budget="saturation",
        state_saturation=96,
        state_size=1,
    ),
    FULL: dict(layer_types=["full_attention"] * 2),
}
LABELS = {
    WINDOW_ALONE: "block sliding window",
    FIXED: "KVM, fixed state",
    SQRT: "KVM, square root",
    SATURATING: "KVM, saturating, every other layer",
    FULL: "full attention",
}
# Okabe and Ito's, which the colour-blind can tell apart.
COLOURS = {
    WINDOW_ALONE: "#D55E00",
    FIXED: "#CC79A7",
    SQRT: "#0072B2",
    SATURATING: "#009E73",
    FULL: "#000000",
}
TASK = {
    "keys": KEYS,
    "values": VALUES,
    "share_of_pairs": STATED,
    "length": LENGTH,
    "batch": BATCH,
    "held_out_sequences": HELD_OUT,
    "window": WINDOW,
    "distance_bins": [[first, end - 1] for first, end in pairwise(DISTANCES)],
}
console = Console()


class Recall(Dataset):
    """Sequences of pairs and questions. No key is stated twice; how far back a question reaches is drawn evenly on a
    logarithmic scale. A question's label is the value of its key, which is not shown, so that it is no reminder."""

    def __init__(self, count: int, seed: int):
        draw = torch.Generator().manual_seed(seed)
        shape, slots = (count, SLOTS), torch.arange(SLOTS)
        stated = torch.rand(shape, generator=draw) < STATED
        stated[:, 0] = True
        key = torch.rand((count, KEYS), generator=draw).argsort(1)[:, :SLOTS]  # of the pair in a slot, if there is one
        value = torch.randint(VALUES, shape, generator=draw)

        back = (torch.rand(shape, generator=draw) * slots.clamp_min(1).log()).exp().long()  # slots
        latest = torch.where(stated, slots, -1).cummax(1).values  # pair at or before a slot
        asked = latest.gather(1, (slots - back).clamp_min(0))
        asked_key, answer = key.gather(1, asked), value.gather(1, asked)

        first = 1 + torch.where(stated, key, asked_key)
        second = torch.where(stated, 1 + KEYS + value, FILLER)
        self.input_ids = torch.stack([first, second], dim=-1).flatten(1)
        # The model's loss compares what it says at a token with the next label.
        labels = torch.where(stated, -100, 1 + KEYS + answer)
        self.labels = torch.stack([torch.full_like(labels, -100), labels], dim=-1).flatten(1)
        self.distance = (2 * (slots - asked)).repeat_interleave(2, dim=1)  # tokens from a question's key to its pair's

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.input_ids[index], "labels": self.labels[index]}


def make_model(kind: str, seed: int) -> GPTAlphaForCausalLM:
    torch.manual_seed(seed)
    return GPTAlphaForCausalLM(GPTAlphaConfig(**BACKBONE | SETTINGS[kind]))


def count_right(predictions) -> dict[str, float]:
    """Accuracy of the answers; `predictions` are the likeliest tokens."""
    asked = predictions.label_ids[:, 1:] != -100
    right = predictions.predictions[:, :-1][asked] == predictions.label_ids[:, 1:][asked]
    return {"accuracy": right.mean().item()}


@torch.no_grad()
def accuracy_over_distance(model: GPTAlphaForCausalLM, data: Recall) -> list[float]:
    model.eval()
    said = torch.cat([model(ids, use_cache=False).logits[:, :-1].argmax(-1) for ids in data.input_ids.split(BATCH)])
    labels = data.labels[:, 1:]
    asked = labels != -100
    right, distance = (said == labels)[asked], data.distance[:, 1:][asked]
    bins = [(distance >= first) & (distance < end) for first, end in pairwise(DISTANCES)]
    return [right[of_bin].double().mean().item() for of_bin in bins]


def train(kind: str, seed: int, steps: int, learning_rate: float, work: Path) -> dict:
    """One run, or what it found if it is finished already."""
    torch.set_num_threads(1)  # the models are too small for more
    setup = [BACKBONE, TASK, SETTINGS[kind], steps, learning_rate]
    folder = work / f"{kind}-seed{seed}-{hashlib.sha256(json.dumps(setup).encode()).hexdigest()[:8]}"
    result = folder / "result.json"
    if result.exists():
        return json.loads(result.read_text())
    model, held_out = make_model(kind, seed), Recall(HELD_OUT, seed=1000 + seed)
    every = max(1, steps // EVALUATIONS)
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        learning_rate=learning_rate,
        warmup_steps=steps // 10,
        lr_scheduler_type="cosine",
        adam_beta2=0.98,
        seed=seed,
        eval_strategy="steps",
        eval_steps=every,
        save_steps=every,
        save_total_limit=1,
        logging_steps=every,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,  # so that a seed gives the same numbers with and without a GPU
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Recall(steps * BATCH, seed),
        eval_dataset=held_out,
        compute_metrics=count_right,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )
    start = time.monotonic()
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if folder.exists() else None)
    rule = StateRule.from_config(model.config)
    found = {
        "seconds_since_start_or_resumption": round(time.monotonic() - start),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "rows_at_the_end": rows_after(rule, LENGTH) if "kvm_attention" in model.config.layer_types else 0,
        "accuracy": trainer.evaluate()["eval_accuracy"],
        "accuracy_over_distance": accuracy_over_distance(model, held_out),
        "log": trainer.state.log_history,
    }
    unfinished = result.with_suffix(".incomplete")
    unfinished.write_text(json.dumps(found))
    unfinished.replace(result)
    return found


def draw(seeds: dict[str, dict], path: Path) -> None:
    figure, (curves, distances) = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    bins = [f"{first} to {last}" for first, last in TASK["distance_bins"]]
    for (seed, runs), kind in product(seeds.items(), MODELS):
        label = LABELS[kind] if seed == next(iter(seeds)) else None
        look = dict(color=COLOURS[kind], linewidth=1.2, label=label)
        entries = [entry for entry in runs[kind]["log"] if "eval_accuracy" in entry]
        curves.plot(*zip(*((entry["step"], entry["eval_accuracy"]) for entry in entries)), **look)
        distances.plot(bins, runs[kind]["accuracy_over_distance"], marker="o", markersize=3, **look)
    border = DISTANCES.index(WINDOW) - 0.5
    distances.axvline(border, color="0.6", linestyle="--")
    distances.annotate(f"window of {WINDOW}", (border - 0.05, 0.03), rotation=90, ha="right")
    curves.set(xlabel="steps", title="Held-out accuracy, a line per seed")
    distances.set(xlabel="tokens since the pair", title="Accuracy over distance (grey: guessing)")
    for axes in (curves, distances):
        axes.axhline(1 / VALUES, color="0.85", zorder=0)
        axes.set(ylabel="share of right answers", ylim=(0, 1.03))
    figure.legend(*curves.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def print_table(seeds: dict[str, dict]) -> None:
    bins = [f"{first}-{last}" for first, last in TASK["distance_bins"]]
    table = Table("seed", "model", "rows", "right", *bins)
    for seed, runs in seeds.items():
        for kind in MODELS:
            run = runs[kind]
            cells = [f"{share:.0%}" for share in (run["accuracy"], *run["accuracy_over_distance"])]
            table.add_row(seed, LABELS[kind], str(run["rows_at_the_end"]), *cells)
        table.add_section()
    console.print(table)
    console.print(f"Share of right answers, in all and by the tokens since the pair. The window holds {WINDOW}.")


def main(
    seeds: Annotated[list[int] | None, typer.Option("--seed", help="May be given several times. If not: 0, 1.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Of each model.")] = 400,
    learning_rate: Annotated[float, typer.Option(help="Of each model.")] = 3e-3,
    jobs: Annotated[int, typer.Option(min=1, help="Models trained at the same time, each by one thread.")] = 2,
    output: Annotated[Path, typer.Option(help="Folder for the JSON file and the picture.")] = RESULTS,
    work: Annotated[
        Path, typer.Option(help="Folder for checkpoints and finished runs; delete it to start over.")
    ] = WORK,
) -> None:
    """Train five models on recall beyond the window, and compare them."""
    start = time.monotonic()
    for folder in (output, work):  # before long work
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise typer.BadParameter(f"{folder} cannot be made: {error.strerror}.") from error
    if not 0 < learning_rate < 1:
        raise typer.BadParameter(f"--learning-rate {learning_rate}: must be between 0 and 1.")
    found = {str(seed): {} for seed in seeds or [0, 1]}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        runs = {
            pool.submit(train, kind, int(seed), steps, learning_rate, work): (seed, kind)
            for seed, kind in product(found, MODELS)
        }
        with tqdm(total=len(runs), unit="model") as bar:
            for run in as_completed(runs):
                seed, kind = runs[run]
                found[seed][kind] = run.result()
                bar.set_description(f"{kind}, seed {seed}: {found[seed][kind]['accuracy']:.0%} right")
                bar.update()

    facts = {
        "command": shlex.join(["python", "examples/train_recall.py", *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "seconds_since_start_or_resumption": round(time.monotonic() - start),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "task": TASK,
        "backbone": BACKBONE,
        "models": SETTINGS,
        "steps": steps,
        "learning_rate": learning_rate,
        "seeds": found,
    }
    (output / "train-recall.json").write_text(json.dumps(facts, indent=1) + "\n")
    draw(found, output / "train-recall.png")
    print_table(found)
    console.print(f"{output / 'train-recall.json'}\n{output / 'train-recall.png'}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)

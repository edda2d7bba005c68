"""Maglev learns to recall what lies beyond its windows; without a memory the same decoder cannot.

    python examples/train_maglev.py [--help]

Models of one size see the same tokens, a made-up recall task, for the same number of steps: a sliding-window decoder,
the same with full attention in every other layer, and Maglev, whose loss is that of the deployed model, which reads its
own memories. Trained as in the paper, on the prefiller's targets alone, it learns to read memories and not to keep them;
self-feeding sweeps, up to more and more of them, teach it that. Both are shown.

Writes `train-maglev.json` and `train-maglev.png` (to `benchmarks/results/train-maglev/` by default). A run that is
finished is not repeated, and one that was interrupted goes on from its last checkpoint.
"""

import hashlib
import json
import shlex
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from datetime import date
from itertools import pairwise, product
from pathlib import Path
from typing import Annotated

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
import transformers
import typer
from rich.console import Console
from rich.table import Table
from torch.utils.data import Dataset
from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from maglev_hf import GrowingSweeps, MaglevConfig, MaglevForCausalLM, MaglevForPreTraining, MaglevTrainer

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "train-maglev"
WORK = Path(tempfile.gettempdir()) / "train-maglev"
BACKBONE = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    sliding_window=4,
    initializer_range=0.1,  # the usual 0.02 is for wide models; here a memory would fade at once
)
REACH = BACKBONE["num_hidden_layers"] * (BACKBONE["sliding_window"] - 1)  # tokens that the windows can look back

# Tokens: a filler, the values (answers only), `variable = value`, `variable?`.
VARIABLES, VALUES, FILLER = 3, 4, 0
FIRST_STATEMENT = 1 + VALUES
FIRST_QUESTION = FIRST_STATEMENT + VARIABLES * VALUES
VOCABULARY = FIRST_QUESTION + VARIABLES
STATED, ASKED = 0.06, 0.5  # shares of the tokens

LENGTH, BATCH, HELD_OUT, EVALUATIONS = 64, 32, 256, 12
PROBED_SEQUENCES, PROBED_TOKEN = 8, LENGTH // 2
DISTANCES = [1, 4, REACH + 1, 13, 25, LENGTH]  # borders of the bins
TASK = {
    "variables": VARIABLES,
    "values": VALUES,
    "share_of_statements": STATED,
    "share_of_questions": ASKED,
    "length": LENGTH,
    "batch": BATCH,
    "held_out_sequences": HELD_OUT,
    "reach": REACH,
    "distance_bins": [[first, end - 1] for first, end in pairwise(DISTANCES)],
}

SLIDING, INTERLEAVED, TARGETS_ONLY, MAGLEV = MODELS = ("sliding", "interleaved", "maglev-targets-only", "maglev")
TWINS, MAGLEVS = MODELS[:2], MODELS[2:]
LABELS = {
    SLIDING: "sliding window",
    INTERLEAVED: "interleaved with full attention",
    TARGETS_ONLY: "Maglev, no sweeps",
    MAGLEV: "Maglev",
}
# Okabe and Ito's, which the colour-blind can tell apart.
COLOURS = {SLIDING: "#D55E00", INTERLEAVED: "#009E73", TARGETS_ONLY: "#CC79A7", MAGLEV: "#0072B2"}
console = Console()


@dataclass(frozen=True)
class Settings:
    steps: int = 800
    learning_rate: float = 4e-3
    sweeps: int = 12
    consistency_weight: float = 0.1
    share_prefiller: bool = False
    memory_injection: str = "kv"

    def of(self, kind: str) -> "Settings":
        if kind in TWINS:
            return replace(self, sweeps=0, consistency_weight=0.0, share_prefiller=False, memory_injection="none")
        if kind == TARGETS_ONLY:  # as in the paper
            return replace(self, sweeps=0, consistency_weight=0.1 if self.share_prefiller else 1.0)
        return self


class Recall(Dataset):
    """Sequences of statements, questions and fillers. A question's label is the value that its variable was given last;
    the answer is not shown, so that it is no reminder."""

    def __init__(self, count: int, seed: int):
        draw = torch.Generator().manual_seed(seed)
        shape, columns = (count, LENGTH), torch.arange(LENGTH)
        kind = torch.rand(shape, generator=draw)
        variable = torch.randint(VARIABLES, shape, generator=draw)
        value = torch.randint(VALUES, shape, generator=draw)
        stated = kind < STATED
        stated[:, :VARIABLES] = True  # nothing is asked before it is known
        variable[:, :VARIABLES] = columns[:VARIABLES]
        asked = ~stated & (kind > 1 - ASKED)
        statement, question = FIRST_STATEMENT + variable * VALUES + value, FIRST_QUESTION + variable
        self.input_ids = torch.where(stated, statement, torch.where(asked, question, FILLER))

        is_of = variable[..., None] == torch.arange(VARIABLES)  # [B, T, variables]
        when = torch.where(stated[..., None] & is_of, columns[:, None], -1).cummax(1).values  # last stated
        when = when.gather(2, variable[..., None])[..., 0]
        # The model's loss compares what it says at a token with the next label.
        self.labels = torch.full(shape, -100)
        self.labels[:, 1:] = torch.where(asked, 1 + value.gather(1, when), -100)[:, :-1]
        self.distance = columns - when  # from a question to the statement that answers it

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.input_ids[index], "labels": self.labels[index]}


def make_model(kind: str, settings: Settings, seed: int) -> MaglevForCausalLM:
    torch.manual_seed(seed)
    config = MaglevConfig(
        **BACKBONE,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        layer_types=["sliding_attention", "full_attention" if kind == INTERLEAVED else "sliding_attention"],
        memory_injection=settings.memory_injection,
        share_prefiller=settings.share_prefiller,
        consistency_weight=settings.consistency_weight,
        rollout="sequential",  # exact, and on a CPU the faster one for so many short sequences
    )
    return (MaglevForCausalLM if kind in TWINS else MaglevForPreTraining)(config)


def rollouts(model: MaglevForCausalLM) -> dict[str, str]:
    """The ways to measure a model; the twins have one."""
    ways = {"deployed": model.config.rollout}
    return ways | {"teacher_forced": "teacher_forced"} if isinstance(model, MaglevForPreTraining) else ways


@torch.no_grad()
def answer(model, data: Recall, rollout: str) -> tuple[float, torch.Tensor]:
    """The cross-entropy of the answers, and which of them are right `[answers]`."""
    model.eval()
    logits = model(data.input_ids, rollout=rollout, use_cache=False).logits[:, :-1]
    labels, asked = data.labels[:, 1:], data.labels[:, 1:] != -100
    return F.cross_entropy(logits[asked], labels[asked]).item(), logits[asked].argmax(-1) == labels[asked]


class RecallTrainer(MaglevTrainer):
    """Evaluates the deployed and the teacher-forced model; both losses get into the log, and with it into checkpoints."""

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        ways = rollouts(self.model)
        metrics = {f"eval_{way}": answer(self.model, self.eval_dataset, ways[way])[0] for way in ways}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def accuracy_over_distance(data: Recall, right: torch.Tensor) -> list[float]:
    distance = data.distance[:, :-1][data.labels[:, 1:] != -100]
    bins = [(distance >= first) & (distance < end) for first, end in pairwise(DISTANCES)]
    return [right[of_bin].double().mean().item() for of_bin in bins]


def memory_gain(model: MaglevForPreTraining, data: Recall) -> list[float]:
    """Spectral norms of `d memory_t / d fed_s` at `t - s` = 0, 1, ...: how much of a memory a token passes on. Means over
    sequences, each at one token in its middle."""
    gains = []
    for ids in data.input_ids[:PROBED_SEQUENCES, None]:
        with torch.no_grad():
            memory = model.model(ids).last_hidden_state
        fed = F.pad(memory, (0, 0, 1, 0))[:, :-1]
        jacobian = torch.autograd.functional.jacobian(
            lambda fed, ids=ids: model.model(ids, fed=fed, use_cache=False).last_hidden_state[0, PROBED_TOKEN], fed
        )  # [d, 1, T, d]
        lags = jacobian[:, 0, PROBED_TOKEN - REACH : PROBED_TOKEN + 1].flip(1).transpose(0, 1)
        gains.append(torch.linalg.matrix_norm(lags, ord=2))
    return torch.stack(gains).mean(0).tolist()


def train(kind: str, seed: int, settings: Settings, work: Path) -> dict:
    """One run, or what it found if it is finished already."""
    settings = settings.of(kind)
    digest = hashlib.sha256(json.dumps([BACKBONE, TASK, asdict(settings)]).encode()).hexdigest()[:8]
    folder = work / f"{kind}-seed{seed}-{digest}"
    result = folder / "result.json"
    if result.exists():
        return json.loads(result.read_text())
    model, held_out = make_model(kind, settings, seed), Recall(HELD_OUT, seed=1000 + seed)
    every = max(1, settings.steps // EVALUATIONS)
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=settings.steps,
        per_device_train_batch_size=BATCH,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.steps // 10,
        adam_beta2=0.98,
        seed=seed,
        eval_strategy="steps",
        eval_steps=every,
        save_steps=every,
        save_total_limit=1,
        logging_steps=every,
        report_to="none",
        use_cpu=True,  # so that a seed gives the same numbers with and without a GPU
    )
    tokens = Recall(settings.steps * BATCH, seed)
    callbacks = [GrowingSweeps(settings.sweeps)] if kind in MAGLEVS else []
    trainer = RecallTrainer(model, arguments, train_dataset=tokens, eval_dataset=held_out, callbacks=callbacks)
    start = time.monotonic()
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if folder.exists() else None)
    found = {
        "seconds_since_start_or_resumption": round(time.monotonic() - start),
        "parameters": {"deployed": count(model.model), "only_in_training": count(getattr(model, "prefiller", None))},
        "log": trainer.state.log_history,
    }
    for way, rollout in rollouts(model).items():
        loss, right = answer(model, held_out, rollout)
        found[way] = {"loss": loss, "accuracy": accuracy_over_distance(held_out, right)}
    if kind in MAGLEVS:
        found["gap"] = found["deployed"]["loss"] - found["teacher_forced"]["loss"]
        found["memory_gain_per_lag"] = memory_gain(model, held_out)
    unfinished = result.with_suffix(".incomplete")
    unfinished.write_text(json.dumps(found))
    unfinished.replace(result)
    return found


def count(module: torch.nn.Module | None) -> int:
    return 0 if module is None else sum(parameter.numel() for parameter in module.parameters())


def share_closed(runs: dict[str, dict], kind: str) -> float:
    """Of the difference between the twins, by a deployed Maglev."""
    sliding, interleaved, maglev = (runs[name]["deployed"]["loss"] for name in (*TWINS, kind))
    return (sliding - maglev) / (sliding - interleaved)


def draw(seeds: dict[str, dict], path: Path) -> None:
    figure, (curves, distances, gains) = plt.subplots(1, 3, figsize=(14, 4.6), layout="constrained")
    bins = [f"{first} to {last}" for first, last in TASK["distance_bins"]]
    for (seed, runs), kind in product(seeds.items(), MODELS):
        is_first, look = seed == next(iter(seeds)), dict(color=COLOURS[kind], linewidth=1.2)
        for way, style in {"deployed": "-", "teacher_forced": ":"}.items():
            if way in runs[kind]:
                name = LABELS[kind] + (f", {way.replace('_', ' ')}" if kind in MAGLEVS else "")
                look.update(linestyle=style, label=name if is_first else None)
                entries = [entry for entry in runs[kind]["log"] if f"eval_{way}" in entry]
                curves.plot(*zip(*((entry["step"], entry[f"eval_{way}"]) for entry in entries)), **look)
                distances.plot(bins, runs[kind][way]["accuracy"], marker="o", markersize=3, **look)
        if kind in MAGLEVS:
            gains.plot(runs[kind]["memory_gain_per_lag"], marker="o", markersize=3, **look | {"linestyle": "-"})
    curves.set(xlabel="steps", ylabel="cross-entropy of answers (nats)", title="Held-out loss, a line per seed")
    border = DISTANCES.index(REACH + 1) - 0.5
    distances.axvline(border, color="0.6", linestyle="--")
    distances.annotate(f"windows reach {REACH} tokens", (border - 0.05, 0.03), rotation=90, ha="right")
    distances.axhline(1 / VALUES, color="0.85", zorder=0)
    distances.set(xlabel="tokens since the statement", ylabel="share of right answers", ylim=(0, 1.03))
    distances.set_title("Accuracy over distance (grey: guessing)")
    gains.set(xlabel="tokens between, $t - s$", ylabel=r"spectral norm of $\partial$ memory$_t$ / $\partial$ fed$_s$")
    gains.set_title("How much of a memory a token passes on")
    for axes in (curves, gains):
        axes.set_ylim(bottom=0)
    figure.legend(*curves.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def print_table(seeds: dict[str, dict]) -> None:
    table = Table("seed", "model", "deployed", "teacher forced", "gap", "closed", "far answers")
    for seed, runs in seeds.items():
        for kind in MODELS:
            run = runs[kind]
            row = [f"{run['deployed']['loss']:.3f}", "", "", ""]
            if kind in MAGLEVS:
                row[1:] = f"{run['teacher_forced']['loss']:.3f}", f"{run['gap']:.3f}", f"{run['closed']:.0%}"
            table.add_row(seed, LABELS[kind], *row, f"{run['deployed']['accuracy'][-1]:.0%}")
        table.add_section()
    console.print(table)
    console.print(
        f"Losses in nats per answer. `closed`: how much of the twins' difference the deployed model closes. `far answers`: "
        f"right ones {DISTANCES[-2]} or more tokens after the statement; the windows reach {REACH}."
    )


DEFAULTS = Settings()


def main(
    seeds: Annotated[
        list[int] | None, typer.Option("--seed", help="May be given several times. If not: 0, 1, 2.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Of each model.")] = DEFAULTS.steps,
    learning_rate: Annotated[float, typer.Option(help="Of each model.")] = DEFAULTS.learning_rate,
    sweeps: Annotated[int, typer.Option(min=0, help="Most self-feeding sweeps of a step.")] = DEFAULTS.sweeps,
    consistency_weight: Annotated[
        float, typer.Option(min=0, help="Of the distance between memories and targets.")
    ] = DEFAULTS.consistency_weight,
    share_prefiller: Annotated[bool, typer.Option(help="Shared or separate parameters.")] = DEFAULTS.share_prefiller,
    memory_injection: Annotated[str, typer.Option(help="kv, residual or cross_attention.")] = DEFAULTS.memory_injection,
    output: Annotated[Path, typer.Option(help="Folder for the JSON file and the picture.")] = RESULTS,
    work: Annotated[
        Path, typer.Option(help="Folder for checkpoints and finished runs; delete it to start over.")
    ] = WORK,
) -> None:
    """Train Maglev and its twins on recall beyond the windows, and compare them."""
    torch.set_num_threads(1)  # the models are too small for more
    settings = Settings(steps, learning_rate, sweeps, consistency_weight, share_prefiller, memory_injection)
    found = {}
    for seed in seeds or [0, 1, 2]:
        runs = {}
        for kind in MODELS:
            console.print(f"seed {seed}: {LABELS[kind]}")
            runs[kind] = {"settings": asdict(settings.of(kind)), **train(kind, seed, settings, work)}
        for kind in MAGLEVS:
            runs[kind]["closed"] = share_closed(runs, kind)
        found[str(seed)] = runs

    output.mkdir(parents=True, exist_ok=True)
    facts = {
        "command": shlex.join(["python", "examples/train_maglev.py", *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "task": TASK,
        "backbone": BACKBONE,
        "seeds": found,
    }
    (output / "train-maglev.json").write_text(json.dumps(facts, indent=1) + "\n")
    draw(found, output / "train-maglev.png")
    print_table(found)
    console.print(f"{output / 'train-maglev.json'}\n{output / 'train-maglev.png'}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)

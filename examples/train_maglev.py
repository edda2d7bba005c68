"""Maglev learns to recall what lies beyond its windows; without a memory the same decoder cannot.

    python examples/train_maglev.py [--help]

Three models of one size see the same tokens, a made-up recall task, for the same number of steps: a sliding-window
decoder, the same with full attention in every other layer, and Maglev, whose loss is that of the deployed model, which
reads its own memories. Writes `train-maglev.json` and `train-maglev.png` (to `benchmarks/results/train-maglev/` by
default). A run that is finished is not repeated, and one that was interrupted goes on from its last checkpoint.
"""

import hashlib
import json
import shlex
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import date
from itertools import pairwise
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

from maglev_hf import MaglevConfig, MaglevForCausalLM, MaglevForPreTraining, MaglevTrainer

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "train-maglev"
WORK = Path(tempfile.gettempdir()) / "train-maglev"
LAYERS, WINDOW, LENGTH = 2, 4, 64
REACH = LAYERS * (WINDOW - 1)  # tokens; what lies further back is out of the windows' reach

# Tokens: a filler, the values, `variable = value`, `variable?`.
VARIABLES, VALUES, FILLER = 3, 4, 0
FIRST_STATEMENT = 1 + VALUES
FIRST_QUESTION = FIRST_STATEMENT + VARIABLES * VALUES
VOCABULARY = FIRST_QUESTION + VARIABLES
STATED, ASKED = 0.06, 0.5  # shares of the tokens

HELD_OUT, EVALUATIONS, BATCH = 256, 12, 32
PROBED_SEQUENCES, PROBED_TOKEN = 8, LENGTH // 2
DISTANCES = [1, 4, REACH + 1, 13, 25, LENGTH]  # borders of the bins
SLIDING, INTERLEAVED, MAGLEV = MODELS = ("sliding", "interleaved", "maglev")
LABELS = {SLIDING: "sliding window", INTERLEAVED: "interleaved with full attention", MAGLEV: "Maglev"}
COLOURS = {SLIDING: "#D55E00", INTERLEAVED: "#009E73", MAGLEV: "#0072B2"}  # Okabe and Ito
console = Console()


@dataclass(frozen=True)
class Settings:
    steps: int = 600
    learning_rate: float = 4e-3
    hidden_size: int = 64
    self_feeding_sweeps: int = 3
    consistency_weight: float = 0.1
    share_prefiller: bool = False
    memory_injection: str = "kv"


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
    backbone = dict(
        vocab_size=VOCABULARY,
        hidden_size=settings.hidden_size,
        intermediate_size=2 * settings.hidden_size,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
        sliding_window=WINDOW,
        initializer_range=0.1,  # the usual 0.02 is for wide models; here a memory would fade at once
    )
    if kind != MAGLEV:
        types = ["sliding_attention", "full_attention" if kind == INTERLEAVED else "sliding_attention"]
        return MaglevForCausalLM(MaglevConfig(**backbone, layer_types=types, memory_injection="none"))
    config = MaglevConfig(
        **backbone,
        memory_injection=settings.memory_injection,
        share_prefiller=settings.share_prefiller,
        consistency_weight=settings.consistency_weight,
        self_feeding_sweeps=settings.self_feeding_sweeps,
        rollout="sequential",  # exact, and on a CPU the faster one for so many short sequences
    )
    return MaglevForPreTraining(config)


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
    bins = pairwise(DISTANCES)
    return [right[(distance >= first) & (distance < end)].double().mean().item() for first, end in bins]


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


def train(kind: str, seed: int, settings: Settings, folder: Path) -> dict:
    """One run, or what it found if it is finished already."""
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
    trainer = RecallTrainer(model, arguments, train_dataset=tokens, eval_dataset=held_out)
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
    if kind == MAGLEV:
        found["gap"] = found["deployed"]["loss"] - found["teacher_forced"]["loss"]
        found["memory_gain_per_lag"] = memory_gain(model, held_out)
    result.write_text(json.dumps(found))
    return found


def count(module: torch.nn.Module | None) -> int:
    return 0 if module is None else sum(parameter.numel() for parameter in module.parameters())


def folder_of(work: Path, kind: str, seed: int, settings: Settings) -> Path:
    """Where a run is kept. The twins do not depend on what only Maglev has."""
    if kind != MAGLEV:
        settings = Settings(settings.steps, settings.learning_rate, settings.hidden_size)
    digest = hashlib.sha256(json.dumps(asdict(settings)).encode()).hexdigest()[:8]
    return work / f"{kind}-seed{seed}-{digest}"


def share_closed(runs: dict[str, dict]) -> float:
    """Of the difference between the twins, by the deployed Maglev."""
    sliding, interleaved, maglev = (runs[kind]["deployed"]["loss"] for kind in MODELS)
    return (sliding - maglev) / (sliding - interleaved)


def draw(seeds: dict[str, dict], path: Path) -> None:
    figure, (curves, distances, gains) = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    middles = range(len(DISTANCES) - 1)
    for runs in seeds.values():
        label = runs is next(iter(seeds.values()))
        for kind in MODELS:
            for way, style in {"deployed": "-", "teacher_forced": ":"}.items():
                if way not in runs[kind]:
                    continue
                name = LABELS[kind] + (f", {way.replace('_', ' ')}" if kind == MAGLEV else "")
                look = dict(color=COLOURS[kind], linestyle=style, linewidth=1.2, label=name if label else None)
                points = [
                    (entry["step"], entry[f"eval_{way}"]) for entry in runs[kind]["log"] if f"eval_{way}" in entry
                ]
                curves.plot(*zip(*points), **look)
                distances.plot(middles, runs[kind][way]["accuracy"], marker="o", markersize=3, **look)
        gains.plot(runs[MAGLEV]["memory_gain_per_lag"], color=COLOURS[MAGLEV], marker="o", markersize=3, linewidth=1.2)
    curves.set(xlabel="steps", ylabel="cross-entropy of answers (nats)", title="Held-out loss, a line per seed")
    curves.set_ylim(bottom=0)
    curves.legend(frameon=False, fontsize=8)
    distances.axvline(DISTANCES.index(REACH + 1) - 0.5, color="0.6", linestyle="--")
    distances.annotate(
        f"windows reach {REACH} tokens", (DISTANCES.index(REACH + 1) - 0.55, 0.03), rotation=90, ha="right"
    )
    distances.axhline(1 / VALUES, color="0.85", zorder=0)
    ticks = [f"{first} to {end - 1}" for first, end in pairwise(DISTANCES)]
    distances.set_xticks(middles, ticks)
    distances.set(xlabel="tokens since the statement", ylabel="share of right answers", ylim=(0, 1.03))
    distances.set_title("Accuracy over distance (grey: guessing)")
    gains.set(xlabel="tokens between, $t - s$", ylabel=r"spectral norm of $\partial$ memory$_t$ / $\partial$ fed$_s$")
    gains.set_title("How much of a memory a token of Maglev passes on")
    gains.set_ylim(bottom=0)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def print_table(seeds: dict[str, dict]) -> None:
    table = Table(
        "seed", "sliding", "interleaved", "Maglev, deployed", "teacher-forced", "gap", "closed", "far answers"
    )
    for seed, runs in seeds.items():
        losses = [runs[kind]["deployed"]["loss"] for kind in MODELS] + [runs[MAGLEV]["teacher_forced"]["loss"]]
        far = f"{runs[MAGLEV]['deployed']['accuracy'][-1]:.0%}"
        table.add_row(
            seed, *(f"{loss:.3f}" for loss in losses), f"{runs[MAGLEV]['gap']:.3f}", f"{runs['closed']:.0%}", far
        )
    console.print(table)
    console.print(
        f"Losses in nats per answer. `closed`: how much of the twins' difference the deployed Maglev closes. `far answers`: "
        f"right ones of Maglev {DISTANCES[-2]} and more tokens after the statement; the windows reach {REACH}."
    )


DEFAULTS = Settings()


def main(
    seeds: Annotated[
        list[int] | None, typer.Option("--seed", help="May be given several times. [default: 0 1 2]")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Of each model.")] = DEFAULTS.steps,
    learning_rate: Annotated[float, typer.Option(help="Of each model.")] = DEFAULTS.learning_rate,
    hidden_size: Annotated[int, typer.Option(help="Of each model.")] = DEFAULTS.hidden_size,
    sweeps: Annotated[int, typer.Option(min=0, help="Self-feeding sweeps.")] = DEFAULTS.self_feeding_sweeps,
    consistency_weight: Annotated[float, typer.Option(min=0)] = DEFAULTS.consistency_weight,
    share_prefiller: Annotated[bool, typer.Option(help="Shared or separate parameters.")] = DEFAULTS.share_prefiller,
    memory_injection: Annotated[str, typer.Option(help="kv, residual or cross_attention.")] = DEFAULTS.memory_injection,
    output: Annotated[Path, typer.Option(help="Folder for the JSON file and the picture.")] = RESULTS,
    work: Annotated[
        Path, typer.Option(help="Folder for checkpoints and finished runs; delete it to start over.")
    ] = WORK,
) -> None:
    """Train Maglev and its two twins on recall beyond the windows, and compare them."""
    torch.set_num_threads(1)  # the models are too small for more
    settings = Settings(
        steps, learning_rate, hidden_size, sweeps, consistency_weight, share_prefiller, memory_injection
    )
    found = {}
    for seed in seeds or [0, 1, 2]:
        runs = {}
        for kind in MODELS:
            console.print(f"seed {seed}: {LABELS[kind]}")
            runs[kind] = train(kind, seed, settings, folder_of(work, kind, seed, settings))
        found[str(seed)] = runs | {"closed": share_closed(runs)}

    output.mkdir(parents=True, exist_ok=True)
    facts = {
        "command": shlex.join(["python", "examples/train_maglev.py", *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "settings": asdict(settings),
        "task": {
            "variables": VARIABLES,
            "values": VALUES,
            "length": LENGTH,
            "window": WINDOW,
            "layers": LAYERS,
            "reach": REACH,
            "batch": BATCH,
            "held_out_sequences": HELD_OUT,
            "distance_bins": [[first, end - 1] for first, end in pairwise(DISTANCES)],
        },
        "seeds": found,
    }
    (output / "train-maglev.json").write_text(json.dumps(facts, indent=1) + "\n")
    draw(found, output / "train-maglev.png")
    print_table(found)
    console.print(f"{output / 'train-maglev.json'}\n{output / 'train-maglev.png'}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)

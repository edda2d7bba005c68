"""How often a model finds a value that is hidden in a long text, by length and depth, through lm-eval.

    python benchmarks/needles/needles.py MODEL [MODEL ...] --output FOLDER [--length 1024 --length 2048 ...]

writes `needles.json` and a heat map, `needles.png`, after every model. A model is a folder or a name on the Hub. The
variants are the tasks of the YAML files beside this one, which lm-eval runs without this command as well; the score is
then the mean over all lengths and depths:

    lm_eval --model hf --model_args pretrained=MODEL,trust_remote_code=True --include_path benchmarks/needles \\
        --tasks needles --metadata '{"max_seq_lengths": [1024], "depths": [0, 0.5, 1], "samples": 2}'

(`--tasks needle_noise` for one of them.) Prompts are plain text. `--apply_chat_template` works too, but the tokens of a
template come on top of the length.
"""

import json
import platform
import shlex
import statistics
import sys
import time
from datetime import date
from pathlib import Path
from typing import Annotated

import lm_eval
import matplotlib
import torch
import transformers
import typer
from lm_eval.tasks import TaskManager
from needle_documents import check_lengths
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")
import matplotlib.pyplot as plt

TASKS = Path(__file__).parent
VARIANTS = {
    "noise": "a number in noise",
    "text": "a number in Genesis",
    "long": "a UUID in Genesis",
    "keys": "one number of four",
}


def evaluate(model: str, variants: list[str], batch_size: str, where: dict) -> list[dict]:
    """One row per variant, length and depth."""
    arguments = {"pretrained": model, "trust_remote_code": True}
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args=arguments,
        tasks=[f"needle_{variant}" for variant in variants],
        batch_size=batch_size,
        device="cuda" if torch.cuda.is_available() else "cpu",
        task_manager=TaskManager(include_path=TASKS, include_defaults=False, metadata=arguments | where),
        bootstrap_iters=0,
    )
    rows = {}
    for variant in variants:
        for sample in results["samples"][f"needle_{variant}"]:
            document = sample["doc"]
            place = {"variant": variant, "length": document["length"], "depth": document["depth"]}
            row = rows.setdefault(tuple(place.values()), place | {"found": [], "values": [], "answers": []})
            row["found"].append(sample["found"])
            row["values"].append(document["value"])
            row["answers"].append(sample["filtered_resps"][0])
    return list(rows.values())


def draw(results: dict[str, list[dict]], where: dict, variants: list[str], file: Path) -> None:
    """A row of maps per model, a map per variant."""
    lengths, depths = where["max_seq_lengths"], where["depths"]
    figure, axes = plt.subplots(
        len(results),
        len(variants),
        figsize=(
            1.5 + len(variants) * (1.2 + 0.6 * len(lengths)),
            0.9 + len(results) * max(2.4, 1 + 0.35 * len(depths)),
        ),
        layout="constrained",
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    for line, (model, rows) in zip(axes, results.items()):
        for axis, variant in zip(line, variants):
            found = {
                (row["depth"], row["length"]): statistics.mean(row["found"])
                for row in rows
                if row["variant"] == variant
            }
            grid = [[found[depth, length] for length in lengths] for depth in depths]
            image = axis.imshow(grid, vmin=0, vmax=1, cmap="cividis", aspect="auto")
            for y, line_of in enumerate(grid):
                for x, share in enumerate(line_of):
                    color = "black" if share > 0.5 else "white"
                    axis.text(x, y, f"{share:.0%}", ha="center", va="center", fontsize=8, color=color)
            axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
            axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        line[0].set_ylabel(f"{Path(model).name}\ndepth", fontsize=7)
    for axis, variant in zip(axes[0], variants):
        axis.set_title(VARIANTS[variant], fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("tokens")
    figure.colorbar(image, ax=axes, label="found", format="{x:.0%}")
    figure.savefig(file, dpi=150)
    plt.close(figure)


def print_table(results: dict[str, list[dict]], lengths: list[int], variants: list[str]) -> None:
    table = Table("model", "variant", *(f"{length:,} tokens" for length in lengths), title="Found, over all depths")
    for model, rows in results.items():
        for variant in variants:
            shares = []
            for length in lengths:
                found = [row["found"] for row in rows if (row["variant"], row["length"]) == (variant, length)]
                hits = [hit for cell in found for hit in cell]
                shares.append(f"{sum(hits):.0f} of {len(hits)}")
            table.add_row(Path(model).name, VARIANTS[variant], *shares)
    Console().print(table)


def main(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Folders, or names on the Hub.")],
    output: Annotated[Path, typer.Option(help="Folder for the results.")],
    length: Annotated[
        list[int] | None,
        typer.Option(help="Tokens of prompt and answer; may be given again. [default: 1024 2048 4096]"),
    ] = None,
    variant: Annotated[
        list[str] | None, typer.Option(help=f"May be given again. [default: all of {' '.join(VARIANTS)}]")
    ] = None,
    depth: Annotated[
        list[float] | None,
        typer.Option(help="Where it is hidden, from 0 to 1; may be given again. [default: 0 0.25 0.5 0.75 1]"),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Documents per variant, length and depth.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the documents.")] = 0,
    batch_size: Annotated[str, typer.Option(help="Prompts at a time, or `auto`.")] = "1",
) -> None:
    """Runs the needle tasks on each model and draws what was found."""
    variants = variant or list(VARIANTS)
    if unknown := set(variants) - VARIANTS.keys():
        raise typer.BadParameter(f"--variant {', '.join(sorted(unknown))}: there are {', '.join(VARIANTS)}.")
    where = {
        "max_seq_lengths": sorted(set(length or [1024, 2048, 4096])),
        "depths": sorted(set(depth or [0.0, 0.25, 0.5, 0.75, 1.0])),
        "samples": samples,
        "seed": seed,
    }
    for model in models:
        try:
            check_lengths(where["max_seq_lengths"], pretrained=model, trust_remote_code=True)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    output.mkdir(parents=True, exist_ok=True)
    results, seconds = {}, {}
    for number, model in enumerate(models, 1):
        print(f"Model {number} of {len(models)}: {model}")
        start = time.perf_counter()
        results[model] = evaluate(model, variants, batch_size, where)
        seconds[model] = round(time.perf_counter() - start, 1)
        facts = {
            "results": results,
            "seconds": seconds,
            **where,
            "batch_size": batch_size,
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
            "lm_eval": lm_eval.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "date": str(date.today()),
            "command": shlex.join(["python", "benchmarks/needles/needles.py", *sys.argv[1:]]),
        }
        (output / "needles.json").write_text(json.dumps(facts, indent=1) + "\n")
        draw(results, where, variants, output / "needles.png")
    print_table(results, where["max_seq_lengths"], variants)


if __name__ == "__main__":
    typer.run(main)

"""The command `retrofit`."""

import shlex
import sys
from collections.abc import Callable
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tqdm import tqdm

from .errors import RetrofitError
from .execute import convert
from .heal import HealOptions, heal, print_healing
from .heal_recipes import KVMRecipe, MaglevRecipe
from .maglev import MaglevOptions
from .paper import PaperPlan, export_paper, import_paper
from .plan import DEFAULT_GROWTH, DEFAULT_STATE_SIZE, Options, Plan, RetrofitOptions
from .rank import RankOptions, print_ranking, rank_layers
from .verification import VerifyOptions, print_report, verify

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Make KVM and Maglev models from models you have.")
console = Console(stderr=True)
DEFAULTS = RetrofitOptions()
MAGLEV = MaglevOptions()
VERIFY = VerifyOptions()
HEAL = HealOptions()
RANK = RankOptions()

# What the conversions have in common.
Source = Annotated[str, typer.Argument(help="Checkpoint folder, hub id, or GGUF file.")]
Target = Annotated[Path, typer.Argument(help="Folder to write; must not exist, or be empty.")]
Dtype = Annotated[str, typer.Option(help="auto (as the source), float32, bfloat16, float16 or float64.")]
ShardSize = Annotated[float, typer.Option(help="Most gigabytes per weight file.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")]
PushToHub = Annotated[str | None, typer.Option(help="Hub id, owner/name, to upload the result to.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No plan, no progress bar.")]

# What makes a layer a KVM layer.
Budget = Annotated[str, typer.Option(help="Rows of the state: sqrt, fixed or saturation.")]
Growth = Annotated[float | None, typer.Option(help=f"sqrt: rows = growth * sqrt(tokens). Default: {DEFAULT_GROWTH:g}.")]
StateSize = Annotated[int | None, typer.Option(help=f"fixed, saturation: (most) rows. Default: {DEFAULT_STATE_SIZE}.")]
ChunkSize = Annotated[int, typer.Option(help="Tokens per chunk.")]
WindowChunks = Annotated[int, typer.Option(help="Chunks in the window; the window is chunk size times this.")]
Sinks = Annotated[int, typer.Option(help="First tokens that nothing is merged into.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(version("kvm-maglev-hf"))
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Make KVM and Maglev models from models you have."""


@app.command("to-kvm")
def to_kvm(
    source: Source,
    target: Target,
    layers: Annotated[
        str,
        typer.Option(
            help="Layers to convert: all, every:N (0, N, 2N, ...), numbers and ranges like 0,3,8-11, or auto:N (measures "
            "them first, as `rank-layers` does, and keeps the N most sensitive; with --dry-run too)."
        ),
    ] = DEFAULTS.layers,
    budget: Budget = DEFAULTS.budget,
    growth: Growth = DEFAULTS.growth,
    state_size: StateSize = DEFAULTS.state_size,
    chunk_size: ChunkSize = DEFAULTS.chunk_size,
    window_chunks: WindowChunks = DEFAULTS.window_chunks,
    sinks: Sinks = DEFAULTS.sinks,
    dtype: Dtype = DEFAULTS.dtype,
    shard_size: ShardSize = DEFAULTS.shard_size / 1e9,
    dry_run: DryRun = False,
    push_to_hub: PushToHub = None,
    quiet: Quiet = False,
) -> None:
    """Turn a Llama-style checkpoint into a KVM model, without training.

    Families: Llama, Mistral, Qwen2, Qwen3, SmolLM3, Phi-3. An interrupted run leaves TARGET.incomplete; the same command
    goes on from there.
    """
    _convert(
        RetrofitOptions,
        source,
        target,
        shard_size,
        dry_run,
        push_to_hub,
        quiet,
        layers=layers,
        budget=budget,
        growth=growth,
        state_size=state_size,
        chunk_size=chunk_size,
        window_chunks=window_chunks,
        sinks=sinks,
        dtype=dtype,
    )


@app.command("to-maglev")
def to_maglev(
    source: Source,
    target: Target,
    window: Annotated[
        int, typer.Option(help="Tokens that a query of the decoder sees, itself included.")
    ] = MAGLEV.window,
    share_prefiller: Annotated[
        bool,
        typer.Option("--share-prefiller", help="The prefiller uses the decoder's weights, and is no frozen copy."),
    ] = MAGLEV.share_prefiller,
    consistency_weight: Annotated[
        float | None, typer.Option(help="In the loss. Default: 1 for a frozen prefiller, 0.1 for a shared one.")
    ] = MAGLEV.consistency_weight,
    dtype: Dtype = MAGLEV.dtype,
    shard_size: ShardSize = MAGLEV.shard_size / 1e9,
    dry_run: DryRun = False,
    push_to_hub: PushToHub = None,
    quiet: Quiet = False,
) -> None:
    """Turn a Llama-style checkpoint into a Maglev model to train: until then, the source with a sliding window.

    Families: Llama, Mistral, Qwen2, Phi-3, and SmolLM3 if every layer has RoPE. An interrupted run leaves
    TARGET.incomplete; the same command goes on from there.
    """
    _convert(
        MaglevOptions,
        source,
        target,
        shard_size,
        dry_run,
        push_to_hub,
        quiet,
        window=window,
        share_prefiller=share_prefiller,
        consistency_weight=consistency_weight,
        dtype=dtype,
    )


def _convert(
    options: type[Options],
    source: str,
    target: Path,
    shard_size: float,
    dry_run: bool,
    push_to_hub: str | None,
    quiet: bool,
    **choices,
) -> None:
    bar, ranking_bar = None, None

    def on_rank(done: int, total: int, what: str) -> None:
        nonlocal ranking_bar
        if ranking_bar is None:
            ranking_bar = tqdm(total=total, disable=quiet)
        ranking_bar.set_description(f"Ranking, {what}")
        ranking_bar.update(done - ranking_bar.n)

    def on_plan(plan: Plan) -> None:
        nonlocal bar
        if ranking_bar is not None:
            ranking_bar.close()
        if dry_run or not quiet:
            print_plan(plan, Console() if dry_run else console)
        if not dry_run:
            bar = tqdm(total=plan.nbytes, unit="B", unit_scale=True, desc="Writing weights", disable=quiet)

    with _friendly_errors():
        if not 0 < shard_size < float("inf"):
            raise RetrofitError(f"`--shard-size` must be a positive number of gigabytes, got {shard_size}.")
        convert(
            source,
            target,
            options(**choices, shard_size=int(shard_size * 1e9)),
            dry_run=dry_run,
            push_to_hub=push_to_hub,
            command=shlex.join(["retrofit", *sys.argv[1:]]),
            on_plan=on_plan,
            on_bytes=lambda count: bar.update(count),
            on_rank=on_rank,
        )
    if bar is not None:
        bar.close()
    if dry_run and ranking_bar is not None:
        console.print(f"The ranking is kept in {target.resolve()}.ranking.json for the run itself.", soft_wrap=True)
    if not quiet and not dry_run:
        console.print(f"Done: {target}")


@app.command("verify")
def verify_command(
    source: Annotated[str, typer.Argument(help="The checkpoint that was converted.")],
    target: Annotated[str, typer.Argument(help="The KVM model made from it.")],
    text: Annotated[Path | None, typer.Option(help="Long text; default: Genesis, King James Version.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens per piece of text.")] = VERIFY.tokens,
    pieces: Annotated[int, typer.Option(help="Pieces of text to read.")] = VERIFY.pieces,
    needles: Annotated[int, typer.Option(help="Passkeys per length; 0 leaves them out.")] = VERIFY.needles,
    needle_tokens: Annotated[
        list[int] | None, typer.Option(help="Length of a needle prompt; may be given again. Default: 1800 and 3000.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the passkeys.")] = VERIFY.seed,
    dtype: Annotated[str, typer.Option(help="Precision of both models.")] = VERIFY.dtype,
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda, ...")] = VERIFY.device,
    output: Annotated[Path | None, typer.Option(help="Folder for verify.json and verify.png; default: target.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Measure a KVM model against its source: exactness, loss by position, recall, bytes."""
    options = VerifyOptions(tokens, pieces, needles, tuple(needle_tokens or VERIFY.needle_tokens), seed, dtype, device)
    with _friendly_errors(), tqdm(desc="Verifying", disable=quiet) as bar:
        report = verify(source, target, options, text=text, output=output, on_step=follow(bar))
    print_report(report, Console())


@app.command("rank-layers")
def rank_command(
    source: Source,
    layers: Annotated[
        str, typer.Option(help="Layers to try: all, every:N (0, N, 2N, ...), or numbers and ranges like 0,3,8-11.")
    ] = DEFAULTS.layers,
    budget: Budget = DEFAULTS.budget,
    growth: Growth = DEFAULTS.growth,
    state_size: StateSize = DEFAULTS.state_size,
    chunk_size: ChunkSize = DEFAULTS.chunk_size,
    window_chunks: WindowChunks = DEFAULTS.window_chunks,
    sinks: Sinks = DEFAULTS.sinks,
    text: Annotated[Path | None, typer.Option(help="Long text; default: Genesis, King James Version.")] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens per piece of text; default: 3072, or six windows if more, as the model has positions."
        ),
    ] = RANK.tokens,
    pieces: Annotated[int, typer.Option(help="Pieces of text to read.")] = RANK.pieces,
    context: Annotated[int, typer.Option(help="Tokens at which to compare bytes of cache.")] = RANK.context,
    dtype: Annotated[str, typer.Option(help="Precision of the measurement.")] = RANK.dtype,
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda, ...")] = RANK.device,
    output: Annotated[
        Path | None, typer.Option(help="Folder for rank.json and rank.png; default: the source's name and -ranking.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Convert one layer at a time, and report what it costs and saves, to choose `--layers` of to-kvm by.

    Interrupted, the same command goes on where it was.
    """
    with _friendly_errors(), tqdm(desc="Ranking", disable=quiet) as bar:
        retrofit = RetrofitOptions(
            layers=layers,
            budget=budget,
            growth=growth,
            state_size=state_size,
            chunk_size=chunk_size,
            window_chunks=window_chunks,
            sinks=sinks,
        )
        options = RankOptions(tokens, pieces, context, dtype, device)
        report = rank_layers(source, retrofit, options, text=text, output=output, on_step=follow(bar))
    print_ranking(report, Console())


@app.command("heal")
def heal_command(
    target: Annotated[Path, typer.Argument(help="Model that `to-kvm` or `to-maglev` made; stays as it is.")],
    teacher: Annotated[str, typer.Option(help="The checkpoint that it was made from.")],
    text: Annotated[
        list[str],
        typer.Option(
            help="Text to train on: a file (plain, .jsonl or .parquet) or the hub id of a dataset; may be given again."
        ),
    ],
    output: Annotated[Path | None, typer.Option(help="Folder to write. Default: TARGET-healed.")] = None,
    length: Annotated[int, typer.Option(help="Tokens per piece of text; several times the window.")] = HEAL.length,
    transfer_steps: Annotated[
        int | None,
        typer.Option(
            help="Steps in which each layer's attention learns the teacher's output, before the distillation. "
            f"Default: {KVMRecipe.defaults['transfer_steps']}; Maglev models have none."
        ),
    ] = HEAL.transfer_steps,
    steps: Annotated[
        int, typer.Option(help="Steps in which the model learns the teacher's next-token distribution.")
    ] = HEAL.steps,
    batch_size: Annotated[int, typer.Option(help="Pieces of text at once.")] = HEAL.batch_size,
    accumulate: Annotated[int, typer.Option(help="Batches per step, one after the other.")] = HEAL.accumulate,
    train: Annotated[
        str, typer.Option(help="lora (on q, k, v, o of the converted layers, merged at the end) or full.")
    ] = HEAL.train,
    rank: Annotated[int, typer.Option(help="Of LoRA.")] = HEAL.rank,
    transfer_lr: Annotated[
        float, typer.Option(help="Peak learning rate of the attention transfer.")
    ] = HEAL.transfer_lr,
    lr: Annotated[float, typer.Option(help="Peak learning rate of the distillation.")] = HEAL.lr,
    new_lr: Annotated[
        float | None,
        typer.Option(
            help="Peak learning rate of temperatures and gates, in both stages, or of memory projections and gates. Default: "
            f"{KVMRecipe.defaults['new_lr']:g} for KVM models, {MaglevRecipe.defaults['new_lr']:g} for Maglev models."
        ),
    ] = HEAL.new_lr,
    sweeps: Annotated[
        int | None,
        typer.Option(
            help="Maglev models: up to how many passes of a step read the decoder's own memories (drawn anew each step). "
            f"Default: {MaglevRecipe.defaults['sweeps']}."
        ),
    ] = HEAL.sweeps,
    cross_entropy: Annotated[
        float, typer.Option(help="Weight of the cross-entropy beyond the window, beside the distillation.")
    ] = HEAL.cross_entropy,
    held_out: Annotated[
        int, typer.Option(help="Pieces of the text to measure with instead of training on them.")
    ] = HEAL.held_out,
    seed: Annotated[int, typer.Option(help="Of LoRA's first values and the order of the text.")] = HEAL.seed,
    save_every: Annotated[
        int, typer.Option(help="Steps after which a killed run can be continued; Ctrl-C saves by itself.")
    ] = HEAL.save_every,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Less memory, a third more time.")
    ] = HEAL.gradient_checkpointing,
    dtype: Annotated[
        str, typer.Option(help="float32, or bfloat16 for autocast; weights and losses stay in float32.")
    ] = HEAL.dtype,
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda, ...")] = HEAL.device,
    push_to_hub: PushToHub = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Train a KVM or Maglev model for a short while to do what its source does with full attention.

    An interrupted run leaves OUTPUT.incomplete; the same command goes on from there.
    """
    with _friendly_errors(), tqdm(desc="Reading", unit="step", disable=quiet) as bar:
        options = HealOptions(
            length=length,
            transfer_steps=transfer_steps,
            steps=steps,
            batch_size=batch_size,
            accumulate=accumulate,
            train=train,
            rank=rank,
            transfer_lr=transfer_lr,
            lr=lr,
            new_lr=new_lr,
            sweeps=sweeps,
            cross_entropy=cross_entropy,
            held_out=held_out,
            seed=seed,
            save_every=save_every,
            gradient_checkpointing=gradient_checkpointing,
            dtype=dtype,
            device=device,
        )

        report = heal(
            target,
            teacher,
            text,
            output,
            options,
            push_to_hub=push_to_hub,
            command=shlex.join(["retrofit", *sys.argv[1:]]),
            on_step=follow(bar),
        )
    if not quiet:
        print_healing(report, console)


@app.command("import-paper")
def import_paper_command(
    source: Annotated[Path, typer.Argument(help="Checkpoint folder of the authors: config.json and weights.")],
    target: Annotated[Path, typer.Argument(help="Folder to write; must not exist, or be empty.")],
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No notes, no progress bar.")] = False,
) -> None:
    """Turn a checkpoint of the Key-Value Means authors (rwkv7backbone) into a GPTAlpha-2 model, exactly."""
    _rewrite(import_paper, source, target, quiet)


@app.command("export-paper")
def export_paper_command(
    source: Annotated[Path, typer.Argument(help="Folder of a GPTAlpha-2 model.")],
    target: Annotated[Path, typer.Argument(help="Folder to write; must not exist, or be empty.")],
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No notes, no progress bar.")] = False,
) -> None:
    """Turn a GPTAlpha-2 model into a checkpoint that the code of the Key-Value Means authors loads."""
    _rewrite(export_paper, source, target, quiet)


def _rewrite(command: Callable[..., PaperPlan], source: Path, target: Path, quiet: bool) -> None:
    bar = None

    def on_plan(plan: PaperPlan) -> None:
        nonlocal bar
        for note in [] if quiet else plan.notes:
            console.print(f"Note: {escape(note)}", soft_wrap=True, highlight=False)
        bar = tqdm(total=plan.nbytes, unit="B", unit_scale=True, desc="Writing weights", disable=quiet)

    with _friendly_errors():
        command(source, target, on_plan=on_plan, on_bytes=lambda count: bar.update(count))
    bar.close()
    if not quiet:
        console.print(f"Done: {target}")


def print_plan(plan: Plan, out: Console) -> None:
    """What will be written, and what it saves."""
    dtype = str(plan.dtype).removeprefix("torch.")

    def say(line: str) -> None:
        out.print(line, soft_wrap=True)

    say(f"[bold]{escape(plan.source.label)}[/bold] ({plan.source.config.model_type}) becomes a {plan.kind}")
    for line in plan.summary:
        say(line)
    say(f"Weights: {plan.nbytes / 1e9:.3f} GB in {len(plan.shards)} file(s), {dtype}")
    say(f"Kept from the source: {', '.join(path.name for path in plan.source.kept_files) or 'nothing else'}")
    table = Table(f"Cache per sequence, {dtype}", "full attention", "target", "ratio")
    for length, before, after in plan.cache_table:
        table.add_row(length, f"{before / 2**20:.1f} MiB", f"{after / 2**20:.1f} MiB", f"{after / before:.3f}")
    out.print(table)


def follow(bar: tqdm) -> Callable[[int, int, str], None]:
    """What shows on `bar` how far a command is, and with what."""

    def on_step(done: int, total: int, what: str) -> None:
        bar.total = total
        bar.set_description(what)
        bar.update(done - bar.n)

    return on_step


@contextmanager
def _friendly_errors():
    """A RetrofitError as one line and exit status 1; an interruption as a sentence."""
    try:
        yield
    except RetrofitError as error:
        console.print(f"[red]Error:[/red] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        console.print("Interrupted. Run the same command again to go on.")
        raise typer.Exit(130) from error

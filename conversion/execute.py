"""Carrying out a plan: weights streamed into shards, then everything around them, then the folder gets its name."""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from .card import write_card
from .errors import RetrofitError
from .hub import prepare_repo, push
from .maglev import MaglevOptions, MaglevPlan
from .plan import Options, Plan, RetrofitOptions, RetrofitPlan, TargetTensor
from .rank import check_automatic, choose_layers, is_automatic, write_ranking
from .source import SAFETENSORS_DTYPES, Source, open_source
from .tensors import make_tensor
from .verification import check_journal, check_place

PLAN_FILE = "retrofit-plan.sha256"
PLANS = {RetrofitOptions: RetrofitPlan, MaglevOptions: MaglevPlan}
DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


def convert(
    source: str | Path,
    target: str | Path,
    options: Options = RetrofitOptions(),
    *,
    dry_run: bool = False,
    push_to_hub: str | None = None,
    command: str | None = None,
    on_plan: Callable[[Plan], None] = lambda plan: None,
    on_bytes: Callable[[int], None] = lambda count: None,
    on_rank: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Plan:
    """Turns a Llama-style checkpoint into a model folder that loads with `trust_remote_code=True`.

    All work happens in `TARGET.incomplete` beside the target, which takes the target's name when everything is there.
    An interrupted run leaves that folder; the same call again keeps its finished shards.

    Args:
        source: local folder, hub id, or GGUF file.
        target: folder that does not exist yet or is empty.
        options: their class says what to make: `RetrofitOptions` a KVM model, `MaglevOptions` a Maglev model to train.
        push_to_hub: hub id, `owner/name`, to upload the finished folder to.
        command: what the user typed, for the model card.
        on_plan: called with the plan before anything is written.
        on_bytes: called with the number of bytes written, again and again.
        on_rank: called before each measurement that `layers="auto:N"` makes, in a dry run too. The measurements are kept in
            `TARGET.ranking.json` until the target is there.

    Raises:
        RetrofitError: before long work if the source, the options, the target, the disk or the hub login will not do.
    """
    target = Path(target).resolve()
    check_target(target)
    work = target.with_name(target.name + ".incomplete")
    check_work(work)
    command = command or _python_call(source, target, options)
    automatic, measured = is_automatic(options), target.with_name(target.name + ".ranking.json")
    if automatic:
        check_journal(measured, "target")

    def check(config: PreTrainedConfig) -> None:
        if automatic:
            check_automatic(config, options)
        else:
            PLANS[type(options)].target_config(config, options)
        if push_to_hub and not dry_run:
            prepare_repo(push_to_hub)

    try:
        with open_source(source, work, check=check) as opened:
            if automatic:
                options, ranking = choose_layers(opened, options, measured, on_rank)
            plan = make_plan(opened, options)
            on_plan(plan)
            if dry_run:
                return plan
            check_space(work, plan)
            _write_folder(plan, work, command, push_to_hub, on_bytes)
            if automatic:
                write_ranking(ranking, work)
        if target.exists():
            target.rmdir()
        os.rename(work, target)
        (target / PLAN_FILE).unlink()  # only now: until it has its name the folder must be known as ours
        if automatic:
            measured.unlink()
    except OSError as error:
        reason = "The disk is full" if error.errno == errno.ENOSPC else f"Writing failed ({error})"
        raise RetrofitError(
            f"{reason}. What is finished stays in {work}; mend that and run the same command again."
        ) from error
    if push_to_hub:
        push(push_to_hub, target, "Retrofit")
    return plan


def make_plan(source: Source, options: Options) -> Plan:
    """What `convert` would do, as `Plan.make`."""
    return PLANS[type(options)].make(source, options)


def _write_folder(plan: Plan, work: Path, command: str, repo: str | None, on_bytes) -> None:
    fingerprint = plan.fingerprint()
    marker = work / PLAN_FILE
    if work.exists() and marker.read_text() != fingerprint:
        shutil.rmtree(work)  # left by another plan
    if not work.exists():
        # Appears with its marker in it, so that a folder without one is not ours to remove.
        work.parent.mkdir(parents=True, exist_ok=True)
        beginning = Path(tempfile.mkdtemp(dir=work.parent, prefix=f".{work.name}-"))
        beginning.chmod(0o755)  # temporary folders are private
        (beginning / PLAN_FILE).write_text(fingerprint)
        os.rename(beginning, work)

    for name, tensors in plan.shards.items():
        if (work / name).is_file():
            on_bytes(sum(tensor.nbytes for tensor in tensors))  # written by the run that was interrupted
        else:
            write_shard(plan, work / name, tensors, on_bytes)

    keep_files(plan.source.kept_files, plan.source.folder, work)
    write_code_and_config(plan.model_class, plan.config, work)
    write_card(plan, work, command, repo=repo)
    if len(plan.shards) > 1:
        write_index(plan, work)


def keep_files(files: list[Path], folder: Path, work: Path) -> None:
    """Copies files of `folder` to the same places in `work`."""
    for path in files:
        kept = work / path.relative_to(folder)
        kept.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, kept)


def write_shard(plan: Plan, path: Path, tensors: list[TargetTensor], on_bytes) -> None:
    """Streams one safetensors file: its header follows from the plan, so no more than one tensor is in memory."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)

    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors:
            data = make_tensor(plan.source, tensor).contiguous().reshape(-1)
            file.write(memoryview(data.view(torch.uint8).numpy()))
            on_bytes(tensor.nbytes)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def write_index(plan: Plan, work: Path) -> None:
    index = {
        "metadata": {"total_size": plan.nbytes},
        "weight_map": {tensor.name: name for name, shard in plan.shards.items() for tensor in shard},
    }
    path = work / "model.safetensors.index.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(index, indent=2))
    os.replace(partial, path)


def write_code_and_config(model_class: type[PreTrainedModel], config: PreTrainedConfig, work: Path) -> None:
    """The code that the folder carries, and the config that names it."""
    with torch.device("meta"):
        model = model_class(config)
    custom_object_save(model, work, config=config)
    config.auto_map = dict(model_class.AUTO_MAP)
    config.architectures = [model_class.__name__]
    config.save_pretrained(work)


def check_target(target: Path) -> None:
    check_place(target, "target")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RetrofitError(
            f"The target {target} exists and is not an empty folder. Choose another, or remove it first."
        )


def check_work(work: Path) -> None:
    if work.exists() and not (work / PLAN_FILE).is_file():
        raise RetrofitError(
            f"{work}, where the work would be done, exists and is not ours. Move it, or choose another target."
        )


def check_space(work: Path, plan: Plan) -> None:
    parent = work.absolute().parent
    while not parent.exists():
        parent = parent.parent
    done = sum(path.stat().st_size for path in work.glob("*.safetensors"))
    free = shutil.disk_usage(parent).free
    if plan.nbytes - done > free:
        raise RetrofitError(
            f"The target needs {(plan.nbytes - done) / 1e9:.2f} GB and {parent} has {free / 1e9:.2f} GB free."
        )


def _python_call(source, target, options: Options) -> str:
    return f"conversion.convert({str(source)!r}, {str(target)!r}, {options!r})"

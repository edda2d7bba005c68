"""`retrofit heal`: a short training run that wins back what a model lost against the checkpoint it was made from.

The recipe follows RADLADS (arXiv 2505.03005). First each converted layer's attention learns to give, on the teacher's own
hidden states, the teacher's output (`transfer`, for KVM models only); then the model learns the teacher's distribution of
the next token, at lengths well beyond the window (`distill`). The teacher is the source with full attention: a second tree
of modules over the student's own tensors wherever these are frozen, so that together they take the memory of about one
model. What differs between KVM and Maglev models is in `heal_recipes`.
"""

import json
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvm_hf import KVMForCausalLM

from .card import command_of, write_card
from .divergence import POSITIONS, compare, divergence, logits_of
from .divergence import cross_entropy as sum_of_cross_entropy  # `cross_entropy` is an option here
from .errors import RetrofitError
from .execute import check_target, keep_files
from .heal_recipes import DISTILL, TRANSFER, Recipe, read_recipe, recipe_for
from .hub import prepare_repo, push
from .plan import RetrofitPlan, full_config, kvm_layers, target_tensors
from .source import Source, files_around, open_source, read_headers
from .tensors import make_model, make_tensor
from .texts import Pieces, dataset_of, read_pieces
from .verification import HEAL_REPORT, find_device, load_tokenizer, read_config

STATE_FILE, PLOT_FILE = "heal.pt", "heal.png"
# Beginnings of names of files, finished or not, that say something of another model than the one that is written.
OWN_REPORTS = ("heal.", "verify.")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
# Options that change neither the data nor (but for rounding) the losses, so that a run may be continued with others.
FREE_OPTIONS = ("save_every", "gradient_checkpointing", "device")


@dataclass(frozen=True)
class HealOptions:
    """The choices of `heal`; the command line has the same names.

    Attributes:
        length: tokens per piece of text; must exceed the window.
        transfer_steps, steps: optimizer steps of attention transfer and of distillation. The first is 8 if None, and 0 for
            Maglev models, which have no attention transfer.
        batch_size: pieces of text at once.
        accumulate: batches per step, one after the other.
        train: `"lora"` (corrections of low rank to q, k, v and o of the converted layers, merged at the end) or `"full"`
            (in the transfer the attention of the converted layers, then everything; of Maglev models the decoder's layers
            and final norm). A prefiller of its own stays as it is.
        rank: of the corrections.
        transfer_lr, lr: peak learning rates of LoRA or the weights in the two stages.
        new_lr: that of the parameters that the teacher has not, in both; if None 1e-3, and 1e-4 for the memory projections
            and gates of Maglev models.
        sweeps: of Maglev models, up to how many passes of a step read the decoder's own memories; 8 if None. Their number is
            drawn anew for each step, as by `GrowingSweeps`.
        cross_entropy: weight in the distillation's loss of the cross-entropy beyond the window.
        held_out: pieces that are not trained on, to measure before and after.
        seed: of LoRA's initial values and the order of the pieces.
        save_every: steps after which a killed run can be continued.
        gradient_checkpointing: computes each layer twice, in much less memory.
        dtype: `"float32"`, or `"bfloat16"` for autocast to it; weights and losses are float32 in either case.
        device: `"auto"` is a GPU if there is one.

    Raises:
        RetrofitError: by name, for a value that cannot be.
    """

    length: int = 2048
    transfer_steps: int | None = None
    steps: int = 100
    batch_size: int = 1
    accumulate: int = 1
    train: str = "lora"
    rank: int = 16
    transfer_lr: float = 1e-3
    lr: float = 5e-4
    new_lr: float | None = None
    sweeps: int | None = None
    cross_entropy: float = 0.0
    held_out: int = 4
    seed: int = 0
    save_every: int = 10
    gradient_checkpointing: bool = False
    dtype: str = "float32"
    device: str = "auto"

    def __post_init__(self):
        least = {"transfer_steps": 0, "seed": 0, "sweeps": 0}
        for name in (
            "length",
            "transfer_steps",
            "steps",
            "batch_size",
            "accumulate",
            "rank",
            "sweeps",
            "held_out",
            "seed",
            "save_every",
        ):
            value = getattr(self, name)
            if value is not None and value < least.get(name, 1):
                raise RetrofitError(f"{_flag(name)} must be {least.get(name, 1)} or more, got {value}.")
        for name in ("transfer_lr", "lr", "new_lr"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise RetrofitError(f"{_flag(name)} must be a rate between 0 and 1, got {value}.")
        if self.seed >= 2**32:
            raise RetrofitError(f"`--seed` must be below 2**32, got {self.seed}.")
        if not 0 <= self.cross_entropy < math.inf:
            raise RetrofitError(f"`--cross-entropy` must be 0 or more, got {self.cross_entropy}.")
        for name, known in (("train", ("lora", "full")), ("dtype", ("float32", "bfloat16"))):
            if getattr(self, name) not in known:
                raise RetrofitError(f"{_flag(name)} {getattr(self, name)!r} is not known; use {' or '.join(known)}.")


def heal(
    target: str | Path,
    teacher: str | Path,
    texts: list[str | Path],
    output: str | Path | None = None,
    options: HealOptions = HealOptions(),
    *,
    push_to_hub: str | None = None,
    command: str | None = None,
    on_step: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> dict:
    """Trains the model `target` to do what its source `teacher` does; writes a folder like `target`, which stays as it is.

    All work happens in `OUTPUT.incomplete`. An interrupted run leaves that folder; the same call again goes on from there,
    with the losses that it would have had.

    Args:
        target: folder that `retrofit to-kvm` or `retrofit to-maglev` made.
        teacher: the checkpoint that it was made from: local folder, hub id, or GGUF file.
        texts: plain text, jsonl or parquet files, or hub ids of datasets.
        output: folder that does not exist yet or is empty; default: `target` with `-healed` behind its name.
        push_to_hub: hub id, `owner/name`, to upload the finished folder to.
        command: what the user typed, for the model card.
        on_step: called with the steps done, their number, and what is done now with its last loss.

    Returns:
        What `heal.json` in the output holds.

    Raises:
        RetrofitError: before any training if the models do not belong together, or the text or the output will not do.
    """
    target = Path(target).resolve()
    output = Path(output).resolve() if output is not None else target.with_name(target.name + "-healed")
    recipe = read_recipe(target)
    options = recipe.fill(options)
    _check_length(options.length, recipe)
    check_target(output)
    work = output.with_name(output.name + ".incomplete")
    if work.exists() and not (work / STATE_FILE).is_file():
        raise RetrofitError(
            f"{work}, where the work would be done, exists and is not ours. Move it, or choose another output."
        )
    device = find_device(options.device)

    def check(source_config: PreTrainedConfig) -> None:
        _check_teacher(source_config, recipe)
        if push_to_hub:
            prepare_repo(push_to_hub)

    with open_source(teacher, output, check=check) as source:
        steps = options.transfer_steps + options.steps
        enough = steps * options.batch_size * options.accumulate + options.held_out
        tokenizer = load_tokenizer(target, "target")
        pieces = read_pieces(tokenizer, texts, options.length, options.held_out, enough)
        student = recipe.load(target, device)
        teacher_model = make_teacher(source, student, shares=recipe.keeps_them(options.train))
        identity = {
            "target": [str(target), *_files(target.glob("*.safetensors"))],
            "teacher": _files(source.weight_files),
            "text": pieces.fingerprint(),
            **{name: value for name, value in asdict(options).items() if name not in FREE_OPTIONS},
        }
        run = Healing(student, teacher_model, pieces, options)
        run.resume(work, identity)
        _check_space(output, target, run)
        run.train(on_step)
        command = (
            command or f"conversion.heal({str(target)!r}, {str(teacher)!r}, {texts!r}, {str(output)!r}, {options!r})"
        )
        report = _report(run, target, teacher, command)
        _write_folder(run, source, target, work, report, push_to_hub)
    if output.exists():
        output.rmdir()
    os.rename(work, output)
    (output / STATE_FILE).unlink()  # only now: until it has its name the folder must be known as ours
    if push_to_hub:
        push(push_to_hub, output, "Healed")
    return report


class LoRALinear(nn.Module):
    """A frozen linear map and a trained correction of low rank, which is zero at first."""

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        self.base = base
        # Drawn on the CPU, so that a seed means the same everywhere.
        down = torch.empty(rank, base.in_features)
        nn.init.kaiming_uniform_(down, a=math.sqrt(5))
        self.down = nn.Parameter(down.to(base.weight.device))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, device=base.weight.device))

    @property
    def weight(self) -> nn.Parameter:
        """The base's, for code that asks a linear map for its device and dtype."""
        return self.base.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base(hidden) + F.linear(F.linear(hidden, self.down), self.up)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """The sum as one linear map. The base's weight, which a teacher may read, stays as it is."""
        self.base.weight = nn.Parameter(self.base.weight + self.up @ self.down)
        return self.base


def make_teacher(source: Source, student: PreTrainedModel, shares: bool) -> KVMForCausalLM:
    """The source with its own attention, frozen.

    Args:
        shares: whether it may use the student's tensors where they are equal; those must not be trained then.
    """
    config = full_config(source.config)
    config.dtype, config.tie_word_embeddings = torch.float32, student.config.tie_word_embeddings
    recipe, weights = recipe_for(student.config), {}
    own = recipe.tensors_of_teacher(student)
    for tensor in target_tensors(RetrofitPlan, source, config, keeps_dtypes=False):
        weight, held = make_tensor(source, tensor), own[tensor.name].detach()
        if tensor.name == "model.embed_tokens.weight":
            _check_origin(weight, held, recipe)
        weight = weight.to(held.device)
        weights[tensor.name] = held if shares and torch.equal(weight, held) else weight
    return make_model(config, weights)


class Healing:
    """A student, its teacher, and how far the training is.

    Attributes:
        step: of both stages together.
        log: per step its stage, loss and seconds.
        before, after: losses on the held-out pieces.
    """

    def __init__(self, student: PreTrainedModel, teacher: KVMForCausalLM, pieces: Pieces, options: HealOptions):
        self.student, self.teacher, self.pieces = student, teacher, pieces
        self.recipe = recipe_for(student.config)
        self.options = options = self.recipe.fill(options)
        self.step, self.log, self.before, self.after = 0, [], None, None
        self.work, self.identity, self.optimizer, self.kept_optimizer = None, None, None, None
        torch.manual_seed(options.seed)
        student.requires_grad_(False)
        if options.train == "lora":
            for layer in self.recipe.attentions(student):
                for name in PROJECTIONS:
                    setattr(layer, name, LoRALinear(getattr(layer, name), options.rank))
        if options.gradient_checkpointing:
            student.gradient_checkpointing_enable()
        self.trained = self._trained(DISTILL)

    def train(self, on_step: Callable[[int, int, str], None]) -> None:
        """Both stages, from wherever the run is, then the measurement afterwards."""
        options = self.options
        total = options.transfer_steps + options.steps
        if self.before is None:
            on_step(self.step, total, "measuring")
            self.before = self.measure()
            self._check_finite("The loss", self.before["loss"])
            self.save()
        consistent = True  # whether parameters, optimizer and step belong together
        try:
            for stage, first, last in (
                (TRANSFER, 0, options.transfer_steps),
                (DISTILL, options.transfer_steps, total),
            ):
                if self.step >= last:
                    continue
                self._prepare(stage)
                while self.step < last:
                    start = time.monotonic()
                    self._set_rates(_schedule(self.step - first, last - first))
                    self.optimizer.zero_grad()
                    loss = self._accumulate(stage)
                    self._check_finite(f"The loss of step {self.step}", loss)
                    consistent = False
                    nn.utils.clip_grad_norm_(
                        [part for group in self.optimizer.param_groups for part in group["params"]], 1.0
                    )
                    self.optimizer.step()
                    self.step += 1
                    self.log.append({"stage": stage, "loss": loss, "seconds": round(time.monotonic() - start, 3)})
                    consistent = True
                    on_step(self.step, total, f"{stage}, loss {loss:.4f}")
                    if self.step % options.save_every == 0:
                        self.save()
        except KeyboardInterrupt:
            if consistent:
                self.save()
            raise
        self.save()
        on_step(self.step, total, "measuring")
        self.after = self.measure()
        self._check_finite("The loss afterwards", self.after["loss"])

    def _check_finite(self, what: str, loss: float) -> None:
        if math.isfinite(loss):
            return
        if not self.step:
            raise RetrofitError(
                f"{what} is {loss} before anything was trained: weights of the target or the teacher are not numbers, or too "
                "large. Convert the checkpoint anew."
            )
        raise RetrofitError(f"{what} is {loss}. Remove {self.work}, and use smaller learning rates.")

    def _trained(self, stage: str) -> dict[str, nn.Parameter]:
        """The parameters that a stage trains, by name."""
        trained = {}
        for name, parameter in self.student.named_parameters():
            if self.options.train == "full":
                wanted = self.recipe.in_full(name, stage)
            else:
                wanted = self.recipe.is_new(name) or name.endswith((".down", ".up"))
            if wanted:
                trained[name] = parameter
        return trained

    def _prepare(self, stage: str) -> None:
        """An optimizer for the stage; where the run was interrupted within it, as it was then."""
        trained = self._trained(stage)
        self.student.requires_grad_(False).train()
        new, rest = [], []
        for name, parameter in trained.items():
            parameter.requires_grad_(True)
            (new if self.recipe.is_new(name) else rest).append(parameter)
        rate = self.options.transfer_lr if stage == TRANSFER else self.options.lr
        groups = [{"params": new, "peak": self.options.new_lr}, {"params": rest, "peak": rate}]
        optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], betas=(0.9, 0.95), weight_decay=0.0
        )
        if self.kept_optimizer is not None and self.step not in (0, self.options.transfer_steps):
            optimizer.load_state_dict(self.kept_optimizer)
        self.optimizer, self.kept_optimizer = optimizer, None

    def _set_rates(self, share: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * share

    def _accumulate(self, stage: str) -> float:
        """Gradients of one step; its loss."""
        options, loss = self.options, 0.0
        torch.manual_seed(options.seed + self.step)  # of dropout: it too is the same after an interruption
        for part in range(options.accumulate):
            ids = self.pieces.batch(self.step * options.accumulate + part, options.batch_size, options.seed)
            ids = ids.to(self.student.device)
            with self._precision(), self.recipe.step(self.student, self.step, options):
                if stage == TRANSFER:
                    loss += transfer(self.student, self.teacher, ids, 1 / options.accumulate)
                else:
                    loss += distill(self.student, self.teacher, ids, options.cross_entropy, 1 / options.accumulate)
        return loss

    def _precision(self):
        if self.options.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.student.device.type, torch.bfloat16)

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """On the held-out pieces, beyond the window: the divergence from the teacher, and the loss of both; in float32. The
        student is the deployed one: a Maglev decoder reads its own memories, and no prefiller's targets."""
        self.student.eval()
        first = self.recipe.window
        sums, tokens = torch.zeros(3, dtype=torch.float64), 0
        for piece in self.pieces.held_out[:, None]:
            ids = piece.to(self.student.device)
            hidden = [model.model(ids, use_cache=False).last_hidden_state for model in (self.student, self.teacher)]
            sums += compare(self.student, self.teacher, *hidden, ids, first)
            tokens += ids.shape[1] - 1 - first
        return dict(zip(("divergence", "loss", "teacher_loss"), (sums / tokens).tolist()))

    def resume(self, work: Path, identity: dict) -> None:
        """Goes on from what an interrupted run left in `work`, or begins there.

        Raises:
            RetrofitError: it was another run.
        """
        self.work, self.identity = work, json.loads(json.dumps(identity))
        if not work.exists():
            return
        try:
            kept = torch.load(work / STATE_FILE, map_location="cpu", weights_only=True)
            kept["identity"], kept["step"], kept["trained"]
        except Exception as error:  # PyTorch has many for a file that it did not write
            raise RetrofitError(f"{work / STATE_FILE} cannot be read. Remove {work} to start anew.") from error
        differing = [name for name in self.identity if kept["identity"].get(name) != self.identity[name]]
        if differing:
            there = {name: f" ({kept['identity'].get(name)!r} there)" for name in asdict(self.options)}
            listed = ", ".join(name + there.get(name, "") for name in differing)
            raise RetrofitError(
                f"{work} holds step {kept['step']} of a run that differs in: {listed}. Run that command again to finish it, "
                "or remove the folder."
            )
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(kept["trained"][name])
        self.step, self.log, self.before = kept["step"], kept["log"], kept["before"]
        self.kept_optimizer = kept["optimizer"]

    def save(self) -> None:
        """Everything that `resume` needs, in one file, which is replaced as a whole."""
        self.work.mkdir(parents=True, exist_ok=True)
        unfinished = self.work / (STATE_FILE + ".tmp")
        torch.save(
            {
                "identity": self.identity,
                "step": self.step,
                "trained": {name: parameter.detach() for name, parameter in self.trained.items()},
                "optimizer": self.kept_optimizer if self.optimizer is None else self.optimizer.state_dict(),
                "log": self.log,
                "before": self.before,
            },
            unfinished,
        )
        unfinished.replace(self.work / STATE_FILE)

    def merge(self) -> PreTrainedModel:
        """The student as an ordinary model."""
        for layer in self.recipe.attentions(self.student):
            for name in PROJECTIONS:
                projection = getattr(layer, name)
                if isinstance(projection, LoRALinear):
                    setattr(layer, name, projection.merged())
        return self.student.eval()


def transfer(student: KVMForCausalLM, teacher: KVMForCausalLM, ids: torch.Tensor, share: float) -> float:
    """Attention transfer on `[B, T]` ids: the mean squared difference of each converted layer's attention output from the
    teacher's, on the teacher's own hidden states, over the variance of the teacher's in that sequence; the mean over layers.

    Each layer's gradient is taken as soon as the teacher has passed it, so that no more than one layer is in memory.

    Args:
        share: of the loss in the gradients.
    """
    layers, losses = kvm_layers(student.config), []

    def compare(index: int):
        def hook(module, args, kwargs, output):
            wanted = output[0].float()
            with torch.enable_grad():
                found = student.model.layers[index].self_attn(*args, **kwargs)[0].float()
                # The least number: of an attention that gives nothing, nothing is wanted.
                variance = wanted.flatten(1).var(1).clamp_min(torch.finfo(wanted.dtype).tiny)
                loss = ((found - wanted).pow(2).mean((1, 2)) / variance).mean()
                (loss * share / len(layers)).backward()
            losses.append(loss.item())

        return hook

    hooks = [
        teacher.model.layers[index].self_attn.register_forward_hook(compare(index), with_kwargs=True)
        for index in layers
    ]
    try:
        with torch.no_grad():
            teacher.model(ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return share * sum(losses) / len(layers)


def distill(
    student: PreTrainedModel, teacher: KVMForCausalLM, ids: torch.Tensor, cross_entropy: float, share: float
) -> float:
    """Distillation on `[B, T]` ids: the divergence KL(teacher || student) of the next token, the mean over all positions,
    and `cross_entropy` times the mean loss on the text itself beyond the window; of Maglev models also the distance between
    memories and targets, times its weight in their config.

    Logits are made for a few positions at a time, and their gradients with them.

    Args:
        share: of the loss in the gradients.
    """
    batch, length = ids.shape
    recipe = recipe_for(student.config)
    window = recipe.window
    with torch.no_grad():
        wanted = teacher.model(ids, use_cache=False).last_hidden_state
    hidden, others = recipe.read(student, ids)
    leaf, total = hidden.detach().requires_grad_(), sum(term.item() for term in others)
    for start in range(0, length, POSITIONS):
        part = slice(start, start + POSITIONS)
        logits = logits_of(student, leaf[:, part])
        with torch.no_grad():
            wanted_logits = logits_of(teacher, wanted[:, part])
        loss = divergence(logits, wanted_logits) / (batch * length)
        if cross_entropy:
            labels = ids[:, start + 1 : start + POSITIONS + 1]
            skipped = min(max(window - start, 0), labels.shape[1])
            text_loss = sum_of_cross_entropy(logits[:, skipped : labels.shape[1]], labels[:, skipped:])
            loss = loss + cross_entropy * text_loss / (batch * (length - 1 - window))
        (loss * share).backward()
        total += loss.item()
    torch.autograd.backward([hidden, *others], [leaf.grad, *(torch.full_like(term, share) for term in others)])
    return share * total


def _schedule(step: int, steps: int) -> float:
    """Share of the peak learning rate: up over the first tenth of a stage, then down along a cosine to a twentieth."""
    warm = max(1, steps // 10)
    if step < warm:
        return (step + 1) / warm
    return 0.05 + 0.95 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm))) / 2


def _flag(name: str) -> str:
    return f"`--{name.replace('_', '-')}`"


def _name_of(text: str) -> str:
    return text if dataset_of(text) else Path(text).name


def _files(paths) -> list:
    return [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in sorted(paths)]


def _check_length(length: int, recipe: Recipe) -> None:
    window, longest = recipe.window, recipe.config.max_position_embeddings
    advice = f"Use several times the window, such as {4 * window}."
    if length <= window + 1:
        raise RetrofitError(
            f"`--length {length}` does not reach beyond the window of {window} tokens, within which the models are equal. {advice}"
        )
    if length > longest:
        raise RetrofitError(f"`--length {length}` is more than the teacher's {longest} positions; use at most these.")
    if recipe.merges_nothing(length):
        raise RetrofitError(
            f"At `--length {length}` the state has a row for each token, so that the models are equal. {advice} (Or use a target with "
            "fewer rows: `--growth` of `to-kvm`.)"
        )


def _check_teacher(source_config, recipe: Recipe) -> None:
    """Whether the student could have been made from such a model."""
    teacher, config = recipe.made_from(source_config), recipe.config
    for name in recipe.architecture:
        if getattr(teacher, name) != getattr(config, name):
            raise RetrofitError(
                f"The target was not made from this teacher: `{name}` is {getattr(teacher, name)} in the teacher "
                f"({source_config.model_type}) and {getattr(config, name)} in the target. Give the checkpoint that "
                f"`retrofit {recipe.maker}` was run on."
            )


def _check_origin(weight: torch.Tensor, held: torch.Tensor, recipe: Recipe) -> None:
    """Embeddings tell whether two models of one shape have to do with each other; rounding and training move them little."""
    difference = (weight.to(held.device) - held).norm() / weight.norm()
    if difference > 0.1:
        raise RetrofitError(
            f"The target was not made from this teacher: their embeddings differ by {100 * difference:.0f} %. Give the "
            f"checkpoint that `retrofit {recipe.maker}` was run on."
        )


def _check_space(output: Path, target: Path, run: Healing) -> None:
    """Room for the model, and for what is trained with the two moments of its optimizer, old and new."""
    trained = sum(parameter.numel() for parameter in run.trained.values())
    need = sum(path.stat().st_size for path in target.glob("*.safetensors")) + 2 * 3 * 4 * trained
    parent = output.parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if need > free:
        raise RetrofitError(f"The run needs {need / 1e9:.2f} GB and {parent} has {free / 1e9:.2f} GB free.")


def _report(run: Healing, target: Path, teacher: str | Path, command: str) -> dict:
    tokens = Counter()
    for text, count in run.pieces.tokens.items():
        tokens[_name_of(text)] += count
    return {
        "target": target.name,
        "teacher": Path(teacher).name if Path(teacher).exists() else str(teacher),
        "command": command,
        "options": asdict(run.options),
        "window": run.recipe.window,
        "text": {
            "tokens": tokens,
            "datasets": [dataset[0] for text in run.pieces.tokens if (dataset := dataset_of(text))],
            "pieces": len(run.pieces.train),
            "held_out": len(run.pieces.held_out),
        },
        "trained_parameters": sum(parameter.numel() for parameter in run.trained.values()),
        "before": run.before,
        "after": run.after,
        "seconds": round(sum(entry["seconds"] for entry in run.log)),
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "log": run.log,
    }


def _write_folder(run: Healing, source: Source, target: Path, work: Path, report: dict, repo: str | None) -> None:
    model, stored = run.merge(), read_headers(target)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(stored[name].dtype)
    model.save_pretrained(work)  # with the code
    keep_files([path for path in files_around(target) if not path.name.startswith(OWN_REPORTS)], target, work)
    (work / HEAL_REPORT).write_text(json.dumps(report, indent=2) + "\n")
    plot(report, work / PLOT_FILE)
    commands = "\n".join([*command_of(target), report["command"]])
    plan = run.recipe.plan(source, read_config(work))
    write_card(plan, work, commands, healing=_facts(report, run.recipe), repo=repo)


def _facts(report: dict, recipe: Recipe) -> dict:
    """What the card says about the healing."""
    options, before, after = report["options"], report["before"], report["after"]
    pieces = options["batch_size"] * options["accumulate"]
    steps = [
        f"{count} {'step' if count == 1 else 'steps'} of {name}"
        for name, count in ((TRANSFER, options["transfer_steps"]), (DISTILL, options["steps"]))
        if count
    ]
    lora = f"LoRA of rank {options['rank']} on q, k, v and o, merged"
    return {
        "steps": " and ".join(steps),
        "seen": pieces * options["length"] * (options["transfer_steps"] + options["steps"]),
        "length": options["length"],
        "trained": recipe.full_in_words if options["train"] == "full" else f"{lora}, and {recipe.new_in_words}",
        "datasets": report["text"]["datasets"],
        "texts": ", ".join(f"{name} ({count} tokens)" for name, count in report["text"]["tokens"].items()),
        "held_out": f"{report['text']['held_out']} pieces of {options['length']} tokens",
        "cross_entropy": options["cross_entropy"],
        "before": before,
        "after": after,
        **recipe.facts(options),
    }


def print_healing(report: dict, out: Console) -> None:
    """Before and after as a table."""
    before, after = report["before"], report["after"]
    table = Table("On held-out text, beyond the window", "before", "after", "teacher")
    table.add_row("loss", f"{before['loss']:.4f}", f"{after['loss']:.4f}", f"{after['teacher_loss']:.4f}")
    table.add_row("divergence from the teacher", f"{before['divergence']:.4f}", f"{after['divergence']:.4f}", "0")
    out.print(table)


def plot(report: dict, path: Path) -> None:
    """The losses of both stages over their steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    stages = [name for name in (TRANSFER, DISTILL) if any(entry["stage"] == name for entry in report["log"])]
    figure, axes = plt.subplots(1, len(stages), figsize=(6.5 * len(stages), 4.2), layout="constrained", squeeze=False)
    figure.suptitle(f"Healing {report['target']}")
    for axis, stage in zip(axes[0], stages):
        losses = [entry["loss"] for entry in report["log"] if entry["stage"] == stage]
        smooth = [sum(losses[max(0, i - 9) : i + 1]) / min(i + 1, 10) for i in range(len(losses))]
        axis.plot(range(1, len(losses) + 1), losses, color="tab:gray", linewidth=0.8, label="each step, its own text")
        axis.plot(range(1, len(losses) + 1), smooth, color="tab:blue", linewidth=2, label="mean of 10 steps")
        title = stage.capitalize() + (" and consistency" if report["options"]["sweeps"] is not None else "")
        axis.set(title=title, xlabel="step", yscale="log")
    axes[0][0].set_ylabel("loss")
    if DISTILL in stages:
        for name, style in (("before", ":"), ("after", "--")):
            axes[0][-1].axhline(
                report[name]["divergence"],
                color="tab:red",
                linestyle=style,
                label=f"divergence, held out, beyond the window, {name}",
            )
    for axis in axes[0]:
        axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)

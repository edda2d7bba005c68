"""What `retrofit heal` does otherwise for KVM models than for Maglev models: what trains, and how text is read for it."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvm_hf import KVMConfig, KVMForCausalLM
from maglev_hf import GrowingSweeps, MaglevConfig, MaglevForPreTraining

from .errors import RetrofitError, one_line
from .maglev import LLAMA_BLOCK, MaglevOptions, MaglevPlan
from .plan import Plan, RetrofitOptions, RetrofitPlan, full_config, kvm_layers, merges_nothing
from .source import Source
from .verification import read_config

TRANSFER, DISTILL = "attention transfer", "distillation"
# What the configs of a teacher and of anything made from it must agree on.
ARCHITECTURE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
    "use_qk_norm",
)


class Recipe(ABC):
    """How one kind of target is healed.

    Attributes:
        config: of the target.
        maker: the command that makes such targets.
        plan_class, options_class: of that command.
        architecture: what the target's config must share with that of a target made from the teacher.
        defaults: of the options that are None unless they are given.
        new_parameters: what follows `self_attn.` in the names of parameters that the teacher's attention has not.
        new_in_words, full_in_words: those, and what `train="full"` trains, for the model card.
    """

    maker: ClassVar[str]
    plan_class: ClassVar[type[Plan]]
    options_class: ClassVar[type]
    architecture: ClassVar[tuple[str, ...]]
    defaults: ClassVar[Mapping[str, float]]
    new_parameters: ClassVar[tuple[str, ...]]
    new_in_words: ClassVar[str]
    full_in_words: ClassVar[str]

    def __init__(self, config: PreTrainedConfig):
        self.config = config

    @abstractmethod
    def check_target(self, target: Path) -> None:
        """Raises a RetrofitError for a folder that has nothing to heal."""

    def fill(self, options):
        """The options with their defaults for this kind of target.

        Raises:
            RetrofitError: one was given that it does not know.
        """
        return replace(
            options, **{name: value for name, value in self.defaults.items() if getattr(options, name) is None}
        )

    @property
    @abstractmethod
    def window(self) -> int:
        """Tokens within which the target does what the teacher does already."""

    @abstractmethod
    def made_from(self, source_config: PreTrainedConfig) -> PreTrainedConfig:
        """A config to compare the target's with: what `maker` makes of the teacher."""

    def load(self, target: Path, device: torch.device | str) -> PreTrainedModel:
        """In float32.

        Raises:
            RetrofitError: weights are missing or damaged.
        """
        try:
            model, found = self.plan_class.model_class.from_pretrained(
                target, dtype=torch.float32, device_map=device, output_loading_info=True
            )
        except Exception as error:  # transformers has many
            raise RetrofitError(f"The target {target} cannot be loaded: {one_line(error)}. Convert it anew.") from error
        if found["missing_keys"]:
            missing = ", ".join(sorted(found["missing_keys"]))
            raise RetrofitError(f"The target {target} lacks weights: {missing}. Convert it anew.")
        return model

    def plan(self, source: Source, config: PreTrainedConfig) -> Plan:
        """For the model card."""
        return self.plan_class(source, self.options_class(), config, {})

    @abstractmethod
    def tensors_of_teacher(self, student: PreTrainedModel) -> dict[str, torch.Tensor]:
        """By the teacher's names, those of the student that may equal the teacher's."""

    @abstractmethod
    def keeps_them(self, train: str) -> bool:
        """Whether these are never trained, so that a teacher can use them."""

    @abstractmethod
    def attentions(self, student: PreTrainedModel) -> list[nn.Module]:
        """Those whose q, k, v and o get corrections of low rank."""

    @abstractmethod
    def in_full(self, name: str, stage: str) -> bool:
        """Whether `train="full"` trains the parameter in a stage."""

    def is_new(self, name: str) -> bool:
        return any(f".self_attn.{part}" in name for part in self.new_parameters)

    def merges_nothing(self, length: int) -> bool:
        """Whether, beyond the window too, the target does what the teacher does already."""
        return False

    def step(self, student: PreTrainedModel, step: int, options):
        """A context for the gradients of one step."""
        return nullcontext()

    @abstractmethod
    def read(self, student: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """For distillation: what the head reads `[B, T, d]`, and further terms of the loss, means over tokens."""

    def facts(self, options: dict) -> dict:
        """What the model card says of this kind's loss and no other's."""
        return {}


class KVMRecipe(Recipe):
    """Attention transfer, then distillation."""

    config: KVMConfig

    maker = "to-kvm"
    plan_class, options_class = RetrofitPlan, RetrofitOptions
    architecture = (*ARCHITECTURE, "no_rope_layers")
    defaults = {"transfer_steps": 8, "new_lr": 1e-3}
    new_parameters = ("state_temperature", "window_temperature", "merge_gate.", "state_norm.")
    new_in_words = "the parameters that only KVM layers have"
    full_in_words = "all weights"

    def check_target(self, target: Path) -> None:
        if not kvm_layers(self.config):
            raise RetrofitError(f"{target} has no `kvm_attention` layer, so there is nothing to heal.")

    def fill(self, options):
        if options.sweeps is not None:
            raise RetrofitError(
                f"`--sweeps {options.sweeps}` is for Maglev models, which read their own memories. Leave it out."
            )
        return super().fill(options)

    @property
    def window(self) -> int:
        return self.config.window_size

    def merges_nothing(self, length: int) -> bool:
        return merges_nothing(self.config, length)

    def made_from(self, source_config: PreTrainedConfig) -> KVMConfig:
        return full_config(source_config)

    def tensors_of_teacher(self, student: KVMForCausalLM) -> dict[str, torch.Tensor]:
        return dict(student.named_parameters())

    def keeps_them(self, train: str) -> bool:
        return train == "lora"

    def attentions(self, student: KVMForCausalLM) -> list[nn.Module]:
        return [student.model.layers[index].self_attn for index in kvm_layers(self.config)]

    def in_full(self, name: str, stage: str) -> bool:
        converted = tuple(f"model.layers.{index}.self_attn." for index in kvm_layers(self.config))
        return stage == DISTILL or name.startswith(converted)

    def read(self, student: KVMForCausalLM, ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return student.model(ids, use_cache=False).last_hidden_state, []


class MaglevRecipe(Recipe):
    """Distillation of the decoder as `MaglevTrainer` trains it: it reads the prefiller's targets, then what it made of
    them itself, as often as is drawn for the step, and the distance between memories and targets is part of the loss.

    No layer has its attention transferred: what lies beyond its window reaches it through the memory of the token before,
    so that what its attention gives is not what the teacher's gives, even where the model does what the teacher does.
    """

    config: MaglevConfig

    maker = "to-maglev"
    plan_class, options_class = MaglevPlan, MaglevOptions
    architecture = (*ARCHITECTURE, *LLAMA_BLOCK, "memory_injection", "prefiller_layer_types")
    # Memory projections are whole matrices; at 1e-3 SmolLM2-135M was lost within a few steps.
    defaults = {"transfer_steps": 0, "new_lr": 1e-4, "sweeps": 8}
    new_parameters = ("memory.",)
    new_in_words = "the memory's projections and gates"
    full_in_words = "the decoder but for embeddings and head"

    def check_target(self, target: Path) -> None:
        if MaglevForPreTraining.__name__ not in (self.config.architectures or []):
            raise RetrofitError(
                f"{target} has no prefiller to train with: heal what `retrofit to-maglev` made, and export the decoder then."
            )

    def fill(self, options):
        if options.transfer_steps:
            raise RetrofitError(
                f"`--transfer-steps {options.transfer_steps}` is for KVM models: no layer of a Maglev decoder is to give "
                "its teacher's attention output, since it has a memory for what lies beyond its window. Leave it out."
            )
        return super().fill(options)

    @property
    def window(self) -> int:
        return self.config.sliding_window

    def made_from(self, source_config: PreTrainedConfig) -> MaglevConfig:
        options = MaglevOptions(window=self.config.sliding_window, share_prefiller=self.config.share_prefiller)
        return MaglevPlan.target_config(source_config, options)

    def tensors_of_teacher(self, student: MaglevForPreTraining) -> dict[str, torch.Tensor]:
        """A prefiller of its own is the teacher but for the embeddings and the head."""
        tensors = dict(student.named_parameters())
        return tensors | {
            MaglevPlan.llama_name(name): tensor for name, tensor in tensors.items() if name.startswith("prefiller.")
        }

    def keeps_them(self, train: str) -> bool:
        return train == "lora" or not self.config.share_prefiller

    def attentions(self, student: MaglevForPreTraining) -> list[nn.Module]:
        return [layer.self_attn for layer in student.model.layers]

    def in_full(self, name: str, stage: str) -> bool:
        """The embeddings are the prefiller's too, and the head reads its targets: with them these would move."""
        return name.startswith(("model.layers.", "model.norm."))

    @contextmanager
    def step(self, student: MaglevForPreTraining, step: int, options) -> Iterator[None]:
        """Draws the step's number of sweeps; what is saved has its own."""
        before = student.config.self_feeding_sweeps
        student.config.self_feeding_sweeps = GrowingSweeps(options.sweeps).draw(step, options.steps, options.seed)
        try:
            yield
        finally:
            student.config.self_feeding_sweeps = before

    def read(self, student: MaglevForPreTraining, ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        made = student.model(ids, use_cache=False, rollout="teacher_forced", prefiller=student.prefiller)
        distance, _ = student.compute_consistency(made, attention_mask=None)
        return made.last_hidden_state, [self.config.consistency_weight * distance]

    def facts(self, options: dict) -> dict:
        return {"consistency_weight": f"{self.config.consistency_weight:g}", "sweeps": options["sweeps"]}


RECIPES = {"kvm": KVMRecipe, "maglev": MaglevRecipe}


def recipe_for(config: PreTrainedConfig) -> Recipe:
    return RECIPES[config.model_type](config)


def read_recipe(target: Path) -> Recipe:
    """Raises a RetrofitError for a folder that cannot be healed."""
    config = read_config(target)
    if config.model_type not in RECIPES:
        raise RetrofitError(
            f"{target} is a {config.model_type} model; `heal` takes what `retrofit to-kvm` made, or `retrofit to-maglev`."
        )
    recipe = recipe_for(config)
    recipe.check_target(target)
    return recipe

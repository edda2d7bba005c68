"""Adapters of PEFT that also train, and save, parameters of the model itself: gates, temperatures, norms.

PEFT's `modules_to_save` takes modules only and passes over other names without a word. Importing this module also tells PEFT
which modules LoRA adapts where a config names none. Depends on `modeling_kvm` and on peft (tested with 0.21); an adapter
that was saved needs neither this module nor our package to be loaded.
"""

import contextlib
import functools
import re
import warnings
from pathlib import Path

import peft
import torch
from peft.utils import constants
from safetensors.torch import load_file, save_file

from .modeling_kvm import PEFT_PARAMETERS, PEFT_TARGETS
from .parallel_kvm import tp_size_of

for name, mapping in vars(constants).items():
    if (
        re.fullmatch(r"TRANSFORMERS_MODELS_TO_\w+_TARGET_MODULES_MAPPING", name)
        and "IA3" not in name
        and "LN" not in name
    ):
        mapping.update(PEFT_TARGETS)


def get_peft_model(model, peft_config: peft.PeftConfig, parameters: list[str] | None = None, **kwargs):
    """`peft.get_peft_model`, and some parameters of the model itself are trained and saved with the adapter.

    Such a parameter belongs to the model, not to the adapter: there can be one adapter at a time. With the adapter disabled
    or unloaded, it has the value that it had before.

    Args:
        parameters: names of parameters, or ends of them from a dot on, such as `["state_temperature"]`. Default: those that
            a retrofit adds (`PEFT_PARAMETERS`), as far as the model has them and `modules_to_save` does not name them.
        kwargs: of `peft.get_peft_model`.

    Raises:
        ValueError: a name that the model does not have, or that PEFT would pass over; a method that learns a prompt; embeddings
            that would be adapted apart from the head they are tied to; a model that is cut between processes.
    """
    if tp_size_of(model.config) > 1:
        raise ValueError(
            "The model is cut between processes (tensor parallelism), and PEFT's layers know only of whole projections. Load it "
            "whole, or with `DistributedConfig(fsdp_size=...)`."
        )
    if peft_config.is_prompt_learning:
        raise ValueError(
            f"{type(peft_config).__name__} learns a prompt and leaves the model's parameters as they are, so there is nothing "
            "for this function to do. Use `peft.get_peft_model`; of methods that write to the cache (prefix tuning) there is "
            "none for this model."
        )
    of_model = dict(model.named_parameters(remove_duplicate=False))
    _check_modules_to_save(model, peft_config, of_model)
    chosen = PEFT_PARAMETERS if parameters is None else parameters
    found = {end: [name for name in of_model if f".{name}".endswith(f".{end}")] for end in chosen}
    unknown = [end for end in chosen if not found[end]]
    if unknown and parameters is not None:
        raise ValueError(f"`parameters` names {unknown}, but the model has no parameters whose names end so.")

    if kwargs.get("mixed"):
        raise ValueError("`mixed=True` takes several adapters, but the model's own parameters can follow only one.")
    wrapped = peft.get_peft_model(model, peft_config, **kwargs)
    _check_tied(model, peft_config)
    left, taken = set(dict(model.named_parameters())), [name for names in found.values() for name in names]
    elsewhere = [name for name in taken if name not in left]
    if elsewhere and parameters is not None:
        raise ValueError(f"`parameters` names {elsewhere}, which PEFT adapts or saves already.")
    wrapped.__class__ = _adapter_class(type(wrapped))
    wrapped._train([name for name in taken if name in left])
    return wrapped


def _check_modules_to_save(model, peft_config, of_model) -> None:
    modules = [name for name, _ in model.named_modules()]
    for end in getattr(peft_config, "modules_to_save", None) or ():
        if not any(f".{name}".endswith(f".{end}") for name in modules):
            hint = (
                "it is a parameter: name it in `parameters`"
                if any(n.endswith(end) for n in of_model)
                else "there is none"
            )
            raise ValueError(f"`modules_to_save` names {end!r}, which no module of the model is called ({hint}).")


def _check_tied(model, peft_config) -> None:
    """Of tied embeddings and head, merging an adapter of one would change the other."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    adapted = [hasattr(module, "base_layer") for module in ends]
    together = all(adapted) and getattr(peft_config, "ensure_weight_tying", False)
    if getattr(model.config, "tie_word_embeddings", False) and any(adapted) and not together:
        raise ValueError(
            "The model's embeddings are tied to its head: adapted apart, they could not be merged. Set "
            "`ensure_weight_tying=True` in the config and name 'embed_tokens' in a list of `target_modules` (of a pattern PEFT "
            "may miss the head), or leave both out."
        )


class _WithParameters:
    """What `get_peft_model` adds to PEFT's own class of models."""

    def _train(self, names: list[str]) -> None:
        self.own_parameters = names
        owned = self._owned()
        self._before = {name: parameter.detach().clone() for name, parameter in owned.items()}
        for parameter in owned.values():
            parameter.requires_grad_(True)
        coarse = sorted({str(p.dtype) for p in owned.values() if p.dtype in (torch.bfloat16, torch.float16)})
        if coarse:
            warnings.warn(
                f"Gates, temperatures and norms are {coarse[0]}: values near 1 do not move at small learning rates. Load the "
                "model in float32 and train it under autocast (`bf16=True`).",
                stacklevel=3,
            )
        self._check_saved(self._adapter_tensors() | self._own_tensors())

    def _owned(self) -> dict[str, torch.nn.Parameter]:
        of_model = dict(self.get_base_model().named_parameters())
        return {name: of_model[name] for name in self.own_parameters}

    def _own_tensors(self, state_dict=None) -> dict[str, torch.Tensor]:
        """As PEFT names them in an adapter's file, where it reads them like anything of the model's own."""
        prefix = "base_model.model."
        if state_dict is None:
            return {prefix + name: parameter.detach() for name, parameter in self._owned().items()}
        return {prefix + name: state_dict[prefix + name] for name in self.own_parameters}

    def _adapter_tensors(self) -> dict[str, torch.Tensor]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return peft.get_peft_model_state_dict(self)

    def _check_saved(self, tensors: dict[str, torch.Tensor]) -> None:
        held = {tensor.data_ptr() for tensor in tensors.values()}
        lost = [
            name for name, p in self.named_parameters() if p.requires_grad and p.numel() and p.data_ptr() not in held
        ]
        if lost:
            raise ValueError(
                f"These parameters are trained, but an adapter would not save them: {lost}. Freeze them, or name them in "
                "`parameters`."
            )

    def save_pretrained(self, save_directory, safe_serialization=True, is_main_process=True, **kwargs):
        """As PEFT's, with the model's own parameters that were trained in the adapter's file."""
        if not safe_serialization:
            raise ValueError("`safe_serialization=False` is not available here: adapters are saved as safetensors.")
        if kwargs.get("state_dict") is None:
            self._check_saved(self._adapter_tensors() | self._own_tensors())
        super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        if is_main_process:
            adapter = next(iter(self.peft_config))
            file = Path(save_directory, "" if adapter == "default" else adapter, "adapter_model.safetensors")
            own = {name: tensor.contiguous() for name, tensor in self._own_tensors(kwargs.get("state_dict")).items()}
            save_file(load_file(file) | own, file, metadata={"format": "pt"})

    @contextlib.contextmanager
    def disable_adapter(self):
        with super().disable_adapter():
            trained = {name: parameter.detach().clone() for name, parameter in self._owned().items()}
            self._set(self._before)
            try:
                yield
            finally:
                self._set(trained)

    def unload(self):
        self._set(self._before)
        return self.base_model.unload()

    def merge_and_unload(self, *args, **kwargs):
        """As PEFT's, which would add the adapter of tied embeddings twice to their one weight."""
        if not self._adapts_tied_weight():
            return self.base_model.merge_and_unload(*args, **kwargs)
        head = self.get_base_model().get_output_embeddings().get_base_layer()
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        with warnings.catch_warnings():  # of weights that are apart
            warnings.simplefilter("ignore", UserWarning)
            merged = self.base_model.merge_and_unload(*args, **kwargs)
        merged.config.tie_word_embeddings = True
        merged.tie_weights()
        return merged

    def merge_adapter(self, *args, **kwargs):
        if self._adapts_tied_weight():
            raise ValueError("The adapter of tied embeddings cannot be merged in place. Use `merge_and_unload()`.")
        return self.base_model.merge_adapter(*args, **kwargs)

    def _adapts_tied_weight(self) -> bool:
        ends = (self.get_base_model().get_input_embeddings(), self.get_base_model().get_output_embeddings())
        return all(hasattr(module, "base_layer") for module in ends) and ends[0].weight is ends[1].weight

    def add_adapter(self, adapter_name, *args, **kwargs):
        self._refuse_second(adapter_name)
        return super().add_adapter(adapter_name, *args, **kwargs)

    def load_adapter(self, model_id, adapter_name, *args, **kwargs):
        self._refuse_second(adapter_name)
        return super().load_adapter(model_id, adapter_name, *args, **kwargs)

    def _refuse_second(self, adapter_name) -> None:
        if adapter_name not in self.peft_config:
            raise ValueError(
                f"This adapter trains parameters of the model itself ({len(self.own_parameters)} of them), which cannot be those "
                f"of a second adapter ({adapter_name!r}) too. Give each adapter a model of its own."
            )

    @torch.no_grad()
    def _set(self, values: dict[str, torch.Tensor]) -> None:
        for name, parameter in self._owned().items():
            parameter.copy_(values[name])


@functools.cache
def _adapter_class(of_peft: type) -> type:
    return type(of_peft.__name__, (_WithParameters, of_peft), {"__module__": __name__})

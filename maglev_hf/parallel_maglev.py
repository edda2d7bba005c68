"""Models that several processes share, each with some heads of every layer (tensor parallelism): what transformers' plans leave
to the model. Depends on PyTorch only.

Queries, keys, values and what else there is per head are cut by `config.base_model_tp_plan`. Parameters that all heads share
are whole everywhere, and each process finds the gradient of its own heads alone, so gradients have to be added up. (The style
that transformers has for it, `replicated_with_grad_allreduce`, counts twice where gradients accumulate.)
"""

import re
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.func import functional_call


def tp_size_of(config) -> int:
    """Among how many processes the heads of a model are cut."""
    return getattr(getattr(config, "distributed_config", None), "tp_size", None) or 1


def rules_for(model: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """Of a plan for every model of a kind the rules for what this one has; transformers warns of others."""
    parts = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    names = {re.sub(r"\.\d+\.", ".*.", name) for name in parts}
    return {rule: style for rule, style in plan.items() if rule in names}


def check_heads(model: nn.Module, distributed_config) -> None:
    """Raises a ValueError if the model's heads cannot be shared out evenly."""
    size, heads = getattr(distributed_config, "tp_size", None) or 1, model.config.num_key_value_heads
    if heads % size:
        raise ValueError(
            f"`tp_size` {size} does not divide the {heads} key/value heads, between which tensor parallelism cuts a layer. Use "
            f"one that does, or `DistributedConfig(fsdp_size={size})`."
        )


def of_this_process(parameter: torch.Tensor, projection: nn.Module) -> torch.Tensor:
    """A parameter as a process takes it: its part of one that is cut; of one that all heads share the whole, whose gradients from
    all processes are added up. Whether the layer is cut is told by one of its projections."""
    if hasattr(parameter, "device_mesh"):
        return parameter.to_local()
    mesh = _mesh_of(projection)
    if mesh is None:
        return parameter
    from torch.distributed.tensor import DTensor, Partial, Replicate  # not every build of PyTorch has it

    whole = DTensor.from_local(parameter, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


def parameters_of_this_process(module: nn.Module, projection: nn.Module) -> dict[str, torch.Tensor]:
    """As `of_this_process`, of each of the module's parameters."""
    return {name: of_this_process(parameter, projection) for name, parameter in module.named_parameters()}


def shared_by_heads(module: nn.Module, projection: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """A module that all heads share, as a process takes it."""
    if _mesh_of(projection) is None:
        return module
    return partial(functional_call, module, parameters_of_this_process(module, projection))


def _mesh_of(projection: nn.Module):
    # Quantised projections may have no `weight`.
    return getattr(getattr(projection, "weight", None), "device_mesh", None)

"""A part of a forward pass that is computed twice: now without a graph, and with one when the backward pass gets there.

`torch.utils.checkpoint` has the first run do all that the second does. Here it may work in place. Depends on PyTorch only.
"""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch.utils.checkpoint import get_device_states, set_device_states


def replayed(function: Callable[..., torch.Tensor], *given: torch.Tensor | None, draws: bool) -> torch.Tensor:
    """`function(*given)`, of which nothing but `given` is kept for the backward pass.

    Args:
        function: must depend on nothing else that wants a gradient.
        draws: whether it draws random numbers; the second run then draws those of the first.
    """
    return _Replayed.apply(function, draws, *given)


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, draws, *given):
        kind = given[0].device.type
        ctx.function, ctx.draws, ctx.kind = function, draws, kind
        if draws:
            ctx.state, (ctx.devices, ctx.states) = torch.get_rng_state(), get_device_states(given[0])
        ctx.autocast = None
        if torch.amp.is_autocast_available(kind):
            ctx.autocast = dict(enabled=torch.is_autocast_enabled(kind), dtype=torch.get_autocast_dtype(kind))
        ctx.save_for_backward(*given)
        return function(*given)

    @staticmethod
    def backward(ctx, gradient):
        differentiable, forked = torch.is_grad_enabled(), ctx.devices if ctx.draws else []
        with torch.enable_grad(), torch.random.fork_rng(forked, enabled=ctx.draws, device_type=ctx.kind):
            if ctx.draws:
                torch.set_rng_state(ctx.state)
                set_device_states(ctx.devices, ctx.states, device_type=ctx.kind)
            # Views, so that gradients end there: what is given may depend on something else that is given.
            given = [part if part is None else part.view_as(part) for part in ctx.saved_tensors]
            with torch.autocast(ctx.kind, **ctx.autocast) if ctx.autocast else nullcontext():
                output = ctx.function(*given)
        wanted = ctx.needs_input_grad[2:]
        inputs = [part for part, is_wanted in zip(given, wanted) if is_wanted]
        found = iter(torch.autograd.grad(output, inputs, gradient, create_graph=differentiable, allow_unused=True))
        return None, None, *(next(found) if is_wanted else None for is_wanted in wanted)

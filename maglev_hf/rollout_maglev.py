"""How the memories of many tokens are found when each of them is fed what was made at the token before.

`run(columns, fed)` runs the decoder on a slice of the call's columns, `fed` `[B, n, d]` being what each of them reads,
and returns what it made, without keeping anything in the cache until it is told to. Specification, section 2. Depends on
PyTorch alone.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

# Tokens whose memories are searched for at once. Longer blocks need more sweeps, shorter ones fill a GPU less.
BLOCK = 256
# After so many sweeps over a block without convergence, one token after the other is cheaper than going on.
MAX_SWEEPS = 64


class Made(Protocol):
    """What the decoder made of a few columns."""

    memory: torch.Tensor  # [B, n, d], zero at pads

    def keep(self) -> None:
        """Puts the columns into the cache: the next call of `run` begins after them."""


Run = Callable[[slice, torch.Tensor], Made]


class Rollout(NamedTuple):
    """What a rollout did."""

    parts: list[Made]  # in the order of the columns
    sweeps: list[int]  # parallel passes per block; 1 per column where there was no parallel search


def root_mean_square(memory: torch.Tensor) -> torch.Tensor:
    """`[B, n, d]` to `[B, n]`."""
    return memory.float().pow(2).mean(-1).sqrt()


def sequential(run: Run, memory: torch.Tensor, columns: slice) -> Rollout:
    """One token after the other, `memory` `[B, 1, d]` being what the first of them reads."""
    parts = []
    for column in range(columns.start, columns.stop):
        made = run(slice(column, column + 1), memory)
        made.keep()
        memory = made.memory
        parts.append(made)
    return Rollout(parts, [1] * len(parts))


def fixed_point(
    run: Run, memory: torch.Tensor, columns: slice, guess: torch.Tensor | None, tolerance: float
) -> Rollout:
    """Sweeps over blocks of columns until what they are fed is what they make.

    After `s` sweeps the first `s` memories of a block are exact, whatever it was fed at first. Where not all have settled
    at the limit, those are kept, and all others of the call are made one by one.

    Args:
        memory: `[B, 1, d]`, what the first column reads.
        guess: `[B, T, d]`, memories to begin with; zeros if None.
        tolerance: how far a memory may move in the last sweep, root mean square over its channels; of memories that are
            smaller than 1, that part of them.
    """
    parts, sweeps = [], []
    for start in range(columns.start, columns.stop, BLOCK):
        block = slice(start, min(start + BLOCK, columns.stop))
        size = block.stop - block.start
        if guess is None:
            later = memory.new_zeros(memory.shape[0], size - 1, memory.shape[2])
        else:
            later = guess[:, block.start : block.stop - 1].to(memory)
        sweeps.append(0)
        while sweeps[-1] < MAX_SWEEPS:
            sweeps[-1] += 1
            made = run(block, torch.cat([memory, later], dim=1))
            moved = root_mean_square(made.memory[:, :-1] - later)
            # Of small memories, the share counts: what reads them may norm them.
            size_of = root_mean_square(made.memory[:, :-1]).clamp_max(1)
            settled = (moved <= tolerance * size_of).all(0)  # [size - 1]; not of NaN
            if settled.all():
                break
            later = made.memory[:, :-1]
        else:
            # Others may have settled too; but where sweeps do not contract, hardly moving is no sign of being right.
            first = min(MAX_SWEEPS, size - 1)
            front = slice(block.start, block.start + first + 1)
            made = run(front, torch.cat([memory, later[:, :first]], dim=1))
            made.keep()
            rest = sequential(run, made.memory[:, -1:], slice(front.stop, columns.stop))
            return Rollout([*parts, made, *rest.parts], sweeps + rest.sweeps)
        made.keep()
        memory = made.memory[:, -1:]
        parts.append(made)
    return Rollout(parts, sweeps)

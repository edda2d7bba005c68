"""Whether attention over `[state | window]` is faster for many chunks at once than chunk by chunk.

A chunk's keys are in a buffer of its own, since the next chunk's buffer is made from it. To fold chunks into one call, their
buffers have to be copied side by side.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from .measuring import interleaved, spread, timed

CHUNK, WINDOW = 256, 512


def make_chunks(chunks: int, state: int, heads: int, dim: int, dtype: torch.dtype, device: str):
    """Queries `[1, H, chunks * CHUNK, D]`, and the keys and values `[1, H, state + WINDOW, D]` of each chunk."""
    torch.manual_seed(0)
    queries = torch.randn(1, heads, chunks * CHUNK, dim, dtype=dtype, device=device)
    buffers = torch.randn(2, chunks, 1, heads, state + WINDOW, dim, dtype=dtype, device=device)
    return queries, list(buffers[0]), list(buffers[1])


def hidden(keys: int, like: torch.Tensor) -> torch.Tensor:
    """What hides the later tokens of a chunk `[1, 1, CHUNK, keys]`."""
    return like.new_full((CHUNK, keys), torch.finfo(like.dtype).min).triu_(keys - CHUNK + 1)[None, None]


def per_chunk(queries: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """`[1, H, T, D]`"""
    mask = hidden(keys[0].shape[2], queries)
    parts = queries.split(CHUNK, dim=2)
    return torch.cat(
        [F.scaled_dot_product_attention(*part, attn_mask=mask) for part in zip(parts, keys, values)], dim=2
    )


def folded(queries: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """The same."""
    output = in_one_call(torch.cat(queries.split(CHUNK, dim=2)), torch.cat(keys), torch.cat(values))
    return output.transpose(0, 1).reshape(queries.shape)


def in_one_call(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=hidden(keys.shape[2], queries))


def compare_folding(chunks: int, state: int, heads: int, hidden_size: int, rounds: int, device: str) -> dict:
    given = make_chunks(chunks, state, heads, hidden_size // heads, torch.float32, device)
    queries, keys, values = given
    batched = torch.cat(queries.split(CHUNK, dim=2)), torch.cat(keys), torch.cat(values)
    runs: dict[str, Callable] = {
        "per_chunk": lambda: per_chunk(*given),
        "folded": lambda: folded(*given),
        "folded_without_copies": lambda: in_one_call(*batched),
    }
    with torch.inference_mode():
        taken = interleaved({name: lambda run=run: timed(run, device) for name, run in runs.items()}, rounds, "Folding")
    return {"chunks": chunks, "state": state} | {name: spread(seconds) for name, seconds in taken.items()}

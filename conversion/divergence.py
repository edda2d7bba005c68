"""How far the next-token distribution of one model is from another's, with logits for a few positions at a time."""

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

# Positions whose logits are in memory at once.
POSITIONS = 256


def logits_of(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """`[B, T, d]` final hidden states to logits `[B, T, V]` in at least float32, also under autocast: rounded logits would make
    a divergence of their own."""
    with torch.autocast(hidden.device.type, enabled=False):
        logits = model.compute_logits(hidden.to(model.dtype))
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def divergence(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """KL(wanted || logits), the sum over all positions."""
    return F.kl_div(logits.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="sum")


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum over all positions."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


@torch.no_grad()
def compare(
    model: PreTrainedModel,
    teacher: PreTrainedModel,
    hidden: torch.Tensor,
    wanted: torch.Tensor,
    ids: torch.Tensor,
    first: int,
) -> torch.Tensor:
    """Sums over the positions from `first` to the last that another token follows, `[3]` in float64: the model's divergence from
    the teacher, its loss, the teacher's.

    Args:
        hidden, wanted: `[B, T, d]`, the final hidden states of the two for `ids` `[B, T]`.
    """
    sums, last = torch.zeros(3, dtype=torch.float64), ids.shape[1] - 1
    for start in range(first, last, POSITIONS):
        part = slice(start, min(start + POSITIONS, last))
        labels = ids[:, part.start + 1 : part.stop + 1]
        found, told = logits_of(model, hidden[:, part]), logits_of(teacher, wanted[:, part])
        sums += torch.stack([divergence(found, told), cross_entropy(found, labels), cross_entropy(told, labels)]).cpu()
    return sums

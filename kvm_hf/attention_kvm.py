"""One softmax over `[state | window]`: a call into transformers' attention interface, causal at the lower right.

Depends on PyTorch and on transformers' `ALL_ATTENTION_FUNCTIONS` (eager, sdpa, flex_attention, flash attention).
Specification, sections 1 and 8.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def repeat_heads(hidden: torch.Tensor, groups: int) -> torch.Tensor:
    """`[B, G, ...]` to `[B, G * groups, ...]`: every key/value head once per query head that reads it."""
    return hidden if groups == 1 else hidden.repeat_interleave(groups, dim=1)


def eager_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Attention in plain tensor operations; the signature of transformers' attention interface.

    Returns `[B, T, H, D]` and the weights `[B, H, T, K]`.
    """
    key = repeat_heads(key, module.num_key_value_groups)
    value = repeat_heads(value, module.num_key_value_groups)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    precise = torch.promote_types(query.dtype, torch.float32)
    weights = scores.softmax(dim=-1, dtype=precise).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=dropout > 0)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def takes_mask(implementation: str) -> bool:
    """Whether the kernel takes an additive mask per head. Flash attention takes none, and flex attention, as
    transformers calls it, none that differs between heads."""
    return "flash" not in implementation and "flex" not in implementation


class CausalMasks:
    """The causal masks that one call of a model needs, shared by its layers and chunks.

    Earlier columns are visible in any case, so a mask is the end of every longer one. On a GPU each is made anew: kernels
    there want them aligned.
    """

    def __init__(self):
        self.longest = {}

    def of(self, query: torch.Tensor, total: int) -> torch.Tensor:
        """`[1, 1, T, total]` for queries `[B, H, T, D]`."""
        length, kind = query.shape[2], (query.shape[2], query.dtype, query.device)
        mask = self.longest.get(kind)
        if mask is None or mask.shape[1] < total:
            columns = total if mask is None else 2 * total
            hidden = query.new_full((length, columns), torch.finfo(query.dtype).min)
            mask = hidden.triu_(columns - length + 1)
            if query.device.type == "cpu":
                self.longest[kind] = mask
        return mask[None, None, :, mask.shape[1] - total :]


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    dropout: float,
    masks: CausalMasks,
) -> torch.Tensor:
    """`T` queries against `K >= T` keys, the last `T` of which are their own tokens: causal at the lower right.

    Args:
        module: the attention module (`scaling`, `num_key_value_groups`, `config._attn_implementation`).
        query: `[B, H, T, D]`.
        key: `[B, G, K, D]`, or with channels that carry the bias behind them; value: `[B, G, K, D]`.
        bias: `[B, G or 1, K]` added to the scores, or None.
        masks: those of this call of the model.

    Returns:
        `[B, T, H, D]`.
    """
    implementation = module.config._attn_implementation
    interface = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
    extra = key.shape[-1] - query.shape[-1]
    if extra:
        query = F.pad(query, (0, extra), value=1.0)
    output, _ = interface(
        module,
        query,
        key,
        value,
        _mask(module, query, key, bias, implementation, masks),
        dropout=dropout,
        scaling=module.scaling,
    )
    return output


def _mask(module, query, key, bias, implementation, masks):
    """What this kernel needs to be causal at the lower right: nothing, a `BlockMask` (flex attention), or an additive
    mask."""
    length, total = query.shape[2], key.shape[2]
    # One query sees everything. Square calls are causal by themselves in sdpa, and flash attention aligns to the
    # lower right by itself.
    by_itself = length == 1 or "flash" in implementation or (implementation == "sdpa" and length == total)
    if by_itself and bias is None:
        return None
    if "flex" in implementation:
        return _block_mask(length, total, query.device)

    mask = None
    if length > 1:
        mask = masks.of(query, total)
    if bias is not None:
        bias = (bias if bias.shape[1] == 1 else repeat_heads(bias, module.num_key_value_groups))[:, :, None]
        mask = bias if mask is None else mask + bias
    return mask


@lru_cache(maxsize=64)
def _block_mask(length: int, total: int, device: torch.device):
    """Flex attention's form of the causal mask; the same for every layer."""
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(batch, head, row, column):
        return column <= row + (total - length)

    return create_block_mask(visible, None, None, length, total, device)

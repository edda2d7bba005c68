"""Every attention implementation of transformers gives the same model."""

import pytest
import torch
import torch.nn.functional as F
from small_models import make_model, random_ids, run_in_pieces
from transformers import AttentionInterface

from kvm_hf import KVMCache

HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
FIELDS = {"normalized": dict(rope_parameters=HALF), "positional": {}, "full": dict(layer_types=["full_attention"] * 2)}


def run(model, implementation, ids, sizes):
    model.set_attn_implementation(implementation)
    return run_in_pieces(model, ids, sizes, KVMCache(model.config))


@pytest.mark.parametrize("sizes", [[100], [1], [7]])
@pytest.mark.parametrize("kind", FIELDS)
def test_eager_equals_sdpa(kind, sizes):
    model = make_model(**FIELDS[kind])
    ids = random_ids(model, 45, batch=2)
    assert (run(model, "eager", ids, sizes) - run(model, "sdpa", ids, sizes)).abs().max() <= 1e-9


def stand_in_for_flash(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """What flash attention does, in plain operations: no mask is taken, causality is aligned to the lower right, the
    head dim is a multiple of 8, and values narrower than keys are padded by the interface."""
    assert attention_mask is None
    assert key.shape[-1] % 8 == 0 and query.shape[-1] == key.shape[-1]
    groups = module.num_key_value_groups
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    length, total = query.shape[2], key.shape[2]
    visible = torch.ones(length, total, dtype=torch.bool).tril(total - length)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scaling)
    return output.transpose(1, 2), None


@pytest.mark.parametrize("sizes", [[100], [1], [7]])
@pytest.mark.parametrize("kind", ["normalized", "positional"])
def test_kernels_without_a_mask_get_the_bias_through_extra_channels(kind, sizes):
    """Flash attention itself needs a GPU; this stands in for its interface."""
    AttentionInterface.register("flash_stand_in", stand_in_for_flash)
    model = make_model(**FIELDS[kind])
    ids = random_ids(model, 45, batch=2)
    expected = run(model, "sdpa", ids, sizes)
    model.config._attn_implementation = "flash_stand_in"
    assert (run_in_pieces(model, ids, sizes, KVMCache(model.config)) - expected).abs().max() <= 1e-9


@pytest.mark.parametrize("kind", ["normalized", "positional"])
def test_flex_attention_equals_sdpa(kind):
    model = make_model(dtype=torch.float32, head_dim=16, **FIELDS[kind])
    ids = random_ids(model, 21)
    expected = run(model, "sdpa", ids, [20, 1])
    assert (run(model, "flex_attention", ids, [20, 1]) - expected).abs().max() <= 1e-4


def test_a_cache_is_not_continued_with_another_kind_of_kernel():
    model = make_model()
    cache = KVMCache(model.config)
    ids = random_ids(model, 20)
    run_in_pieces(model, ids, [20], cache)
    AttentionInterface.register("flash_stand_in", stand_in_for_flash)
    model.config._attn_implementation = "flash_stand_in"
    with pytest.raises(ValueError, match="another attention implementation"):
        run_in_pieces(model, ids[:, :1], [1], cache)

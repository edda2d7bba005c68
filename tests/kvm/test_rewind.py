"""Dropping recent tokens restores the cache as it was, also across chunk boundaries (specification, section 6.5)."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import GPTALPHA, HALF, MIXED, configs, make_model, random_ids, run_in_pieces

from kvm_hf import KVMCache, cache_kvm

C, L = 4, 8


def assert_same_cache(one, other):
    for a, b in zip(one.layers, other.layers):
        if not hasattr(a, "tensors"):
            assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
            continue
        if hasattr(a, "tail"):
            assert torch.equal(a.tail, b.tail) and a.lengths == b.lengths and a.seen == b.seen
            continue
        assert {name: getattr(a, name) for name in ("seen", "lengths", "fills", "rows", "stop")} == {
            name: getattr(b, name) for name in ("seen", "lengths", "fills", "rows", "stop")
        }
        assert a.state is b.state is None or all(map(torch.equal, a.state, b.state))
        used, window = a._state_columns + a.stop, a.stop
        for name, size in (("keys", used), ("values", used), ("gates", window)):
            first, second = getattr(a, name), getattr(b, name)
            assert first is second is None or torch.equal(first[:, :, :size], second[:, :, :size])
        assert torch.equal(a.positions[:, :window], b.positions[:, :window])


@settings(max_examples=60, deadline=None)
@given(
    fields=configs(),
    before=st.integers(0, 40),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    part=st.floats(0, 1),
    rounds=st.integers(1, 3),
    seed=st.integers(0, 5),
)
def test_dropped_tokens_leave_no_trace(fields, before, sizes, part, rounds, seed):
    """Several calls without `crop` in between, as an assistant makes them; then the cache goes on with other tokens."""
    model = make_model(seed, **fields)
    kept, drafts, rest = (random_ids(model, size, seed=seed + i) for i, size in enumerate((before, sum(sizes), 15)))
    cache = KVMCache(model.config)
    with torch.no_grad():
        if before:
            model(kept, past_key_values=cache)
        cache.activate_past_recording()
        for _ in range(rounds):
            accepted = int(part * sum(sizes))
            run_in_pieces(model, drafts, sizes, cache)
            cache.crop(accepted - sum(sizes))
            kept = torch.cat([kept, drafts[:, :accepted]], dim=1)
            assert cache.get_seq_length() == kept.shape[1]
            assert not any(layer.past for layer in cache.layers if hasattr(layer, "past"))
        logits = run_in_pieces(model, rest, [4], cache)
        whole = model(torch.cat([kept, rest], dim=1), use_cache=False).logits[:, kept.shape[1] :]
    assert (logits - whole).abs().max() <= 1e-9


@pytest.mark.parametrize(
    "fields", [{}, dict(rope_parameters=HALF), MIXED, GPTALPHA], ids=["positional", "normalized", "mixed", "gptalpha"]
)
@pytest.mark.parametrize("dropped", [1, C - 1, C, C + 1, L, 3 * L, 5 * L])
@pytest.mark.parametrize("start", [1, L - 1, L, L + 1, 3 * L, 3 * L + 1])
@pytest.mark.parametrize("sizes", [[1], [7]], ids=["tokens", "pieces"])
def test_the_cache_is_restored_tensor_by_tensor(fields, dropped, start, sizes):
    model = make_model(**fields)
    ids = random_ids(model, start + dropped)
    cache = KVMCache(model.config)
    run_in_pieces(model, ids[:, :start], [start], cache)
    cache.activate_past_recording()
    as_it_was = copy.deepcopy(cache)
    run_in_pieces(model, ids[:, start:], sizes, cache)
    cache.crop(-dropped)
    if fields is MIXED:
        as_it_was.layers[1].crop(0)  # transformers' sliding layer trims what it holds on the first crop
    assert_same_cache(cache, as_it_was)


def test_all_tokens_can_be_taken_back_and_the_cache_used_again():
    model = make_model()
    cache = KVMCache(model.config)
    cache.activate_past_recording()
    run_in_pieces(model, random_ids(model, 3 * L), [3 * L], cache)
    cache.crop(-3 * L)
    ids = random_ids(model, 3 * L + 1, seed=1)
    assert torch.equal(
        run_in_pieces(model, ids, [100], cache), run_in_pieces(model, ids, [100], KVMCache(model.config))
    )


def test_before_there_is_a_state_no_recording_is_needed():
    model = make_model()
    cache = KVMCache(model.config)
    ids = random_ids(model, L)
    run_in_pieces(model, ids, [L], cache)
    cache.crop(-3)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits[:, L - 3 :]
    assert (run_in_pieces(model, ids[:, L - 3 :], [3], cache) - whole).abs().max() <= 1e-9


def test_what_was_not_recorded_is_refused_and_nothing_lost():
    model = make_model(num_hidden_layers=3, layer_types=["full_attention", "kvm_attention", "kvm_attention"])
    cache = KVMCache(model.config)
    ids = random_ids(model, 5 * L)
    run_in_pieces(model, ids[:, : 3 * L], [3 * L], cache)
    with pytest.raises(ValueError, match="cannot drop its last 1 tokens"):
        cache.crop(-1)
    cache.activate_past_recording()
    run_in_pieces(model, ids[:, 3 * L : 4 * L], [1], cache)
    with pytest.raises(ValueError, match="cannot drop its last"):
        cache.crop(-2 * L)
    with pytest.raises(ValueError, match="negative number"):
        cache.crop(3 * L)
    assert [layer.get_seq_length() for layer in cache.layers] == [4 * L] * 3
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits[:, 4 * L :]
    assert (run_in_pieces(model, ids[:, 4 * L :], [1], cache) - whole).abs().max() <= 1e-9


def test_what_is_recorded_is_bounded_and_trimmed(monkeypatch):
    monkeypatch.setattr(cache_kvm, "RECORDED_TOKENS", 3 * C)
    model = make_model(state_budget="fixed", state_size=6)
    cache = KVMCache(model.config)
    run_in_pieces(model, random_ids(model, 5 * L), [5 * L], cache)
    plain = cache.nbytes
    cache.activate_past_recording()
    run_in_pieces(model, random_ids(model, 20 * L), [9], cache)
    assert [len(layer.past) for layer in cache.layers] == [4, 4]  # borders within the last 3 C tokens, and one before
    assert plain < cache.nbytes <= 6 * plain
    restored = copy.deepcopy(cache)
    restored.crop(-3 * C)
    assert restored.get_seq_length() == 25 * L - 3 * C
    cache.crop(0)
    assert cache.nbytes == plain
    with pytest.raises(ValueError, match="cannot drop its last"):
        cache.crop(-3 * C)


def test_a_padded_batch_takes_back_what_came_after_its_padding():
    model = make_model()
    ids, more = random_ids(model, 3 * L, batch=2), random_ids(model, 2 * L, batch=2, seed=1)
    mask = torch.ones(2, 3 * L, dtype=torch.long)
    mask[0, :10] = 0
    cache = KVMCache(model.config)
    cache.activate_past_recording()

    def steps(cache, mask):
        outputs = []
        for step in range(more.shape[1]):
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            outputs.append(model(more[:, step : step + 1], attention_mask=mask, past_key_values=cache).logits)
        return torch.cat(outputs, dim=1)

    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        first = steps(cache, mask)
        cache.crop(-2 * L)
        assert cache.lengths == [3 * L - 10, 3 * L]
        assert (steps(cache, mask) - first).abs().max() <= 1e-9
        cache.crop(-2 * L)
        with pytest.raises(ValueError, match="cannot drop its last 1 tokens"):
            cache.crop(-1)


@pytest.mark.parametrize("dropped", [1, L + 3])
def test_one_padded_prompt_with_drafts_takes_them_back(dropped):
    """Assisted generation gives the prompt, pads included, and the first drafts in one call."""
    model = make_model()
    ids = random_ids(model, 4 * L)
    mask = torch.ones_like(ids)
    mask[:, :5] = 0
    cache, alone = KVMCache(model.config), KVMCache(model.config)
    cache.activate_past_recording()
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        cache.crop(-dropped)
        model(ids[:, 5:-dropped], past_key_values=alone)
        token = ids[:, -1:]
        step = model(token, attention_mask=mask[:, : 1 - dropped or None], past_key_values=cache).logits
        assert (step - model(token, past_key_values=alone).logits).abs().max() <= 1e-9
        assert cache.lengths == alone.lengths
        with pytest.raises(ValueError, match="cannot drop its last"):
            cache.crop(-4 * L + dropped)


def test_a_recorded_past_follows_its_rows():
    model = make_model()
    ids, drafts = random_ids(model, 3 * L, batch=3), random_ids(model, L + 1, batch=3, seed=1)
    cache, expected = KVMCache(model.config), KVMCache(model.config)
    run_in_pieces(model, ids, [3 * L], cache)
    run_in_pieces(model, ids[[2, 2, 0]], [3 * L], expected)
    cache.activate_past_recording()
    run_in_pieces(model, drafts, [1], cache)
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    cache.crop(-L - 1)
    assert_same_cache(cache, expected)


def test_a_ragged_batch_takes_back_part_of_a_call_of_several_tokens():
    model = make_model()
    ids, more = random_ids(model, 13, batch=2), random_ids(model, 7, batch=2, seed=1)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :3] = 0
    cache = KVMCache(model.config)
    cache.activate_past_recording()
    with torch.no_grad():
        model(ids, attention_mask=mask[:, :13], past_key_values=cache)
        whole = model(more, attention_mask=mask, past_key_values=cache).logits
        for dropped in (6, 3, 1):
            cache.crop(-dropped)
            assert cache.lengths == [17 - dropped, 20 - dropped]
            rest = model(more[:, -dropped:], attention_mask=mask, past_key_values=cache).logits
            assert (rest - whole[:, -dropped:]).abs().max() <= 1e-9


@pytest.mark.parametrize(("length", "record"), [(7, False), (31, True)])
def test_a_crop_that_a_sliding_layer_cannot_follow_is_refused_and_nothing_lost(length, record):
    model = make_model(**{**MIXED, "layer_types": ["kvm_attention", "full_attention", "sliding_attention"]})
    cache = KVMCache(model.config)
    ids = random_ids(model, length + 3)
    run_in_pieces(model, ids[:, :length], [length], cache)
    if record:
        cache.activate_past_recording()
    with pytest.raises(ValueError, match="cannot drop its last 2 tokens"):
        cache.crop(-2)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits[:, length:]
    assert (run_in_pieces(model, ids[:, length:], [1], cache) - whole).abs().max() <= 1e-9


def test_a_mixed_cache_without_tokens_takes_another_batch():
    model = make_model(**MIXED)
    cache = KVMCache(model.config)
    cache.activate_past_recording()
    run_in_pieces(model, random_ids(model, 4), [4], cache)
    cache.crop(torch.tensor(-4))
    cache.batch_repeat_interleave(3)
    ids = random_ids(model, 3 * L, batch=3)
    expected = run_in_pieces(model, ids, [5], KVMCache(model.config))
    assert torch.equal(run_in_pieces(model, ids, [5], cache), expected)


def test_numbers_of_tokens_are_whole():
    cache = KVMCache(make_model().config)
    with pytest.raises(TypeError):
        cache.crop(-1.5)

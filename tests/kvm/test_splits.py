"""One sequence, any split over calls: the same logits, tokens and state (specification, section 6.1)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import (
    GPTALPHA,
    HALF,
    MIXED,
    configs,
    generate,
    greedy_without_cache,
    make_model,
    random_ids,
    run_in_pieces,
)
from transformers import DynamicCache

from kvm_hf import KVMCache, modeling_kvm

C, L = 4, 8  # of the small models


@settings(max_examples=80, deadline=None)
@given(
    fields=configs(),
    length=st.integers(1, 70),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=12),
    batch=st.integers(1, 2),
    seed=st.integers(0, 5),
)
def test_any_split_gives_the_logits_of_one_call(fields, length, sizes, batch, seed):
    model = make_model(seed, **fields)
    ids = random_ids(model, length, batch, seed)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
    pieces = run_in_pieces(model, ids, sizes, KVMCache(model.config))
    # float64: 1e-9 leaves room for another order of additions, not for another decision
    assert (whole - pieces).abs().max() <= 1e-9


@settings(max_examples=80, deadline=None)
@given(
    fields=configs(),
    length=st.integers(1, 70),
    batch=st.integers(1, 2),
    seed=st.integers(0, 5),
    bias_in_keys=st.booleans(),
)
def test_a_forward_that_autograd_follows_gives_the_logits_of_one_that_it_does_not(
    fields, length, batch, seed, bias_in_keys
):
    model = make_model(seed, **fields).train()
    ids = random_ids(model, length, batch, seed)
    with pytest.MonkeyPatch.context() as patch:
        if bias_in_keys:  # as for kernels that take no mask
            patch.setattr(modeling_kvm, "takes_mask", lambda implementation: False)
        with torch.no_grad():
            expected = model(ids, use_cache=False).logits
        for module in model.modules():
            if hasattr(module, "rule"):
                module.gradient_checkpointing = True  # as if the layer were computed again, and so its attention not
        assert (model(ids, use_cache=False).logits - expected).abs().max() <= 1e-9


@pytest.mark.parametrize("length", [1, C - 1, C, C + 1, L - 1, L, L + 1, 2 * L - 1, 2 * L, 2 * L + 1, 5 * L + 3])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, C - 1, C, C + 1])
@pytest.mark.parametrize("fields", [{}, dict(rope_parameters=HALF), GPTALPHA], ids=["positional", "half", "gptalpha"])
def test_lengths_around_chunk_and_window_in_pieces_of_every_size(length, size, fields):
    model = make_model(**fields)
    ids = random_ids(model, length)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
    assert (whole - run_in_pieces(model, ids, [size], KVMCache(model.config))).abs().max() <= 1e-9


@pytest.mark.parametrize("length", [1, C - 1, C, C + 1, L - 1, L, L + 1, 2 * L - 1, 2 * L, 2 * L + 1, 5 * L + 3])
def test_with_a_row_for_every_token_the_window_may_end_anywhere(length):
    """Nothing is merged, so window and state together are full attention: no token is dropped or counted twice."""
    model, full = make_model(state_size=1000), make_model(layer_types=["full_attention"] * 2)
    loaded = full.load_state_dict(model.state_dict(), strict=False)
    assert not loaded.missing_keys
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.state_temperature.fill_(1)
            layer.self_attn.window_temperature.fill_(1)
        ids = random_ids(model, length)
        # Keys are turned back and forth by tables that transformers, and so we, compute in float32.
        assert (model(ids).logits - full(ids).logits).abs().max() <= 2e-6


@pytest.mark.parametrize("fields", [{}, dict(state_budget="fixed", state_size=6)], ids=["growing", "fixed"])
@pytest.mark.parametrize("seed", range(20))
def test_ties_of_repeated_tokens_are_not_decided_by_rounding(seed, fields):
    """In the first layer equal tokens have equal keys wherever they stand, so rows and tokens tie exactly."""
    model = make_model(seed, **fields)
    ids = random_ids(model, 60, batch=1, seed=seed) % 3
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        rows = KVMCache(model.config)
        model(ids, past_key_values=rows)
    pieces = KVMCache(model.config)
    assert (whole - run_in_pieces(model, ids, [1], pieces)).abs().max() <= 1e-9
    assert torch.equal(rows.layers[0].state.count, pieces.layers[0].state.count)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, None)])
def test_splits_agree_in_lower_precision(dtype, tolerance):
    """In bfloat16 decisions may flip, so the measure is the model's own noise: its distance from float64."""
    exact = make_model()
    ids = random_ids(exact, 6 * L + 3)
    model = make_model(dtype=dtype)
    with torch.no_grad():
        reference = exact(ids).logits
        whole = model(ids, use_cache=False).logits.double()
    pieces = run_in_pieces(model, ids, [1], KVMCache(model.config)).double()
    if tolerance is None:
        noise = (whole - reference).abs().mean()
        assert 0 < (pieces - whole).abs().mean() <= 2 * noise
    else:
        assert (whole - pieces).abs().max() <= tolerance


FIELDS = {"positional": {}, "normalized": dict(rope_parameters=HALF), "mixed": MIXED, "gptalpha": GPTALPHA}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("changed", [0, C, L, 2 * L + 1, 4 * L + 1])
@pytest.mark.parametrize("sizes", [[10**6], [5], [1]])
def test_a_token_changes_nothing_before_it(changed, sizes, fields):
    model = make_model(**fields)
    ids = random_ids(model, 4 * L + 3)
    other = ids.clone()
    other[0, changed] = (other[0, changed] + 1) % model.config.vocab_size
    before = run_in_pieces(model, ids, sizes, KVMCache(model.config))
    after = run_in_pieces(model, other, sizes, KVMCache(model.config))
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert not torch.equal(before[:, changed:], after[:, changed:])


@pytest.mark.parametrize("fields", [{}, MIXED, GPTALPHA], ids=["kvm", "mixed", "gptalpha"])
@pytest.mark.parametrize("length", [1, C, L - 1, L, 3 * L + 5])
def test_generate_equals_recomputing_everything_for_every_token(length, fields):
    model = make_model(**fields)
    ids = random_ids(model, length, batch=2)
    assert torch.equal(generate(model, ids, 2 * L + 1), greedy_without_cache(model, ids, 2 * L + 1))


@pytest.mark.parametrize("fields", [{}, MIXED, GPTALPHA], ids=["kvm", "mixed", "gptalpha"])
@pytest.mark.parametrize("prefill_chunk_size", [1, 3, C, L, 30])
def test_prefill_in_chunks_gives_the_same_tokens(prefill_chunk_size, fields):
    model = make_model(**fields)
    ids = random_ids(model, 3 * L + 5)
    whole = generate(model, ids, 12)
    assert torch.equal(generate(model, ids, 12, prefill_chunk_size=prefill_chunk_size), whole)


@pytest.mark.parametrize("length", [3, 3 * L + 2])
@pytest.mark.parametrize("only_new", [False, True], ids=["all ids", "only the new ids"])
@pytest.mark.parametrize("make_cache", [KVMCache, lambda config: DynamicCache(config=config)], ids=["KVM", "Dynamic"])
def test_a_second_chat_turn_continues_the_first(length, only_new, make_cache):
    model = make_model()
    cache = make_cache(model.config)
    first = generate(model, random_ids(model, length), 7, past_key_values=cache)
    second = torch.cat([first, random_ids(model, 9, seed=1)], dim=1)
    expected = greedy_without_cache(model, second, 6)
    seen = cache.get_seq_length()
    if only_new:
        new = model.generate(
            second[:, seen:],
            attention_mask=torch.ones_like(second),
            past_key_values=cache,
            max_new_tokens=6,
            do_sample=False,
            pad_token_id=0,
        )
        assert torch.equal(new[:, second.shape[1] - seen :], expected[:, second.shape[1] :])
    else:
        assert torch.equal(generate(model, second, 6, past_key_values=cache), expected)

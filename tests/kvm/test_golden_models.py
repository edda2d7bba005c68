"""The Llama-style model against the literal float64 model: logits for every way of feeding, and the final state."""

import pytest
import torch
from small_models import golden_llama_cases, load_golden_llama, run_in_pieces

from kvm_hf import KVMCache
from kvm_hf.state_kvm import State

# float32 sums in another order than float64's: measured up to 7.2e-6 on logits of size 5.
TOLERANCE = 1e-5
FEEDS = {"whole": [10**6], "by-token": [1], "ragged": [1, 2, 3, 5, 8, 7, 4, 9, 13, 11]}


@pytest.mark.parametrize("feed", FEEDS)
@pytest.mark.parametrize("case", golden_llama_cases())
def test_logits_and_state_equal_the_golden_case(case, feed):
    model, golden = load_golden_llama(case, torch.float32)
    for row in range(3):
        if f"row{row}.input_ids" not in golden:
            continue
        cache = KVMCache(model.config)
        logits = run_in_pieces(model, golden[f"row{row}.input_ids"][None], FEEDS[feed], cache)
        assert (logits[0] - golden[f"row{row}.logits"]).abs().max() <= TOLERANCE
        if row:
            continue
        for index, layer in enumerate(cache.layers):
            if model.config.layer_types[index] != "kvm_attention":
                continue
            assert layer.seen - layer.fills[0] == golden[f"row0.layer{index}.covered"]
            for name in State._fields:
                expected = golden[f"row0.layer{index}.{name}"]
                error = (getattr(layer.state, name)[0] - expected).abs().max()
                assert error <= 1e-5 * expected.abs().max(), name


@pytest.mark.parametrize("case", golden_llama_cases())
def test_the_forward_without_a_cache_equals_the_golden_case(case):
    model, golden = load_golden_llama(case, torch.float32)
    with torch.no_grad():
        logits = model(golden["row0.input_ids"][None], use_cache=False).logits
    assert (logits[0] - golden["row0.logits"]).abs().max() <= TOLERANCE

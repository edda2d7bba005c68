"""A compiled step of training: the same gradients, and nothing is compiled anew for every other length."""

import pytest
import torch
from small_models import random_ids
from small_training import FAMILIES, largest_difference
from torch._dynamo.utils import counters

from kvm_hf import KVMCache

SMALLER = dict(
    llama=dict(num_hidden_layers=2, layer_types=["kvm_attention", "full_attention"]),
    gptalpha=dict(num_hidden_layers=2, layer_types=["kvm_attention", "block_sliding_attention"]),
    maglev=dict(num_hidden_layers=1, layer_types=["sliding_attention"], prefiller_layer_types=["full_attention"]),
)


def gradients_of(model, run, ids, mask=None):
    model.zero_grad()
    run(input_ids=ids, labels=ids, attention_mask=mask).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_training_step_is_compiled_a_bounded_number_of_times(family):
    """Dynamo alone, without the compiler behind it, which takes minutes on a CPU and does not decide on this."""
    torch._dynamo.reset()
    model = FAMILIES[family](**SMALLER[family])
    compiled = torch.compile(model, backend="eager")

    def graphs_for(lengths):
        counters.clear()
        for length in lengths:
            ids = random_ids(model, length, batch=2)
            found = gradients_of(model, compiled, ids)
            # The same operations in float32, some of them fused; gradients of up to about 10.
            assert largest_difference(found, gradients_of(model, model, ids)) < 1e-4
        return counters["stats"]["unique_graphs"]

    try:
        first = graphs_for([20])
        assert 0 < first < 30
        assert graphs_for([20, 20]) == 0  # batches of one length, as in packed training
        again = graphs_for([33])  # lengths become variables
        assert 0 < again <= 2 * first
        assert graphs_for([27, 45]) <= 6  # of the mask, where one is made
    finally:
        torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["llama", "gptalpha"])
def test_decoding_is_compiled_a_bounded_number_of_times_while_the_state_grows(family):
    """The layers' own steps are left to Python (`KVMLayer.update`); what is around them does not see the state."""
    torch._dynamo.reset()
    model = FAMILIES[family](**SMALLER[family], state_budget="power_law").eval()
    compiled = torch.compile(model, backend="eager")
    ids = random_ids(model, 60, batch=2)
    try:
        with torch.no_grad():
            whole = model(ids).logits
            cache = KVMCache(model.config)
            graphs, steps = [], [model(ids[:, :20], past_key_values=cache).logits]
            for token in range(20, 60):
                counters.clear()
                steps.append(compiled(ids[:, token : token + 1], past_key_values=cache).logits)
                graphs.append(counters["stats"]["unique_graphs"])
        assert (torch.cat(steps, dim=1) - whole).abs().max() < 1e-4
        assert 0 < sum(graphs[:3]) < 40 and sum(graphs[3:]) == 0
        assert max(cache.rows[0]) > 8  # it has grown meanwhile
    finally:
        torch._dynamo.reset()

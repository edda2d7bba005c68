"""What a step costs, counted in operations and bytes: times are for `benchmarks/`."""

import gc
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from small_models import HALF, make_model, random_ids
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from kvm_hf import KVMCache, KVMConfig, state_kvm
from kvm_hf.cache_kvm import KVMLayer
from kvm_hf.replay_kvm import replayed

C, L = 4, 8
SDPA = "_scaled_dot_product_flash_attention_for_cpu"


class Operations(TorchDispatchMode):
    """The names of those that are more than a view."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if not operation.is_view:
            self.names.append(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("fields", [{}, dict(rope_parameters=HALF), dict(state_budget="fixed")])
def test_between_borders_of_chunks_a_step_is_one_write_and_one_attention_call(fields, batch, monkeypatch):
    model = make_model(num_key_value_heads=4, count_bias=0.0, **fields)
    ids, cache, updates = random_ids(model, 70, batch), KVMCache(model.config), []
    update = KVMLayer.update

    def counted(layer, *args, **kwargs):
        with Operations() as operations:
            result = update(layer, *args, **kwargs)
        updates.append(operations)
        return result

    with torch.no_grad():
        model(ids[:, :37], past_key_values=cache)
        monkeypatch.setattr(KVMLayer, "update", counted)
        for token in range(37, 70):
            seen, buffers = token % C, [layer.keys.data_ptr() for layer in cache.layers]
            updates.clear()
            model(ids[:, token : token + 1], past_key_values=cache)
            for layer, buffer, operations in zip(cache.layers, buffers, updates, strict=True):
                if seen == 0:  # opens a chunk
                    assert len(operations.names) > 10
                    continue
                writes = ["copy_"] * (4 if layer.gates is not None else 3)
                scale = ["mul"]  # of the queries, by their temperature
                assert operations.names == writes + scale + [SDPA]
                assert layer.keys.data_ptr() == buffer


def kept_bytes(model, tokens: int) -> int:
    """Bytes of tensors that are alive between forward and backward, and were not before, each storage once."""

    def storages():
        gc.collect()
        found = {}
        for thing in gc.get_objects():
            if type(thing) is torch.Tensor:
                with suppress(NotImplementedError):  # left behind by other tests
                    found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        return found

    def pack(tensor):
        saved.append(tensor)
        return tensor

    saved, before = [], storages()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(random_ids(model, tokens), use_cache=False).logits.sum()
    assert loss.requires_grad and saved
    before |= {p.untyped_storage().data_ptr(): 0 for p in model.parameters()}
    return sum(size for place, size in storages().items() if place not in before)


@pytest.mark.parametrize("fields", [dict(state_budget="fixed"), dict(state_growth_factor=8.0)])
def test_what_training_keeps_grows_as_with_plain_attention(fields):
    """Not with the states and windows of all chunks, which would be several times the keys and values."""
    kvm = make_model(num_key_value_heads=4, rope_parameters=HALF, **fields).train()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    llama = LlamaForCausalLM(LlamaConfig(**{name: getattr(kvm.config, name) for name in names})).double().train()
    ours, plain = (kept_bytes(model, 256) - kept_bytes(model, 128) for model in (kvm, llama))
    assert 0 < ours <= 1.1 * plain


class Elements(TorchDispatchMode):
    """How many numbers are written."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if not operation.is_view:
            parts = result if isinstance(result, tuple | list) else [result]
            self.count += sum(part.numel() for part in parts if isinstance(part, torch.Tensor))
        return result


@pytest.mark.parametrize("packed", [False, True])
def test_what_training_writes_grows_with_the_tokens(packed):
    """Not with their square, as where the gradient of each chunk, or of each packed sequence, is as large as the whole."""
    model = make_model(state_budget="fixed", rope_parameters=HALF).train()

    def written(tokens):
        positions = torch.arange(tokens)[None] % 16 if packed else None
        with Elements() as elements:
            ids = random_ids(model, tokens)
            model(ids, position_ids=positions, labels=ids, use_cache=False).loss.backward()
        return elements.count

    first, second, third = (written(tokens) for tokens in (512, 1024, 1536))
    assert third - second <= 1.02 * (second - first)


def gradients(model, ids, again: bool, then=lambda: None, differentiable: bool = False, precision=None):
    """Those of the loss; with the attention computed again in the backward pass, or kept as if a whole layer were."""
    model.train()
    for module in model.modules():
        if hasattr(module, "merge_gate"):
            module.gradient_checkpointing = not again
    lent = {name: (0.9 * part).detach().requires_grad_() for name, part in model.named_parameters()}
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=precision, enabled=precision is not None):
        loss = torch.func.functional_call(model, lent, (ids,), dict(labels=ids, use_cache=False)).loss
    then()
    lent = list(lent.values())
    found = torch.autograd.grad(loss, lent, create_graph=differentiable)
    return torch.autograd.grad(sum(part.square().sum() for part in found), lent) if differentiable else found


@pytest.mark.parametrize(
    "fields, settings",
    [
        ({}, {}),
        (dict(state_treatment="positional", use_qk_norm=True, state_budget="fixed"), {}),
        (dict(attention_dropout=0.3), {}),
        ({}, dict(differentiable=True)),
    ],
)
def test_what_is_computed_again_is_what_was_computed(fields, settings):
    """In evaluation mode by then, and with parameters that were lent for the forward alone."""
    if "state_treatment" not in fields:
        fields = fields | dict(rope_parameters=HALF)
    model = make_model(attn_implementation="eager", **fields)
    ids = random_ids(model, 40)
    kept, computed = (
        gradients(model, ids, False, **settings),
        gradients(model, ids, True, then=model.eval, **settings),
    )
    for one, other in zip(kept, computed, strict=True):  # the first run works in place, and rounds otherwise
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
    assert any(part.abs().max() > 0 for part in kept)


def test_what_is_computed_again_is_computed_under_the_same_autocast():
    model = make_model(
        rope_parameters=HALF, dtype=torch.float32, use_qk_norm=True
    )  # its keys are in float32 all the same
    ids = random_ids(model, 40)
    kept, computed = (gradients(model, ids, again, precision=torch.bfloat16) for again in (False, True))
    precise = gradients(model, ids, True)
    gap, error = (sum((a - b).square().sum() for a, b in zip(kept, others)).sqrt() for others in (precise, computed))
    assert 10 * error < gap


def test_rows_are_looked_up_once_in_a_training_step(monkeypatch):
    model, calls = make_model(num_hidden_layers=1, rope_parameters=HALF).train(), []

    choose = state_kvm._choose

    def counted(*args):
        calls.append(1)
        return choose(*args)

    monkeypatch.setattr(state_kvm, "_choose", counted)
    ids = random_ids(model, 40)
    model(ids, labels=ids, use_cache=False).loss.backward()
    assert len(calls) == 40 / C - 3  # the first two chunks fill the window, the third founds the state


def test_what_is_given_to_a_replay_may_depend_on_something_else_that_is_given():
    number = torch.tensor(3.0, requires_grad=True)
    replayed(lambda one, other: one * other, number, 2 * number, draws=False).backward()
    assert number.grad == 12


def test_functional_gradients_are_those_of_autograd():
    model = make_model(rope_parameters=HALF).train()
    ids, weights = random_ids(model, 40), {name: part.detach() for name, part in model.named_parameters()}

    def loss(weights):
        return torch.func.functional_call(model, weights, (ids,), dict(labels=ids, use_cache=False)).loss

    loss(dict(model.named_parameters())).backward()
    for name, gradient in torch.func.grad(loss)(weights).items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, msg=name)


@pytest.mark.parametrize("treatment", ["normalized", "positional"])
def test_a_token_whose_gate_is_zero_joins_the_first_row_behind_the_sinks(treatment):
    """All its gated similarities are zero, so all rows tie (specification, section 3, step 3)."""
    torch.manual_seed(0)
    config = KVMConfig(chunk_size=3, state_budget="fixed", state_size=3, num_sink_tokens=1)
    rule = state_kvm.StateRule.from_config(config)
    rule = replace(rule, gate_keys=True, gate_values=False, state_treatment=treatment)
    treatments = {
        "normalized": state_kvm.NormalizedKeys(lambda keys: keys, 0),
        "positional": state_kvm.PositionalKeys(lambda keys, positions, inverse: keys),
    }
    keys, values = torch.randn(2, 1, 1, 3, 4, dtype=torch.float64)
    keys[..., :2, :] = torch.tensor([[1.0, 0, 0, 0], [0, 1.0, 0, 0]])
    ones = torch.ones(1, 1, 3, 1, dtype=torch.float64)
    state = state_kvm.found(rule, state_kvm.Block(keys, values, ones, 0 * ones))
    gates = torch.tensor([0.5, 0.0, 0.0], dtype=torch.float64).view(1, 1, 3, 1)
    block = state_kvm.Block(5 * keys[:, :, [2, 2, 0]], values, gates, ones)  # nearest to rows 2, 2 and 0
    after, held, _ = state_kvm.absorb(rule, treatments[treatment], state, block, held=[3], contexts=[9])
    assert held == [3]
    assert after.count.flatten().tolist() == [1, 3, 2]
    assert torch.equal(after.value_sum[0, 0, 1], values[0, 0, 1] + values[0, 0, 1] + values[0, 0, 2])


def test_similarities_that_are_not_numbers_name_a_row():
    similarity = torch.tensor([[0.0, 0.0, 0.0], [float("nan"), 1.0, 2.0], [1.0, 3.0, 3.0], [-5.0, -5.0, -7.0]])
    assert state_kvm._first_highest(similarity).tolist() == [0, 0, 1, 0]
    infinite = torch.tensor([[float("inf"), 1.0], [float("-inf"), 1.0], [float("-inf"), float("-inf")]])
    assert all(0 <= index < 2 for index in state_kvm._first_highest(infinite).tolist())

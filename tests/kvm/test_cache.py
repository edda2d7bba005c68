"""The cache: who makes it, what it holds, what it refuses, and that its parts are really used."""

import copy
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from small_models import GPTALPHA, HALF, SMALL, generate, make_model, random_ids, run_in_pieces
from transformers import DynamicCache, LlamaConfig

import kvm_hf
from conversion.plan import cache_bytes
from kvm_hf import KVMCache, KVMConfig, cache_kvm, state_kvm
from kvm_hf.modeling_kvm import CACHE_NAME

C, L = 4, 8
MIXED = dict(
    num_hidden_layers=3, layer_types=["sliding_attention", "kvm_attention", "full_attention"], sliding_window=5
)


def test_plain_calls_make_a_kvm_cache_by_themselves():
    model = make_model()
    with torch.no_grad():
        cache = getattr(model(random_ids(model, 3)), CACHE_NAME)
    assert isinstance(cache, KVMCache)
    generated = generate(model, random_ids(model, 20), 3, return_dict_in_generate=True)
    assert [layer._layer_type for layer in getattr(generated, CACHE_NAME).layers] == ["kvm_attention"] * 2


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("depth", ["model", "base model"])
def test_both_names_of_the_cache_are_taken_everywhere(name, depth):
    """A cache under the other name must not vanish in `**kwargs`: every decode step would see one token."""
    model = make_model()
    ids = random_ids(model, 3 * L)
    called = model if depth == "model" else model.model
    cache = KVMCache(model.config)
    with torch.no_grad():
        whole = called(ids, use_cache=False)[0]
        called(ids[:, :-1], **{name: cache})
        step = called(ids[:, -1:], **{name: cache})
    assert cache.get_seq_length() == 3 * L
    assert (whole[:, -1:] - step[0]).abs().max() <= 1e-9
    assert step.past_key_values is cache


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_generate_takes_both_names_of_the_cache(name):
    if name == "cache" and CACHE_NAME != "cache":
        pytest.skip("this transformers knows `past_key_values` only")
    model = make_model()
    ids = random_ids(model, 3 * L)
    cache = KVMCache(model.config)
    assert torch.equal(generate(model, ids, 5, **{name: cache}), generate(model, ids, 5))
    assert cache.get_seq_length() == ids.shape[1] + 4


def test_two_different_caches_under_the_two_names_are_refused():
    model = make_model()
    with pytest.raises(ValueError, match="two names for one thing"):
        model(random_ids(model, 3), cache=KVMCache(model.config), past_key_values=KVMCache(model.config))


def test_every_layer_sees_the_same_past_length_during_one_forward():
    model = make_model(num_hidden_layers=3)
    seen = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["position_ids"].tolist()), with_kwargs=True
        )
    cache = KVMCache(model.config)
    run_in_pieces(model, random_ids(model, 9), [6, 3], cache)
    assert seen == [[[0, 1, 2, 3, 4, 5]]] * 3 + [[[6, 7, 8]]] * 3


@pytest.mark.parametrize("fields", [{}, dict(rope_parameters=HALF), MIXED, dict(state_budget="fixed", state_size=6)])
@pytest.mark.parametrize("length", [1, C, L, L + 1, 3 * L + 1, 9 * L + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_held_are_those_of_the_formula_however_the_tokens_came(fields, length, dtype):
    model = make_model(dtype=dtype, **fields)
    ids = random_ids(model, length, batch=2)
    held = []
    for sizes in ([length], [1], [3]):
        cache = KVMCache(model.config)
        run_in_pieces(model, ids, sizes, cache)
        held.append(cache.nbytes)
    assert held == [2 * cache_bytes(model.config, length, dtype)] * 3


def test_a_decode_step_writes_one_token_and_allocates_nothing():
    """Between chunk borders the buffers stay where they are; a new one comes only with a new chunk."""
    model = make_model(rope_parameters=HALF)
    cache = KVMCache(model.config)
    ids = random_ids(model, 6 * L)
    run_in_pieces(model, ids[:, : 3 * L + 1], [3 * L + 1], cache)
    layer, moved = cache.layers[0], []
    for position in range(3 * L + 1, 6 * L):
        held = {name: tensor.data_ptr() for name, tensor in layer.tensors().items()}
        before = {name: tensor.clone() for name, tensor in layer.tensors().items()}
        run_in_pieces(model, ids[:, position : position + 1], [1], cache)
        if position % C:
            assert {name: tensor.data_ptr() for name, tensor in layer.tensors().items()} == held
            changed = (before["keys"] != layer.keys).any(dim=(0, 1, 3)).nonzero().flatten().tolist()
            assert len(changed) == 1
            assert all(torch.equal(before[name], tensor) for name, tensor in layer.tensors().items() if "state" in name)
        else:
            moved.append(position)
    assert moved == list(range(4 * L - C, 6 * L, C))


KINDS = [
    {},
    dict(rope_parameters=HALF, state_budget="saturation", state_saturation=20, state_size=1),
    dict(state_budget="fixed", state_size=6, count_bias=1.5, gate_appends=False),
    GPTALPHA | dict(state_budget="power_law"),
]


@pytest.mark.parametrize("fields", KINDS)
@pytest.mark.parametrize("few", [True, False])
def test_what_is_written_in_place_is_what_autograd_has_in_new_tensors(fields, few, monkeypatch):
    """And whether rows are chosen one head at a time or for all of them at once."""
    model, caches, logits = make_model(**fields), [], []
    ids, sizes = random_ids(model, 12 * L, batch=2), [5 * L + 1, *[1] * L, 3, 2 * L, 4 * L - 4]
    for tracked in (False, True):
        if not tracked and few:
            monkeypatch.setattr(state_kvm, "CPU_SIMILARITIES", 1)
        caches.append(KVMCache(model.config))
        with torch.set_grad_enabled(tracked):
            parts = [model(part, past_key_values=caches[-1]).logits for part in ids.split(sizes, dim=1)]
        logits.append(torch.cat(parts, dim=1))
        monkeypatch.undo()
    assert logits[1].requires_grad
    torch.testing.assert_close(*logits, rtol=0, atol=1e-9)
    assert caches[0].rows == caches[1].rows and min(caches[0].rows[0]) > C
    for layers in zip(*(cache.layers for cache in caches)):
        if hasattr(layers[0], "rows"):
            for part, other in zip(*(layer.tensors().values() for layer in layers), strict=True):
                torch.testing.assert_close(part, other.detach(), rtol=0, atol=1e-9)


def test_a_state_that_does_not_grow_moves_on_within_its_memory():
    """Prompts and decoding alike; a layer that grows gets room for a whole call at once."""
    model = make_model(state_budget="fixed", state_size=6, num_hidden_layers=1, count_bias=0.0)
    cache, places = KVMCache(model.config), set()
    run_in_pieces(model, random_ids(model, 4 * L), [4 * L], cache)
    for size in (1, 3 * L, 1, C):
        places.add(tuple(tensor.data_ptr() for tensor in cache.layers[0].tensors().values()))
        run_in_pieces(model, random_ids(model, 5 * L), [size], cache)
    assert len(places) == 1


POSITIONAL = dict(state_treatment="positional", rope_parameters=HALF | dict(partial_rotary_factor=1.0))


@pytest.mark.parametrize("fields", [POSITIONAL, dict(rope_parameters=HALF, count_bias=1.0, value_radius=False)])
def test_a_state_that_was_not_made_in_place_is_not_written_over(fields):
    """Its sums may share memory: without gates, the counts of tokens are the sums of their gates."""
    model = make_model(state_budget="fixed", **fields).requires_grad_(False)
    ids, cache = random_ids(model, 5 * L), KVMCache(model.config)
    model(ids[:, : L + 1], past_key_values=cache)  # as if there were gradients
    logits = run_in_pieces(model, ids[:, L + 1 :], [C, 1, 2 * L], cache)
    with torch.no_grad():
        assert (logits - model(ids, use_cache=False).logits[:, L + 1 :]).abs().max() <= 1e-9


def test_sequences_that_become_equal_in_length_go_on_in_place():
    model = make_model(state_budget="fixed", **POSITIONAL)
    ids, cache = random_ids(model, 22, batch=2), KVMCache(model.config)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, 8] = 0
    with torch.no_grad():
        model(ids[:, :8], past_key_values=cache)
        model(ids[:, 8:11], attention_mask=mask, past_key_values=cache)  # founds the state of the first one
        mask = torch.cat([mask, torch.tensor([[0], [1]])], dim=1)
        model(ids[:, 11:12], attention_mask=mask, past_key_values=cache)
        mask = F.pad(mask, (0, 10), value=1)
        logits = model(ids[:, 12:], attention_mask=mask, past_key_values=cache).logits
        for row, real in enumerate(mask.bool()):
            alone = model(ids[row : row + 1, real], use_cache=False).logits[0, -10:]
            assert (logits[row] - alone).abs().max() <= 1e-9


def test_what_autograd_saved_of_a_state_is_not_written_over():
    model = make_model(state_budget="fixed", rope_parameters=HALF)
    ids = random_ids(model, 3 * L)

    def gradient(sizes):
        cache = KVMCache(model.config)
        loss = model(ids[:, : L + 2], past_key_values=cache).logits.square().mean()
        run_in_pieces(model, ids[:, L + 2 :], sizes, cache)
        return torch.autograd.grad(loss, model.model.embed_tokens.weight)[0]

    assert torch.equal(gradient([1, 6]), gradient([2 * L]))


def test_keys_that_carry_a_bias_go_on_alone():
    """Flex attention takes no mask; after a ragged batch the keys carry what hides its columns."""
    model = make_model(rope_parameters=HALF, dtype=torch.float32, hidden_size=64, head_dim=16, count_bias=0.0)
    model.set_attn_implementation("flex_attention")
    ids, cache, mask = random_ids(model, 24, batch=2), KVMCache(model.config), torch.ones(2, 6, dtype=torch.long)
    mask[1, :3] = 0
    with torch.no_grad():
        model(ids[:, :6], attention_mask=mask, past_key_values=cache)
        cache.batch_select_indices(torch.tensor([0]))
        logits = model(ids[:1, 6:], past_key_values=cache).logits
        assert (logits - model(ids[:1], use_cache=False).logits[:, 6:]).abs().max() <= 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_bias_is_in_the_precision_of_keys_under_autocast(dtype):
    model = make_model(dtype=torch.float32, use_qk_norm=True, count_bias=1.0, **POSITIONAL)
    ids, cache, mask = random_ids(model, 4 * L, batch=2), KVMCache(model.config), torch.ones(2, 22, dtype=torch.long)
    mask[1, 18:21] = 0
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        model(ids[:, :18], past_key_values=cache)
        layer = cache.layers[0]
        assert layer.bias.dtype == layer.keys.dtype == torch.float32 != layer.values.dtype
        assert model(ids[:, 18:22], attention_mask=mask, past_key_values=cache).logits.isfinite().all()


def test_a_border_that_was_gone_back_to_is_not_counted_twice(tmp_path):
    growth = dict(state_growth_factor=1.5, state_growth_exponent=1.0, state_round_to=24)
    model = make_model(num_hidden_layers=1, **growth)
    ids, cache = random_ids(model, 22), KVMCache(model.config)
    run_in_pieces(model, ids[:, :18], [18], cache)
    cache.activate_past_recording()
    run_in_pieces(model, ids[:, 18:], [4], cache)
    cache.crop(16 - 22)
    cache.save_pretrained(tmp_path)
    cache = KVMCache.from_pretrained(tmp_path, model.config)  # which does not record
    run_in_pieces(model, ids[:, 16:], [6], cache)
    assert cache.nbytes == cache_bytes(model.config, 22, torch.float64)
    cache.save_pretrained(tmp_path)
    assert KVMCache.from_pretrained(tmp_path, model.config).rows == cache.rows


def test_a_copy_is_not_written_over():
    model = make_model(state_budget="fixed", state_size=6)
    cache, ids = KVMCache(model.config), random_ids(model, 8 * L)
    run_in_pieces(model, ids[:, : 4 * L], [4 * L], cache)
    other = copy.deepcopy(cache)
    expected = run_in_pieces(model, ids[:, 4 * L :], [4 * L], cache)
    assert torch.equal(run_in_pieces(model, ids[:, 4 * L :], [4 * L], other), expected)


def test_the_state_is_float32_or_wider_beside_low_precision_keys():
    model = make_model(dtype=torch.bfloat16)
    cache = KVMCache(model.config)
    run_in_pieces(model, random_ids(model, 5 * L), [7], cache)
    layer = cache.layers[0]
    assert layer.keys.dtype == torch.bfloat16
    assert {part.dtype for part in layer.state} == {torch.float32}


@pytest.mark.parametrize("sizes", [[1], [C + 1]])
def test_the_state_is_read_in_decode_and_in_steps_of_many_tokens(sizes):
    """Planted: a cache whose state is wiped must give other logits, or nothing here would notice a forgotten state."""
    model = make_model()
    ids = random_ids(model, 4 * L)
    whole, wiped = KVMCache(model.config), KVMCache(model.config)
    for cache in (whole, wiped):
        run_in_pieces(model, ids[:, : 3 * L + 1], [3 * L + 1], cache)
    for layer in wiped.layers:
        layer.values[:, :, : layer.state.rows] = 0
    rest = ids[:, 3 * L + 1 : 3 * L + 1 + sizes[0]]
    difference = run_in_pieces(model, rest, sizes, whole) - run_in_pieces(model, rest, sizes, wiped)
    assert difference.abs().max() > 1e-3


@pytest.mark.parametrize("fields", [{}, MIXED], ids=["kvm", "mixed"])
def test_rows_can_be_reordered_repeated_and_selected(fields):
    model = make_model(**fields)
    ids, rest = random_ids(model, 3 * L + 2, batch=3), random_ids(model, 6, batch=1, seed=1)
    order = torch.tensor([2, 0, 0])

    def continued(change, rows):
        cache = KVMCache(model.config)
        run_in_pieces(model, ids, [3 * L + 2], cache)
        change(cache)
        return run_in_pieces(model, rest.expand(rows, -1), [1], cache)

    alone = [
        run_in_pieces(model, torch.cat([ids[i : i + 1], rest], 1), [100], KVMCache(model.config))[:, 3 * L + 2 :]
        for i in range(3)
    ]
    for change, rows in (
        (lambda cache: cache.reorder_cache(order), [2, 0, 0]),
        (lambda cache: cache.batch_select_indices(order), [2, 0, 0]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ):
        expected = torch.cat([alone[i] for i in rows])
        assert (continued(change, len(rows)) - expected).abs().max() <= 1e-9


@pytest.mark.parametrize("fields", [{}, MIXED, GPTALPHA], ids=["kvm", "mixed", "gptalpha"])
def test_a_reset_cache_starts_a_new_sequence(fields):
    model = make_model(**fields)
    cache = KVMCache(model.config)
    run_in_pieces(model, random_ids(model, 4 * L, batch=2), [9], cache)
    cache.reset()
    ids = random_ids(model, 4 * L, seed=3)
    fresh = run_in_pieces(model, ids, [9], KVMCache(model.config))
    assert torch.equal(run_in_pieces(model, ids, [9], cache), fresh)


@pytest.mark.parametrize("begin", [0, L + 1])  # of what is read in inference mode
@pytest.mark.parametrize("fields", [{}, dict(state_budget="fixed", count_bias=0.0)])
def test_a_prompt_read_in_inference_mode_is_continued_outside_of_it(fields, begin):
    model = make_model(**fields).requires_grad_(False)
    ids = random_ids(model, 4 * L)
    cache = KVMCache(model.config)
    if begin:
        model(ids[:, :begin], past_key_values=cache)
    with torch.inference_mode():
        model(ids[:, begin : 3 * L + 1], past_key_values=cache)
    logits = run_in_pieces(model, ids[:, 3 * L + 1 :], [1], cache)
    with torch.no_grad():
        assert (logits - model(ids, use_cache=False).logits[:, 3 * L + 1 :]).abs().max() <= 1e-9


@pytest.mark.parametrize("begin", [1, 2 * L])  # of what is read in inference mode
@pytest.mark.parametrize("count_bias", [0.0, 1.0])
def test_a_prompt_read_in_inference_mode_can_be_trained_on(count_bias, begin):
    model = make_model(state_budget="fixed", state_size=4, count_bias=count_bias)
    ids = random_ids(model, 5 * L)
    cache = KVMCache(model.config)
    with torch.no_grad():
        model(ids[:, :begin], past_key_values=cache)
    with torch.inference_mode():
        model(ids[:, begin : 3 * L], past_key_values=cache)
    model(ids[:, 3 * L :], past_key_values=cache).logits.sum().backward()
    assert model.model.embed_tokens.weight.grad.abs().max() > 0


def test_going_back_does_not_write_over_what_autograd_saved():
    model = make_model(num_key_value_heads=4)
    ids = random_ids(model, 4 * L)
    cache = KVMCache(model.config)
    cache.activate_past_recording()
    logits = model(ids[:, : 2 * L], past_key_values=cache).logits
    with torch.no_grad():
        model(ids[:, 2 * L : 3 * L + 3], past_key_values=cache)
        cache.crop(-L - 3)
        model(ids[:, :1], past_key_values=cache)
    logits.sum().backward()


@pytest.mark.parametrize(
    "trained", ["q_proj", "k_proj", "layers.0.self_attn.merge_gate", "layers.0.self_attn.state_norm", ""]
)
def test_what_autograd_saved_is_not_written_over(trained):
    """Several calls on one cache, some with gradients, some without, in any mix of trained and frozen parameters."""
    # One key head per query head: the kernel is given, and saves, the buffers themselves.
    model = make_model(num_key_value_heads=4, rope_parameters=HALF, region_temperatures=False)
    ids = random_ids(model, 4 * L + 2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)

    def gradients(*sizes):
        model.zero_grad()
        cache, logits, start = KVMCache(model.config), [], 0
        for size in sizes:
            logits.append(model(ids[:, start : start + size], past_key_values=cache).logits)
            start += size
        run_in_pieces(model, ids[:, start : start + 2], [1], cache)
        torch.cat(logits, 1).pow(2).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    # The two tokens without gradients fall into a chunk whose buffers autograd has saved.
    whole, pieces = gradients(4 * L - 2), gradients(L + 1, 2, 1, 3 * L - 6)
    assert len(whole) > 0
    assert all(torch.allclose(a, b, rtol=1e-7, atol=1e-8) for a, b in zip(whole, pieces, strict=True))


def test_a_cache_that_does_not_fit_is_refused():
    model = make_model()
    ids = random_ids(model, 3)
    cache = KVMCache(model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="holds 1 sequences, the input has 2"):
            model(ids.expand(2, -1), past_key_values=cache)
        with pytest.raises(ValueError, match="another model"):
            make_model(num_window_chunks=3)(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="another model"):
            make_model(num_key_value_heads=1)(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="dtype"):
            make_model(dtype=torch.float32)(ids, past_key_values=cache)
        for other in (
            DynamicCache(),
            KVMCache(
                KVMConfig(**{**SMALL, "layer_types": ["kvm_attention", "sliding_attention"], "sliding_window": 5})
            ),
            DynamicCache(config=KVMConfig(**{**SMALL, "num_hidden_layers": 3})),
            KVMCache(KVMConfig(**{**SMALL, "layer_types": ["kvm_attention", "full_attention"]})),
        ):
            with pytest.raises(ValueError, match="not made for this model's layers"):
                model(ids, past_key_values=other)
    assert cache.get_seq_length() == 3  # nothing was lost


def test_a_refused_crop_leaves_a_mixed_cache_as_it_was():
    model = make_model(num_hidden_layers=2, layer_types=["full_attention", "kvm_attention"])
    ids = random_ids(model, 3 * L)
    ours, plain = KVMCache(model.config), DynamicCache(config=model.config)
    for cache in (ours, plain):
        run_in_pieces(model, ids, [3 * L], cache)
        with pytest.raises(ValueError, match="cannot drop"):
            cache.crop(-2)
    assert [layer.get_seq_length() for layer in ours.layers] == [3 * L, 3 * L]
    with pytest.raises(ValueError, match="different numbers of tokens"):
        model(ids[:, :1], past_key_values=plain)  # transformers cropped its layer first


def test_a_cache_whose_layers_are_out_of_step_is_refused():
    """As a call that failed half-way leaves it."""
    model = make_model()
    cache = KVMCache(model.config)
    hook = model.model.layers[1].register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(random_ids(model, 5), past_key_values=cache)
    hook.remove()
    with pytest.raises(ValueError, match="failed half-way"):
        model(random_ids(model, 5), past_key_values=cache)


@pytest.mark.parametrize("breaks", ["readout", "absorb"])
def test_a_cache_whose_last_call_failed_inside_a_layer_is_refused(breaks, monkeypatch):
    model = make_model()
    cache = KVMCache(model.config)
    ids = random_ids(model, 30)
    run_in_pieces(model, ids[:, :20], [20], cache)
    with monkeypatch.context() as context:
        context.setattr(cache_kvm, breaks, lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids[:, 20:], past_key_values=cache)
    with pytest.raises(ValueError, match="failed half-way"):
        model(ids[:, 20:], past_key_values=cache)


def test_a_cache_is_made_from_a_kvm_config_only():
    for wrong in (make_model(), LlamaConfig()):
        with pytest.raises(TypeError, match="takes the config of its kind of model"):
            KVMCache(wrong)


def test_a_static_cache_is_refused_by_name():
    model = make_model()
    with pytest.raises(ValueError, match="static cache is not available"):
        generate(model, random_ids(model, 5), 3, cache_implementation="static")


@pytest.mark.parametrize("fields", [{}, MIXED], ids=["kvm", "mixed"])
def test_beams_equal_beams_without_a_cache(fields):
    model = make_model(**fields)
    ids = random_ids(model, 3 * L + 1, batch=2)
    options = dict(num_beams=3, num_return_sequences=2)
    assert torch.equal(generate(model, ids, 10, **options), generate(model, ids, 10, use_cache=False, **options))


def test_no_helper_that_transformers_has_removed_is_used():
    removed = "seen_tokens|get_usable_length|key_cache|value_cache|from_legacy_cache|cache_position|get_max_cache_shape"
    for path in Path(kvm_hf.__file__).parent.glob("*.py"):
        assert not re.findall(rf"\b({removed})\b", path.read_text()), path.name

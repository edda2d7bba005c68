"""The cache: its size, who makes it, row surgery, rewinding, copies and files, places, and what it refuses."""

import copy
import json
import os
import pickle
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_maglev import SMALL, make_model
from small_models import generate, random_ids, run_in_pieces
from small_models import make_model as make_kvm_model
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, LlamaConfig, StaticCache
from transformers.cache_utils import Cache, DynamicLayer, QuantizedLayer

from kvm_hf import KVMCache
from maglev_hf import MaglevCache, MaglevConfig, MaglevForCausalLM, MaglevModel, cache_maglev
from maglev_hf.modeling_maglev import CACHE_NAME

W, N, G, HEAD, D = 5, 3, 2, 6, 24
FIELDS = {
    "kv": {},
    "residual": dict(memory_injection="residual"),
    "mixed": dict(
        memory_injection="cross_attention", layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "none": dict(memory_injection="none"),
}
# What is compared is computed in the same order of tokens, so only kernels for other shapes round differently.
FLOAT64 = 1e-9
each_kind = pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)


def exact_model(**fields):
    """Memories one after the other, so that no tolerance of a search is in the results."""
    return make_model(rollout="sequential", **fields)


def filled(model, batch=2, length=5 * W + 1, make_cache=MaglevCache):
    """A cache after a left-padded prompt and one more token, and the mask of what it has seen."""
    ids = random_ids(model, length, batch)
    mask = torch.ones_like(ids)
    mask[0, : W + 2] = 0
    cache = make_cache(model.config)
    with torch.no_grad():
        model(ids[:, :-1], attention_mask=mask[:, :-1], past_key_values=cache)
        model(ids[:, -1:], attention_mask=mask, past_key_values=cache)
    return cache, mask


@torch.no_grad()
def continued(model, cache, mask, count=2 * W, seed=4, rows=None):
    """Logits of `count` more tokens, one per call; `rows` picks them from a batch of three."""
    ids, outputs = random_ids(model, count, mask.shape[0] if rows is None else 3, seed), []
    ids = ids if rows is None else ids[rows]
    for step in range(count):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        outputs.append(model(ids[:, step : step + 1], attention_mask=mask, past_key_values=cache).logits)
    return torch.cat(outputs, dim=1)


def tensors_of(cache):
    """Every tensor that some layer of the cache can reach, but for transformers' constant that holds the window."""
    held = []
    for layer in cache.layers:
        held += [
            tensor
            for name, tensor in vars(layer).items()
            if isinstance(tensor, torch.Tensor) and name != "_sliding_window_tensor" and tensor.numel()
        ]
    return held


def assert_same_tensors(one, other, tolerance=0.0):
    assert len(one.layers) == len(other.layers)
    for first, second in zip(one.layers, other.layers):
        for name, value in vars(first).items():
            if isinstance(value, torch.Tensor):
                assert value.shape == vars(second)[name].shape, name
                assert not value.numel() or (value - vars(second)[name]).abs().max() <= tolerance, name
            elif name in ("lengths", "seen", "cumulative_length", "is_initialized"):
                assert value == vars(second)[name], name


# Size


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [(None, torch.float32), (None, torch.bfloat16), ([1], torch.float32), ([3], torch.float64)],
    ids=["one call", "bfloat16", "tokens", "pieces"],
)
def test_bytes_are_those_of_the_formula_however_long_the_prompt_was(sizes, dtype):
    model = make_model(dtype=dtype, std=0.1)
    held = {}
    for length in (W + 1, 5 * W, 40 * W):
        cache = MaglevCache(model.config)
        run_in_pieces(model, random_ids(model, length, batch=2), sizes or [length], cache)
        held[length] = cache.nbytes
        assert sum(tensor.nbytes for tensor in tensors_of(cache)) == cache.nbytes
    formula = 2 * (N * 2 * G * HEAD * (W - 1) + D) * torch.empty((), dtype=dtype).element_size()
    assert set(held.values()) == {formula}, held


def test_memories_that_cross_attention_reads_take_as_much_room_as_the_tokens_themselves():
    model = make_model(memory_injection="cross_attention")
    held = set()
    for length in (W + 1, 5 * W, 40 * W):
        cache = MaglevCache(model.config)
        run_in_pieces(model, random_ids(model, length), [length], cache)
        held.add(cache.nbytes)
    assert held == {8 * (2 * N * 2 * G * HEAD * (W - 1) + D)}


@pytest.mark.parametrize("rollout", ["sequential", "fixed_point", "given memories"])
def test_nothing_keeps_a_long_prompt_alive(rollout):
    """A view into the keys of a whole prompt would, though it counts few bytes."""
    model = make_model(std=0.1)
    for length in (5 * W, 40 * W):
        ids, cache = random_ids(model, length), MaglevCache(model.config)
        with torch.no_grad():
            if rollout == "given memories":
                model.model(ids, fed=torch.randn(1, length, D, dtype=torch.float64), past_key_values=cache)
            else:
                model(ids, past_key_values=cache, rollout=rollout)
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors_of(cache)}
        held = sum(storage.nbytes() for storage in storages.values())
        # One more token per layer: transformers cuts off what left the window after it has joined the new one.
        assert held <= cache.nbytes + 8 * N * 2 * G * HEAD


# Who makes it


def test_plain_calls_and_generate_make_a_maglev_cache_by_themselves():
    model = make_model()
    ids = random_ids(model, 3 * W)
    with torch.no_grad():
        assert type(getattr(model(ids), CACHE_NAME)) is MaglevCache
        assert getattr(model(ids, use_cache=False), CACHE_NAME) is None
    cache = getattr(generate(model, ids, 3, return_dict_in_generate=True), CACHE_NAME)
    assert type(cache) is MaglevCache
    assert cache.lengths == [3 * W + 2] and cache.memory.shape == (1, D)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("depth", ["model", "base model"])
def test_both_names_of_the_cache_are_taken_everywhere(name, depth):
    """A cache under the other name must not vanish in `**kwargs`: every decode step would see one token."""
    model = exact_model()
    ids = random_ids(model, 3 * W)
    called = model if depth == "model" else model.model
    cache = MaglevCache(model.config)
    with torch.no_grad():
        whole = called(ids, use_cache=False)[0]
        called(ids[:, :-2], **{name: cache})
        rest = called(ids[:, -2:], **{name: cache})
    assert cache.get_seq_length() == 3 * W
    assert (whole[:, -2:] - rest[0]).abs().max() <= FLOAT64
    assert rest.past_key_values is cache


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_generate_takes_both_names_of_the_cache(name):
    if name == "cache" and CACHE_NAME != "cache":
        pytest.skip("this transformers knows `past_key_values` only")
    model = make_model()
    ids = random_ids(model, 3 * W)
    cache = MaglevCache(model.config)
    assert torch.equal(generate(model, ids, 5, **{name: cache}), generate(model, ids, 5))
    assert cache.get_seq_length() == ids.shape[1] + 4


def test_two_different_caches_under_the_two_names_are_refused():
    model = make_model()
    with pytest.raises(ValueError, match="two names for one thing"):
        model(random_ids(model, 3), cache=MaglevCache(model.config), past_key_values=MaglevCache(model.config))


@each_kind
def test_a_cache_that_transformers_makes_works_like_ours(fields):
    model = exact_model(**fields)
    cache, mask = filled(model)
    other, _ = filled(model, make_cache=lambda config: DynamicCache(config=config))
    assert [type(layer) for layer in other.layers] == [type(layer) for layer in cache.layers]
    order = torch.tensor([1, 0])
    for one in (cache, other):
        one.reorder_cache(order)
        one.activate_past_recording()
        continued(model, one, mask[order], seed=8)
        one.crop(-2 * W)
    assert torch.equal(continued(model, other, mask[order]), continued(model, cache, mask[order]))


@pytest.mark.parametrize("fields", [{}, FIELDS["mixed"]], ids=["kv", "mixed"])
def test_every_layer_sees_the_same_past_length_during_one_forward(fields):
    model = exact_model(**fields)
    seen = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["position_ids"].tolist()), with_kwargs=True
        )
    cache = MaglevCache(model.config)
    with torch.no_grad():
        model(random_ids(model, 2), past_key_values=cache, rollout="sequential")
    assert seen == [[[0]]] * N + [[[1]]] * N


# Rows


@each_kind
@pytest.mark.parametrize("padded", [False, True], ids=["uniform", "left-padded"])
def test_rows_can_be_reordered_repeated_and_selected_and_go_on_as_if_alone(fields, padded):
    model = exact_model(**fields)
    ids = random_ids(model, 3 * W + 2, batch=3)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, : W + 2], mask[2, : 3 * W] = 0, 0
    order = torch.tensor([2, 0, 0])
    with torch.no_grad():
        cache = MaglevCache(model.config)
        model(ids, attention_mask=mask, past_key_values=cache)
        alone = []
        for row in range(3):
            own, real = MaglevCache(model.config), ids[row : row + 1, mask[row] == 1]
            model(real, past_key_values=own)
            alone.append(own)
    for change, rows in (
        (lambda cache: cache.reorder_cache(order), [2, 0, 0]),
        (lambda cache: cache.batch_select_indices(order), [2, 0, 0]),
        (lambda cache: cache.batch_select_indices(torch.tensor([False, True, True])), [1, 2]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ):
        changed = copy.deepcopy(cache)
        change(changed)
        found = continued(model, changed, mask[rows], rows=rows)
        for number, row in enumerate(rows):
            own = copy.deepcopy(alone[row])
            ones = torch.ones(1, own.get_seq_length(), dtype=torch.long)
            wanted = continued(model, own, ones, rows=[row])
            assert (found[number] - wanted[0]).abs().max() <= FLOAT64, (row, number)


# Rewinding


@each_kind
@pytest.mark.parametrize("dropped", [1, W - 1, W, 4 * W])
@pytest.mark.parametrize("start", [1, W - 1, W, 4 * W + 1])
def test_dropped_tokens_leave_no_trace(fields, dropped, start):
    """Drafts come in pieces, and the cache goes on with other tokens."""
    model = exact_model(**fields)
    ids, rest = random_ids(model, start + dropped), random_ids(model, W, seed=1)
    cache, expected = MaglevCache(model.config), MaglevCache(model.config)
    run_in_pieces(model, ids[:, :start], [start], expected)
    run_in_pieces(model, ids[:, :start], [start], cache)
    cache.activate_past_recording()
    run_in_pieces(model, ids[:, start:], [3], cache)
    cache.crop(-dropped)
    assert cache.lengths in ([start], []) and cache.get_seq_length() == start
    logits = run_in_pieces(model, rest, [2], cache)
    assert (logits - run_in_pieces(model, rest, [2], expected)).abs().max() <= FLOAT64


def test_several_rounds_of_drafts_as_an_assistant_makes_them():
    """The whole prompt is recorded; after every round some of the drafts are dropped."""
    model = exact_model()
    kept = random_ids(model, 3 * W)
    cache = MaglevCache(model.config)
    cache.activate_past_recording()
    run_in_pieces(model, kept, [3 * W], cache)
    for accepted in (0, 2, 4, W + 1):
        drafts = random_ids(model, W + 2, seed=accepted)
        run_in_pieces(model, drafts, [W + 2], cache)
        cache.crop(accepted - W - 2)
        kept = torch.cat([kept, drafts[:, :accepted]], dim=1)
    rest = random_ids(model, W, seed=9)
    with torch.no_grad():
        whole = model(torch.cat([kept, rest], dim=1), use_cache=False).logits[:, kept.shape[1] :]
    assert (run_in_pieces(model, rest, [1], cache) - whole).abs().max() <= FLOAT64


def test_a_left_padded_batch_takes_back_what_came_after_its_padding():
    model = exact_model()
    cache, mask = filled(model)
    cache.activate_past_recording()
    first = continued(model, cache, mask)
    cache.crop(-2 * W)
    assert cache.lengths == mask.sum(-1).tolist()
    assert (continued(model, cache, mask) - first).abs().max() <= FLOAT64


@pytest.mark.parametrize(("rollout", "possible"), [("sequential", 2 * W), ("fixed_point", 0)])
def test_padding_itself_is_never_taken_back(rollout, possible):
    """Tokens of the same call that came after it are, where they were put into the cache one by one."""
    model = make_model(rollout=rollout)
    ids = random_ids(model, 3 * W, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :W] = 0
    cache = MaglevCache(model.config)
    cache.activate_past_recording()
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        before = copy.deepcopy(cache)
        with pytest.raises(ValueError, match=f"cannot drop its last {possible + 1} tokens"):
            cache.crop(-possible - 1)
        assert_same_tensors(cache, before)
        if possible:
            cache.crop(-possible)
            assert cache.lengths == [0, W]
            model(ids[:, W:], attention_mask=mask, past_key_values=cache)
            logits = [continued(model, one, mask) for one in (cache, before)]
            assert (logits[0] - logits[1]).abs().max() <= FLOAT64


@pytest.mark.parametrize("length", [1, W - 1, 3 * W])
def test_a_recorded_past_follows_its_rows(length):
    model = exact_model()
    ids, drafts = random_ids(model, length, batch=3), random_ids(model, W + 1, batch=3, seed=1)
    cache, expected = MaglevCache(model.config), MaglevCache(model.config)
    run_in_pieces(model, ids, [length], cache)
    run_in_pieces(model, ids[[2, 2, 0]], [length], expected)
    cache.activate_past_recording()
    run_in_pieces(model, drafts, [1], cache)
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    cache.crop(-W - 1)
    assert_same_tensors(cache, expected, FLOAT64)


@each_kind
@pytest.mark.parametrize("length", [W - 1, W, 5 * W])
def test_what_was_not_recorded_is_refused_and_nothing_changes(fields, length):
    model = exact_model(**fields)
    cache = MaglevCache(model.config)
    run_in_pieces(model, random_ids(model, length), [length], cache)
    before = copy.deepcopy(cache)
    if fields is FIELDS["none"] and length < W:
        cache.crop(-1)  # keys alone, and none of them has left the window
        assert cache.get_seq_length() == length - 1
        return
    with pytest.raises(ValueError, match="cannot drop its last 1 tokens"):
        cache.crop(-1)
    with pytest.raises(ValueError, match=r"negative number|cannot drop its last -2"):
        cache.crop(2)
    assert_same_tensors(cache, before)
    cache.activate_past_recording()
    run_in_pieces(model, random_ids(model, 2, seed=1), [1], cache)
    before = copy.deepcopy(cache)
    with pytest.raises(ValueError, match="cannot drop its last 3 tokens"):
        cache.crop(-3)
    assert_same_tensors(cache, before)
    cache.crop(-2)
    assert cache.get_seq_length() == length


@each_kind
def test_crop_0_trims_what_was_recorded_and_changes_nothing_else(fields):
    model = exact_model(**fields)
    ids, rest = random_ids(model, 6 * W), random_ids(model, W, seed=1)
    cache, plain = MaglevCache(model.config), MaglevCache(model.config)
    cache.activate_past_recording()
    for one in (cache, plain):
        run_in_pieces(model, ids, [4], one)
    assert cache.nbytes > plain.nbytes
    cache.crop(0)
    assert_same_tensors(cache, plain)
    with pytest.raises(ValueError, match="cannot drop"):
        cache.crop(-1)
    assert (run_in_pieces(model, rest, [1], cache) - run_in_pieces(model, rest, [1], plain)).abs().max() == 0


def test_what_is_recorded_of_memories_is_bounded(monkeypatch):
    monkeypatch.setattr(cache_maglev, "RECORDED_TOKENS", 2 * W)
    model = exact_model()
    cache = MaglevCache(model.config)
    cache.activate_past_recording()
    run_in_pieces(model, random_ids(model, 10 * W), [W + 2], cache)
    assert cache.layers[-1].tail.shape[1] == 2 * W + 1
    with pytest.raises(ValueError, match="cannot drop"):
        cache.crop(-2 * W - 1)
    cache.crop(-2 * W)
    assert cache.get_seq_length() == 8 * W


@each_kind
@pytest.mark.parametrize("length", [2, W, 4 * W])
@pytest.mark.parametrize("how", ["crop", "reset"])
def test_a_cache_without_tokens_takes_another_batch(fields, length, how):
    model = exact_model(**fields)
    cache = MaglevCache(model.config)
    cache.activate_past_recording()
    run_in_pieces(model, random_ids(model, length), [length], cache)
    cache.crop(torch.tensor(-length)) if how == "crop" else cache.reset()
    assert cache.get_seq_length() == 0 and cache.lengths == [] and cache.nbytes == 0
    assert fields is FIELDS["none"] or cache.memory is None
    ids = random_ids(model, 3 * W, batch=3)
    fresh = run_in_pieces(model, ids, [W], MaglevCache(model.config))
    assert torch.equal(run_in_pieces(model, ids, [W], cache), fresh)


def test_numbers_of_tokens_are_whole():
    with pytest.raises(TypeError):
        MaglevCache(make_model().config).crop(-1.5)


# Copies, pickles, files


@each_kind
@pytest.mark.parametrize("made_by", ["us", "transformers"])
def test_copies_pickles_and_files_continue_bit_for_bit_and_leave_the_original_alone(fields, made_by, tmp_path):
    model = make_model(**fields)
    make_cache = MaglevCache if made_by == "us" else lambda config: DynamicCache(config=config)
    cache, mask = filled(model, make_cache=make_cache)
    others = {"copy": copy.deepcopy(cache), "pickle": pickle.loads(pickle.dumps(cache))}
    if made_by == "us":
        cache.save_pretrained(tmp_path)
        others["file"] = MaglevCache.from_pretrained(tmp_path, model.config)
    outputs = {name: continued(model, other, mask) for name, other in others.items()}
    assert cache.get_seq_length() == mask.shape[1]
    expected = continued(model, cache, mask)
    for name, logits in outputs.items():
        assert torch.equal(logits, expected), name


def test_a_cache_filled_with_gradients_can_be_copied():
    model = make_model()
    ids = random_ids(model, 4 * W)
    cache = MaglevCache(model.config)
    model(ids[:, : 3 * W], past_key_values=cache)
    other = copy.deepcopy(cache)
    first, second = (model(ids[:, 3 * W :], past_key_values=kept).logits for kept in (cache, other))
    assert torch.equal(first, second)
    second.sum().backward()
    assert model.model.embed_tokens.weight.grad.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [1, W, 6 * W])
def test_saved_tensors_are_those_that_were_held(dtype, length, tmp_path):
    model = make_model(dtype=dtype, **FIELDS["mixed"])
    cache = MaglevCache(model.config)
    run_in_pieces(model, random_ids(model, length), [length], cache)
    cache.save_pretrained(tmp_path)
    loaded = MaglevCache.from_pretrained(tmp_path, model.config)
    assert loaded.nbytes == cache.nbytes and loaded.lengths == cache.lengths
    assert_same_tensors(loaded, cache)
    assert {tensor.dtype for tensor in tensors_of(loaded)} == {dtype}


def test_a_cache_that_records_can_be_saved_and_what_is_loaded_goes_on(tmp_path):
    model = exact_model()
    cache, mask = filled(model)
    plain = copy.deepcopy(cache)
    cache.activate_past_recording()
    steps = torch.cat([mask, torch.ones_like(mask[:, :3])], dim=1)
    for one in (cache, plain):
        continued(model, one, mask, count=3, seed=8)
    cache.save_pretrained(tmp_path)
    loaded = MaglevCache.from_pretrained(tmp_path, model.config)
    with pytest.raises(ValueError, match="cannot drop"):
        loaded.crop(-1)
    expected = continued(model, plain, steps)
    assert (continued(model, loaded, steps) - expected).abs().max() <= FLOAT64
    assert loaded.nbytes == plain.nbytes
    plain.crop(0)  # nothing to do
    plain.save_pretrained(tmp_path / "plain")
    sizes = [(folder / "cache.safetensors").stat().st_size for folder in (tmp_path, tmp_path / "plain")]
    assert abs(sizes[0] - sizes[1]) < 64  # the numbers in the header


def test_an_empty_cache_can_be_saved(tmp_path):
    model = make_model()
    MaglevCache(model.config).save_pretrained(tmp_path / "new" / "folder")
    loaded = MaglevCache.from_pretrained(tmp_path / "new" / "folder", model.config)
    ids = random_ids(model, 3 * W)
    fresh = run_in_pieces(model, ids, [4], MaglevCache(model.config))
    assert torch.equal(run_in_pieces(model, ids, [4], loaded), fresh)


def test_a_conversation_survives_a_restart(tmp_path):
    """In another process, which knows nothing but the two folders."""
    model = make_model(dtype=torch.float32)
    cache, mask = filled(model)
    model.save_pretrained(tmp_path / "model")
    cache.save_pretrained(tmp_path / "cache")
    code = (
        "import sys, torch; from test_maglev_cache import continued; from maglev_hf import MaglevCache, MaglevForCausalLM\n"
        "model = MaglevForCausalLM.from_pretrained(sys.argv[1]).eval(); torch.set_num_threads(1)\n"
        "cache = MaglevCache.from_pretrained(sys.argv[2], model.config)\n"
        "torch.save(continued(model, cache, torch.load(sys.argv[3])), sys.argv[4])\n"
    )
    torch.save(mask, tmp_path / "mask")
    paths = [str(tmp_path / name) for name in ("model", "cache", "mask", "logits")]
    subprocess.run([sys.executable, "-c", code, *paths], check=True, env=os.environ | {"PYTHONPATH": python_path()})
    assert torch.equal(torch.load(tmp_path / "logits"), continued(model, cache, mask))


def python_path():
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    own = [os.path.join(tests, "maglev"), tests, os.path.dirname(tests)]
    return os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture
def saved(tmp_path):
    model = make_model()
    cache, _ = filled(model)
    cache.save_pretrained(tmp_path)
    return model, tmp_path, tmp_path / "cache.safetensors"


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, -1])
def test_a_file_that_was_cut_short_is_refused(saved, kept):
    model, folder, file = saved
    whole = file.read_bytes()
    file.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
    with pytest.raises(ValueError, match="damaged"):
        MaglevCache.from_pretrained(folder, model.config)


def test_other_files_are_refused(saved, tmp_path):
    model, folder, file = saved
    with pytest.raises(FileNotFoundError, match="save_pretrained"):
        MaglevCache.from_pretrained(tmp_path / "elsewhere", model.config)
    save_file(load_file(file), file)  # the same tensors without what we say of them
    with pytest.raises(ValueError, match="not written by `MaglevCache"):
        MaglevCache.from_pretrained(folder, model.config)


def test_the_caches_of_the_two_kinds_of_model_are_not_taken_for_each_other(saved, tmp_path):
    model, folder, _ = saved
    kvm = make_kvm_model()
    cache = KVMCache(kvm.config)
    run_in_pieces(kvm, random_ids(kvm, 20), [20], cache)
    cache.save_pretrained(tmp_path / "kvm")
    with pytest.raises(ValueError, match="not written by `MaglevCache"):
        MaglevCache.from_pretrained(tmp_path / "kvm", model.config)
    with pytest.raises(ValueError, match="not written by `KVMCache"):
        KVMCache.from_pretrained(folder, kvm.config)
    with pytest.raises(TypeError, match="MaglevCache` takes the config of its kind"):
        MaglevCache.from_pretrained(folder, kvm.config)


def rewrite(file, change):
    """The file with `change` made to its facts and tensors."""
    with safe_open(file, "pt") as opened:
        facts = json.loads(opened.metadata()["maglev_cache"])
    tensors = load_file(file)
    change(facts, tensors)
    save_file(tensors, file, metadata={"maglev_cache": json.dumps(facts)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda facts, tensors: facts.clear(), "not written by"),
        (lambda facts, tensors: facts.update(version=2), "version 2"),
        (lambda facts, tensors: facts["layers"].pop(), "3 layers of 4"),
        (lambda facts, tensors: tensors.pop("3.tail"), "lacks tensors of layer 3"),
        (lambda facts, tensors: facts["layers"][3].update(lengths=[1]), "do not fit together"),
        (lambda facts, tensors: tensors.update({"3.tail": tensors["3.tail"][..., 1:].clone()}), "do not fit together"),
    ],
    ids=["empty", "version", "a layer less", "no memory", "lengths", "memory"],
)
def test_a_file_that_contradicts_itself_is_refused(saved, change, words):
    model, folder, file = saved
    rewrite(file, change)
    with pytest.raises(ValueError, match=words):
        MaglevCache.from_pretrained(folder, model.config)


@pytest.mark.parametrize(
    "fields",
    [
        dict(sliding_window=6),
        dict(memory_injection="cross_attention"),
        dict(num_hidden_layers=2),
        dict(use_qk_norm=False),
        dict(rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
        dict(norm_embeddings=False),
    ],
    ids=str,
)
def test_the_cache_of_another_model_is_refused_by_what_differs(saved, fields):
    _, folder, _ = saved
    with pytest.raises(ValueError, match=rf"another model: .*{next(iter(fields))}"):
        MaglevCache.from_pretrained(folder, make_model(**fields).config)


def test_what_training_changes_in_a_config_does_not_make_another_model(saved):
    _, folder, _ = saved
    MaglevCache.from_pretrained(
        folder, make_model(vocab_size=64, rollout="sequential", share_prefiller=False, consistency_weight=3).config
    )


@pytest.mark.parametrize("layer", [0, 2, 3])
def test_layers_out_of_step_are_neither_saved_nor_continued(layer, tmp_path):
    model = make_model()
    cache, mask = filled(model)
    name = "seen" if layer == 3 else "cumulative_length"
    setattr(cache.layers[layer], name, getattr(cache.layers[layer], name) + 1)
    with pytest.raises(ValueError, match="failed half-way"):
        cache.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="failed half-way"):
        continued(model, cache, mask)


# A call that fails


@pytest.mark.parametrize("rollout", ["sequential", "fixed_point"])
@pytest.mark.parametrize("gradients", [False, True], ids=["", "with gradients"])
@pytest.mark.parametrize("layer", [0, N - 1])
def test_a_search_that_failed_half_way_leaves_the_cache_as_it_was(rollout, gradients, layer):
    """Many calls of each layer make one forward; the third of them breaks, in the first or the last layer. Only tokens
    that were finished one by one stay, as if they had been given alone."""
    model = make_model()
    ids = random_ids(model, 4 * W)
    cache, plain = MaglevCache(model.config), MaglevCache(model.config)
    for one in (cache, plain):
        run_in_pieces(model, ids[:, : 2 * W], [2 * W], one)
    calls = []

    def breaks(*args):
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError

    hook = model.model.layers[layer].register_forward_pre_hook(breaks)
    with torch.set_grad_enabled(gradients), pytest.raises(ZeroDivisionError):
        model(ids[:, 2 * W :], past_key_values=cache, rollout=rollout)
    hook.remove()
    done = 2 * W if rollout == "fixed_point" or gradients else 2 * W + 2
    assert {int(held.get_seq_length()) for held in cache.layers} == {done}
    if done > 2 * W:
        run_in_pieces(model, ids[:, 2 * W : done], [1], plain)
    assert_same_tensors(cache, plain)
    rest = ids[:, done:]
    assert torch.equal(run_in_pieces(model, rest, [3], cache), run_in_pieces(model, rest, [3], plain))


@each_kind
def test_a_step_that_failed_inside_a_layer_leaves_the_cache_as_it_was(fields, monkeypatch):
    model = make_model(**fields)
    cache, mask = filled(model)
    before = copy.deepcopy(cache)
    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[1].mlp, "forward", lambda hidden: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            continued(model, cache, mask)
    assert_same_tensors(cache, before)
    assert torch.equal(continued(model, cache, mask), continued(model, before, mask))


# Refusals


def test_a_cache_that_was_not_made_for_the_model_is_refused_in_a_sentence():
    model = make_model()
    ids = random_ids(model, 3)

    def config(**others):
        return MaglevConfig(**{**SMALL, **others})

    with torch.no_grad():
        model(ids, past_key_values=MaglevCache(config()))
        for other in (
            DynamicCache(),
            DynamicCache(config=LlamaConfig(num_hidden_layers=3)),
            MaglevCache(config(sliding_window=W + 1)),
            MaglevCache(config(num_hidden_layers=2)),
            MaglevCache(config(num_hidden_layers=4)),
            MaglevCache(config(layer_types=["sliding_attention", "full_attention", "sliding_attention"])),
            KVMCache(make_kvm_model().config),
        ):
            with pytest.raises(ValueError, match=r"not made for this model's layers|is not available"):
                model(ids, past_key_values=other)
        with pytest.raises(ValueError, match="not made for this model's layers"):
            make_model(memory_injection="none")(ids, past_key_values=MaglevCache(config()))
        # The same layers, filled with what means something else.
        for fields in (dict(memory_injection="residual"), dict(rope_parameters={"rope_theta": 7.0}), dict(head_dim=8)):
            with pytest.raises(ValueError, match="its config says otherwise"):
                model(ids, past_key_values=MaglevCache(config(**fields)))
        with pytest.raises(ValueError, match="StaticSlidingWindowLayer is not available"):
            model(ids, past_key_values=StaticCache(config=model.config, max_cache_len=20))


def test_quantized_layers_are_refused():
    class Quantized(QuantizedLayer):
        """transformers' own needs a library of its own to round; it is refused before it does."""

        def _quantize(self, tensor, axis):
            return tensor

        _dequantize = _quantize

    model = make_model(layer_types=["full_attention"] * N)
    with pytest.raises(ValueError, match="Quantized is not available"):
        model(random_ids(model, 3), past_key_values=Cache(layers=[Quantized() for _ in range(N)]))
    model(random_ids(model, 3), past_key_values=Cache(layers=[DynamicLayer() for _ in range(N)]))


def test_a_cache_that_a_model_without_memory_filled_is_refused():
    plain, model = make_model(memory_injection="none"), make_model()
    cache = DynamicCache(config=plain.config)
    run_in_pieces(plain, random_ids(plain, 3 * W), [3 * W], cache)
    with pytest.raises(ValueError, match="filled by a model without memory"):
        model(random_ids(model, 1), past_key_values=cache)
    assert len(cache.layers) == N


def test_a_batch_of_another_size_is_refused_and_nothing_lost():
    model = make_model()
    cache, _ = filled(model)
    before = copy.deepcopy(cache)
    with pytest.raises(ValueError, match="holds 2 sequences, the input has 3"):
        model(random_ids(model, 1, batch=3), past_key_values=cache)
    assert_same_tensors(cache, before)


def test_a_cache_is_made_from_a_maglev_config_only():
    for wrong in (make_model(), LlamaConfig(), make_kvm_model().config):
        with pytest.raises(TypeError, match="takes the config of its kind of model"):
            MaglevCache(wrong)


# Places


def memory_layer(record=True):
    model = make_model()
    cache, mask = filled(model)
    if record:
        cache.activate_past_recording()
    continued(model, cache, mask, count=3)
    layer = cache.layers[-1]
    assert layer.tail.shape[1] == (4 if record else 1)
    return layer


def test_a_memory_stays_where_it_is_when_layers_are_offloaded_and_comes_with_a_prefetch():
    """It is read before the first layer runs. Offloading itself needs CUDA."""
    layer = memory_layer()
    held = layer.tail

    class Moves(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            assert func is not torch.Tensor.to
            return func(*args, **(kwargs or {}))

    with Moves():
        layer.offload()
    assert layer.tail is held
    layer.device = torch.device("meta")
    layer.prefetch()
    assert layer.tail.device.type == "meta"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_a_memory_is_read_as_follows_the_model(dtype):
    layer = memory_layer()
    like = torch.zeros(2, 7, D, dtype=dtype)
    read = layer.last(like)
    assert read.dtype == dtype and read.shape == (2, 1, D)
    assert torch.equal(read, layer.tail[:, -1:].to(dtype))
    layer.reset()
    assert torch.equal(layer.last(like), torch.zeros(2, 1, D, dtype=dtype))
    assert layer.last(like.to("meta")).device.type == "meta"


class OffloadedCache(MaglevCache):
    """What transformers' offloading does to the keys and values of a cache, on one device: outside of `update()` they
    are away. Its own needs CUDA."""

    def update(self, keys, values, layer_idx, *args, **kwargs):
        layer = self.layers[layer_idx]
        if layer_idx == N:
            return super().update(keys, values, layer_idx, *args, **kwargs)
        if layer.is_initialized:
            layer.keys, layer.values = layer.away
        output = super().update(keys, values, layer_idx, *args, **kwargs)
        layer.away = layer.keys, layer.values
        layer.keys, layer.values = layer.keys.to("meta"), layer.values.to("meta")
        return output


@pytest.mark.parametrize("rollout", ["sequential", "fixed_point"])
def test_keys_and_values_are_touched_inside_update_only(rollout):
    model = make_model(rollout=rollout)
    plain, mask = filled(model)
    offloaded, _ = filled(model, make_cache=OffloadedCache)
    assert {layer.keys.device.type for layer in offloaded.layers[:N]} == {"meta"}
    assert torch.equal(continued(model, offloaded, mask), continued(model, plain, mask))


def test_a_loaded_cache_follows_the_model(tmp_path):
    model = make_model()
    cache = MaglevCache(model.config)
    run_in_pieces(model, random_ids(model, 5 * W), [5 * W], cache)
    cache.save_pretrained(tmp_path)
    loaded = MaglevCache.from_pretrained(tmp_path, model.config, device="meta")
    assert {tensor.device.type for tensor in tensors_of(loaded)} == {"meta"}
    with torch.no_grad():
        model.to("meta")(torch.zeros(1, 1, dtype=torch.long, device="meta"), past_key_values=loaded)
    assert loaded.get_seq_length() == 5 * W + 1
    assert {tensor.device.type for tensor in tensors_of(loaded)} == {"meta"}


def test_a_memory_moves_to_where_it_is_made():
    layer = memory_layer(record=True)
    layer.update(torch.zeros(2, 1, D, dtype=torch.float64, device="meta"), None)
    assert layer.device.type == layer.tail.device.type == "meta" and layer.tail.shape[1] == 5


@pytest.mark.filterwarnings("ignore:The following device_map keys")  # accelerate knows submodules only
def test_layers_on_disk_keep_their_cache_and_generate_the_same(tmp_path):
    model = make_model(dtype=torch.float32, use_residual_scales=True)
    model.save_pretrained(tmp_path / "model")
    places = {f"model.layers.{number}": "disk" if number == 1 else "cpu" for number in range(N)}
    others = ("embed_tokens", "norm", "rotary_emb", "residual_scale", "embedding_scale")
    split = MaglevForCausalLM.from_pretrained(
        tmp_path / "model",
        device_map={**places, **{f"model.{name}": "cpu" for name in others}, "lm_head": "cpu"},
        offload_folder=tmp_path / "offload",
    )
    cache, mask = filled(model)
    other, _ = filled(split)
    assert all(tensor.device.type == "cpu" for tensor in tensors_of(other))
    assert torch.equal(continued(split, other, mask), continued(model, cache, mask))


def test_the_base_model_alone_fills_a_cache_that_the_whole_model_continues():
    model = exact_model()
    base = MaglevModel(model.config).double().eval()
    base.load_state_dict(model.model.state_dict())
    ids = random_ids(model, 4 * W)
    cache = MaglevCache(model.config)
    with torch.no_grad():
        base(ids[:, : 3 * W], past_key_values=cache)
        whole = model(ids, use_cache=False).logits[:, 3 * W :]
    assert (run_in_pieces(model, ids[:, 3 * W :], [2], cache) - whole).abs().max() <= FLOAT64

"""Where a cache lives and how it is kept: devices, offloading, copies, pickles, files, and what it says of itself."""

import copy
import importlib
import json
import os
import pickle
import subprocess
import sys
from types import ModuleType
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_models import GPTALPHA, HALF, MIXED, SMALL, make_model, random_ids, run_in_pieces
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING

import kvm_hf
from kvm_hf import KVMCache, KVMConfig, KVMForCausalLM

C, L = 4, 8
FIELDS = {"positional": {}, "normalized": dict(rope_parameters=HALF), "mixed": MIXED, "gptalpha": GPTALPHA}


def filled(model, batch=2, length=5 * L + 1, make_cache=KVMCache):
    """A cache after a left-padded prompt and one more token, and the mask of what it has seen."""
    ids = random_ids(model, length, batch)
    mask = torch.ones_like(ids)
    mask[0, : L + 2] = 0
    cache = make_cache(model.config)
    with torch.no_grad():
        model(ids[:, :-1], attention_mask=mask[:, :-1], past_key_values=cache)
        model(ids[:, -1:], attention_mask=mask, past_key_values=cache)
    return cache, mask


@torch.no_grad()
def continued(model, cache, mask, count=2 * L, seed=4):
    """Logits of `count` more tokens, one per call."""
    ids, outputs = random_ids(model, count, mask.shape[0], seed), []
    for step in range(count):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        outputs.append(model(ids[:, step : step + 1], attention_mask=mask, past_key_values=cache).logits)
    return torch.cat(outputs, dim=1)


def reachable_tensors(value):
    """Every tensor in an object's attributes, however deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from reachable_tensors(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from reachable_tensors(entry)


def recording_layer():
    model = make_model(rope_parameters=HALF, count_bias=1.0)
    cache, mask = filled(model)
    cache.activate_past_recording()
    continued(model, cache, mask)
    layer = cache.layers[0]
    assert layer.past and layer.bias is not None and layer.gates is not None
    return layer


# Copies, pickles, files


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_copies_pickles_and_files_continue_as_the_original_and_leave_it_alone(fields, tmp_path):
    model = make_model(**fields)
    cache, mask = filled(model)
    cache.save_pretrained(tmp_path)
    others = {
        "copy": copy.deepcopy(cache),
        "pickle": pickle.loads(pickle.dumps(cache)),
        "file": KVMCache.from_pretrained(tmp_path, model.config),
    }
    outputs = {name: continued(model, other, mask) for name, other in others.items()}
    assert cache.get_seq_length() == mask.shape[1]
    expected = continued(model, cache, mask)
    for name, logits in outputs.items():
        assert torch.equal(logits, expected), name


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_a_copy_and_its_original_go_on_side_by_side(fields):
    """In turns and with other tokens: neither may write into what the other holds."""
    model = make_model(**fields)
    cache, mask = filled(model)
    caches = [cache, copy.deepcopy(cache)]
    expected = [continued(model, copy.deepcopy(cache), mask, seed=seed) for seed in (4, 5)]
    outputs = ([], [])
    for step in range(2 * L):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        for kept, output, seed in zip(caches, outputs, (4, 5)):
            token = random_ids(model, 2 * L, 2, seed)[:, step : step + 1]
            with torch.no_grad():
                output.append(model(token, attention_mask=mask, past_key_values=kept).logits)
    for output, logits in zip(outputs, expected):
        assert torch.equal(torch.cat(output, dim=1), logits)


def test_a_cache_made_by_transformers_can_be_copied_too():
    model = make_model()
    cache, mask = filled(model, make_cache=lambda config: DynamicCache(config=config))
    other = copy.deepcopy(cache)
    assert torch.equal(continued(model, other, mask), continued(model, cache, mask))


@pytest.mark.parametrize("fields", [{}, MIXED, GPTALPHA], ids=["kvm", "mixed", "gptalpha"])
def test_a_cache_filled_with_gradients_can_be_copied(fields):
    model = make_model(**fields)
    ids = random_ids(model, 4 * L)
    cache = KVMCache(model.config)
    model(ids[:, : 3 * L], past_key_values=cache)
    other = copy.deepcopy(cache)
    first, second = (model(ids[:, 3 * L :], past_key_values=kept).logits for kept in (cache, other))
    assert torch.equal(first, second)
    second.sum().backward()
    assert model.model.embed_tokens.weight.grad.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [2, L, 6 * L])
def test_saved_tensors_are_those_that_were_held(dtype, length, tmp_path):
    model = make_model(dtype=dtype)
    cache = KVMCache(model.config)
    run_in_pieces(model, random_ids(model, length), [length], cache)
    cache.save_pretrained(tmp_path)
    loaded = KVMCache.from_pretrained(tmp_path, model.config)
    assert loaded.nbytes == cache.nbytes and loaded.rows == cache.rows and loaded.lengths == cache.lengths
    for layer, saved in zip(loaded.layers, cache.layers):
        for name, tensor in saved.tensors().items():
            assert torch.equal(layer.tensors()[name], tensor) and layer.tensors()[name].dtype == tensor.dtype


def test_an_empty_cache_can_be_saved(tmp_path):
    model = make_model()
    KVMCache(model.config).save_pretrained(tmp_path / "new" / "folder")
    loaded = KVMCache.from_pretrained(tmp_path / "new" / "folder", model.config)
    ids = random_ids(model, 3 * L)
    assert torch.equal(run_in_pieces(model, ids, [5], loaded), run_in_pieces(model, ids, [5], KVMCache(model.config)))


def test_a_conversation_survives_a_restart(tmp_path):
    """In another process, which knows nothing but the two folders."""
    model = make_model(dtype=torch.float32)
    cache, mask = filled(model)
    model.save_pretrained(tmp_path / "model")
    cache.save_pretrained(tmp_path / "cache")
    code = (
        "import sys, torch; from test_keeping import continued; from kvm_hf import KVMCache, KVMConfig, KVMForCausalLM\n"
        "model = KVMForCausalLM.from_pretrained(sys.argv[1]).eval(); torch.set_num_threads(1)\n"
        "cache = KVMCache.from_pretrained(sys.argv[2], model.config)\n"
        "torch.save(continued(model, cache, torch.load(sys.argv[3])), sys.argv[4])\n"
    )
    torch.save(mask, tmp_path / "mask")
    paths = [str(tmp_path / name) for name in ("model", "cache", "mask", "logits")]
    subprocess.run([sys.executable, "-c", code, *paths], check=True, env=os.environ | {"PYTHONPATH": python_path()})
    assert torch.equal(torch.load(tmp_path / "logits"), continued(model, cache, mask))


def python_path():
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    own = [os.path.join(tests, "kvm"), tests, os.path.dirname(tests)]
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
        KVMCache.from_pretrained(folder, model.config)


def test_other_files_are_refused(saved, tmp_path):
    model, folder, file = saved
    with pytest.raises(FileNotFoundError, match="save_pretrained"):
        KVMCache.from_pretrained(tmp_path / "elsewhere", model.config)
    tensors = load_file(file)
    save_file(tensors, file)  # the same tensors without what we say of them
    with pytest.raises(ValueError, match="not written by"):
        KVMCache.from_pretrained(folder, model.config)


def rewrite(file, change):
    """The file with `change` made to its facts and tensors."""
    with safe_open(file, "pt") as opened:
        facts = json.loads(opened.metadata()["kvm_cache"])
    tensors = load_file(file)
    change(facts, tensors)
    save_file(tensors, file, metadata={"kvm_cache": json.dumps(facts)})


def test_a_file_of_another_version_or_with_tensors_missing_is_refused(saved):
    model, folder, file = saved
    rewrite(file, lambda facts, tensors: tensors.pop("1.state.radius"))
    with pytest.raises(ValueError, match="lacks tensors of layer 1"):
        KVMCache.from_pretrained(folder, model.config)
    rewrite(file, lambda facts, tensors: facts.update(version=2))
    with pytest.raises(ValueError, match="version 2"):
        KVMCache.from_pretrained(folder, model.config)


@pytest.mark.parametrize(
    "fields",
    [
        dict(state_size=5),
        dict(num_hidden_layers=3),
        dict(layer_types=["kvm_attention", "full_attention"]),
        dict(rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
        dict(hidden_size=32),
    ],
    ids=str,
)
def test_the_cache_of_another_model_is_refused_by_what_differs(saved, fields):
    _, folder, _ = saved
    with pytest.raises(ValueError, match=rf"another model: .*{next(iter(fields))}"):
        KVMCache.from_pretrained(folder, make_model(**fields).config)


def test_saving_again_replaces_the_file_once_the_new_one_is_whole(saved, monkeypatch):
    model, folder, file = saved
    whole = file.read_bytes()
    cache, _ = filled(model, batch=3)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cache.save_pretrained(folder)
    assert file.read_bytes() == whole
    cache.save_pretrained(folder)
    assert [path.name for path in folder.iterdir()] == ["cache.safetensors"]
    assert KVMCache.from_pretrained(folder, model.config).lengths == cache.lengths


def test_a_cache_that_nobody_knows_the_contents_of_is_not_saved(tmp_path):
    model = make_model()
    cache, _ = filled(model)
    cache.layers[1].unfinished = True
    with pytest.raises(ValueError, match="failed half-way"):
        cache.save_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda facts, tensors: facts.clear(), "not written by"),
        (lambda facts, tensors: facts.pop("layers"), "not written by"),
        (lambda facts, tensors: facts["layers"].pop(), "1 layers of 2"),
        (lambda facts, tensors: facts["layers"][0].update(rows=[99, 99]), "do not fit together"),
        (lambda facts, tensors: facts["layers"][1].update(fills=[1]), "do not fit together"),
        (lambda facts, tensors: tensors.update({"0.keys": tensors["0.keys"][:, :, 1:].clone()}), "do not fit together"),
        (lambda facts, tensors: tensors.update({"1.state.count": tensors["1.state.count"][:1].clone()}), "do not fit"),
    ],
    ids=["empty", "no layers", "a layer less", "rows", "fills", "keys", "state"],
)
def test_a_file_that_contradicts_itself_is_refused(saved, change, words):
    model, folder, file = saved
    rewrite(file, change)
    with pytest.raises(ValueError, match=words):
        KVMCache.from_pretrained(folder, model.config)


def test_a_device_that_is_not_there_is_not_the_files_fault(saved):
    model, folder, _ = saved
    with pytest.raises(RuntimeError, match="device"):
        KVMCache.from_pretrained(folder, model.config, device="nowhere")
    assert KVMCache.from_pretrained(folder, model.config, device="meta").layers[0].keys.device.type == "meta"


def test_layers_out_of_step_are_not_saved(tmp_path):
    model = make_model()
    cache, _ = filled(model)
    cache.layers[0].seen += 1
    with pytest.raises(ValueError, match="failed half-way"):
        cache.save_pretrained(tmp_path)


def test_more_words_in_the_vocabulary_do_not_make_another_model(saved):
    _, folder, _ = saved
    KVMCache.from_pretrained(folder, make_model(vocab_size=64).config)


def test_a_config_of_ones_own_has_the_identity_of_all_its_fields():
    class MyConfig(KVMConfig):
        pass

    config = MyConfig(**SMALL)
    assert KVMCache(config).identity == KVMCache(KVMConfig(**SMALL)).identity
    assert config.head_dim == KVMCache(config).identity["head_dim"]


# Placement


def test_everything_that_a_layer_holds_moves_with_it():
    layer = recording_layer()
    held = list(reachable_tensors(vars(layer)))

    class Moves(TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.moved = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.Tensor.to:
                assert args[1] == "cpu"
                self.moved.append(id(args[0]))
            return func(*args, **(kwargs or {}))

    with Moves() as moves:
        layer.offload()
    assert {id(tensor) for tensor in held} <= set(moves.moved)

    layer.device = torch.device("meta")
    layer.prefetch()
    assert {tensor.device.type for tensor in reachable_tensors(vars(layer))} == {"meta"}


class OffloadedCache(KVMCache):
    """What transformers' offloading does to a cache, on one device: outside of `update()` a layer's tensors are away.
    Its own needs CUDA."""

    def update(self, keys, values, layer_idx, *args, **kwargs):
        layer = self.layers[layer_idx]
        away = self.__dict__.setdefault("away", {})
        if layer_idx in away:
            back = iter(away[layer_idx])
            layer.map(lambda tensor: next(back))
        output = super().update(keys, values, layer_idx, *args, **kwargs)
        away[layer_idx] = []

        def move(tensor):
            away[layer_idx].append(tensor)
            return tensor.to("meta")

        layer.map(move)
        return output


@pytest.mark.parametrize(
    "fields",
    [{}, dict(rope_parameters=HALF), dict(backbone="gptalpha")],
    ids=["positional", "normalized", "gptalpha"],
)
def test_the_state_is_touched_inside_update_only(fields):
    model = make_model(**fields)
    plain, mask = filled(model)
    offloaded, _ = filled(model, make_cache=OffloadedCache)
    assert {tensor.device.type for tensor in offloaded.layers[0].tensors().values()} == {"meta"}
    assert torch.equal(continued(model, offloaded, mask), continued(model, plain, mask))


def test_layers_on_disk_keep_their_cache_and_generate_the_same(tmp_path):
    model = make_model(dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"}
    split = KVMForCausalLM.from_pretrained(
        tmp_path / "model",
        device_map={**places, "model.rotary_emb": "cpu", "lm_head": "cpu"},
        offload_folder=tmp_path / "offload",
    )
    cache, mask = filled(model)
    other, _ = filled(split)
    assert all(layer.keys.device.type == "cpu" for layer in other.layers)
    assert torch.equal(continued(split, other, mask), continued(model, cache, mask))


def test_a_loaded_cache_follows_the_models_layers(tmp_path):
    """`from_pretrained` cannot know where they are, so a layer moves when it is used."""
    model = make_model()
    cache = KVMCache(model.config)
    run_in_pieces(model, random_ids(model, 5 * L), [5 * L], cache)
    cache.save_pretrained(tmp_path)
    loaded = KVMCache.from_pretrained(tmp_path, model.config)
    with torch.no_grad():
        model.to("meta")(torch.zeros(1, C + 1, dtype=torch.long, device="meta"), past_key_values=loaded)
    assert loaded.get_seq_length() == 5 * L + C + 1
    assert {tensor.device.type for layer in loaded.layers for tensor in layer.tensors().values()} == {"meta"}


def test_layers_of_another_copy_of_this_code_are_known_as_ours(monkeypatch, tmp_path):
    """Layer types are registered process-wide: with a folder's code beside the package, the last import wins."""
    package = ModuleType("kvm_copy")
    package.__path__ = list(kvm_hf.__path__)
    monkeypatch.setitem(sys.modules, "kvm_copy", package)
    with patch.dict(DYNAMIC_LAYER_TYPE_MAPPING), patch.dict(STATIC_LAYER_TYPE_MAPPING):
        importlib.import_module("kvm_copy.cache_kvm")
        model = make_model()
        cache, mask = filled(model)
        assert type(cache.layers[0]).__module__ == "kvm_copy.cache_kvm"
        assert cache.nbytes == sum(tensor.nbytes for layer in cache.layers for tensor in layer.tensors().values())
        cache.save_pretrained(tmp_path)
        for other in (copy.deepcopy(cache), KVMCache.from_pretrained(tmp_path, model.config)):
            continued(model, other, mask, seed=5)
            with pytest.raises(ValueError, match="cannot drop"):
                other.crop(-2 * L)
        expected = continued(model, KVMCache.from_pretrained(tmp_path, model.config), mask)
        assert torch.equal(continued(model, cache, mask), expected)
    for name in [name for name in sys.modules if name.startswith("kvm_copy.")]:
        del sys.modules[name]


# What it says of itself


def test_rows_lengths_and_summary(capsys):
    model = make_model(**MIXED)
    cache, mask = filled(model)
    assert cache.lengths == mask.sum(1).tolist() == [31, 41]
    assert cache.rows[1:] == [[], []] and len(cache.rows[0]) == 2
    cache.summary()
    printed = capsys.readouterr().out
    rows = f"{min(cache.rows[0])}-{max(cache.rows[0])}"
    assert "KVMCache: 31-41 tokens in each of 2 sequences" in printed
    lines = [line.split() for line in printed.splitlines()[2:]]
    assert lines[0][:4] == ["0", "kvm_attention", rows, "5-7"]
    assert [line[:4] for line in lines[1:]] == [
        ["1", "sliding_attention", "-", "4"],
        ["2", "full_attention", "-", "41"],
    ]
    assert sum(float(line[-1]) for line in lines) == pytest.approx(cache.nbytes / 1024, abs=0.2)


def test_summary_of_an_empty_cache_and_of_layers_that_agree(capsys):
    model = make_model(num_hidden_layers=4)
    cache = KVMCache(model.config)
    cache.summary()
    assert "0 tokens" in capsys.readouterr().out
    run_in_pieces(model, random_ids(model, 3 * L), [3 * L], cache)
    cache.summary()
    assert capsys.readouterr().out.splitlines()[2].split()[:2] == ["0-3", "kvm_attention"]

"""The conversion as a job: what survives, how much memory it takes, what an interruption leaves, what is refused."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_sources import make_source
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import conversion.execute
from conversion import RetrofitError, RetrofitOptions, convert
from conversion.execute import PLAN_FILE
from conversion.plan import select_layers

OPTIONS = RetrofitOptions(chunk_size=4, window_chunks=2, sinks=1, growth=2.0)


def test_everything_but_weights_config_and_card_survives_byte_for_byte(source, tmp_path):
    convert(source, tmp_path / "target", OPTIONS)
    kept = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "LICENSE"]
    for name in kept:
        assert (tmp_path / "target" / name).read_bytes() == (source / name).read_bytes(), name
    assert not (tmp_path / "target" / "notes.bin").exists()
    assert GenerationConfig.from_pretrained(tmp_path / "target").eos_token_id == [2, 3]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "target")
    assert tokenizer.convert_tokens_to_ids("<tool>") == 43
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    original = json.loads((source / "config.json").read_text())
    assert config["model_type"] == "kvm" and config["architectures"] == ["KVMForCausalLM"]
    assert config["rope_parameters"] == original["rope_parameters"]
    assert "llama" not in json.dumps(config).lower()


def test_what_the_source_leaves_open_is_left_open(tmp_path):
    """`None` in the source must not turn into a default of ours: generation would stop at a wrong token."""
    source = make_source(tmp_path / "source", bos_token_id=None, eos_token_id=None)
    config = convert(source, tmp_path / "target", OPTIONS).config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, None, None)


def test_a_hub_source_is_refused_by_its_config_before_its_weights_are_fetched(source, tmp_path, monkeypatch):
    fetched = []

    def snapshot(name, allow_patterns):
        fetched.append(allow_patterns)
        return source

    monkeypatch.setattr("conversion.source.snapshot_download", snapshot)
    with pytest.raises(RetrofitError, match="max_position_embeddings"):
        convert("somebody/model", tmp_path / "target", RetrofitOptions(chunk_size=4096))
    assert fetched == [["config.json"]]
    convert("somebody/model", tmp_path / "target", OPTIONS)
    card = ModelCard.load(tmp_path / "target" / "README.md")
    assert card.data.base_model == "somebody/model"


def test_the_card_says_what_was_done_and_keeps_the_licence(source, tmp_path):
    convert(source, tmp_path / "target", OPTIONS, command="retrofit to-kvm source target --growth 2")
    card = ModelCard.load(tmp_path / "target" / "README.md")
    assert card.data.license == "apache-2.0" and "kvm" in card.data.tags
    assert "retrofit to-kvm source target --growth 2" in card.text
    assert "nothing was trained" in card.text.replace("\n", " ") and "Not measured" in card.text
    assert str(tmp_path) not in card.text


def test_several_shards_one_layer_split_across_two_of_them(tmp_path):
    source = make_source(tmp_path / "source", shard_size="20KB")
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    layers = [{file for name, file in index.items() if f"layers.{i}." in name} for i in range(3)]
    assert len(set(index.values())) >= 3 and any(len(files) > 1 for files in layers)
    convert(source, tmp_path / "target", RetrofitOptions(chunk_size=4, window_chunks=2, shard_size=20_000, sinks=1))
    written = json.loads((tmp_path / "target" / "model.safetensors.index.json").read_text())
    assert len(set(written["weight_map"].values())) >= 3
    assert all((tmp_path / "target" / file).stat().st_size < 21_000 for file in set(written["weight_map"].values()))
    whole = {}
    for file in sorted(set(index.values())):
        whole |= load_file(source / file)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "target").state_dict()
    for name, tensor in whole.items():
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weights_are_cast_when_asked(source, tmp_path, dtype):
    convert(source, tmp_path / "target", RetrofitOptions(chunk_size=4, window_chunks=2, sinks=1, dtype=dtype))
    with safe_open(tmp_path / "target" / "model.safetensors", framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {getattr(torch, dtype)}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype="auto").dtype == getattr(torch, dtype)


def test_peak_memory_stays_below_a_fraction_of_the_checkpoint(tmp_path):
    """Twelve shards of 64 MiB with tensors of 16 MiB: the conversion may add the largest tensor and one shard to what
    Python, PyTorch and Transformers take, and not the 768 MiB of the checkpoint."""
    source = make_source(
        tmp_path / "source",
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=8,
        shard_size="64MB",
    )
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    assert size > 700 * 2**20 and len(list(source.glob("*.safetensors"))) >= 10
    script = """
import sys, resource
from conversion import convert, RetrofitOptions
base = None
def on_plan(plan):
    global base
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert(sys.argv[1], sys.argv[2], RetrofitOptions(shard_size=64_000_000), on_plan=on_plan)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) * 1024)
"""
    result = subprocess.run([sys.executable, "-c", script, source, tmp_path / "target"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[-1]) < 16 * 2**20 + 64 * 2**20


def test_a_tied_model_with_a_head_of_its_own_keeps_both(tmp_path):
    source = make_source(tmp_path / "source", tie_word_embeddings=True)
    weights = load_file(source / "model.safetensors")
    for head, tied in ((weights["model.embed_tokens.weight"].clone(), True), (torch.randn(44, 32), False)):
        save_file(weights | {"lm_head.weight": head}, source / "model.safetensors", metadata={"format": "pt"})
        config = convert(source, tmp_path / str(tied), OPTIONS).config
        assert config.tie_word_embeddings is tied
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / str(tied)).lm_head.weight, head)


def test_tensors_of_several_dtypes_keep_their_own(source, tmp_path):
    weights = load_file(source / "model.safetensors")
    mixed = {name: tensor.bfloat16() if "proj" in name else tensor for name, tensor in weights.items()}
    save_file(mixed, source / "model.safetensors", metadata={"format": "pt"})
    convert(source, tmp_path / "target", OPTIONS)
    written = load_file(tmp_path / "target" / "model.safetensors")
    assert all(
        torch.equal(written[name], tensor) and written[name].dtype == tensor.dtype for name, tensor in mixed.items()
    )


def test_a_value_beyond_the_range_of_the_target_dtype_is_refused(source, tmp_path):
    weights = load_file(source / "model.safetensors")
    weights["lm_head.weight"][0, 0] = 1e5
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RetrofitError, match="lm_head"):
        convert(source, tmp_path / "target", RetrofitOptions(chunk_size=4, window_chunks=2, sinks=1, dtype="float16"))


def test_shards_of_another_source_are_not_taken_over(tmp_path, monkeypatch):
    """Two checkpoints of one shape with equal sizes and times, as from a container layer."""
    options = RetrofitOptions(chunk_size=4, window_chunks=2, sinks=1, shard_size=20_000)
    sources = [make_source(tmp_path / name, shard_size="20KB") for name in "ab"]
    for file in sources[1].glob("*.safetensors"):
        save_file({name: 3 * tensor for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    for file in (*sources[0].iterdir(), *sources[1].iterdir()):
        os.utime(file, (0, 0))

    def interrupted(count, written=[0]):  # noqa: B006
        written[0] += count
        if written[0] > 60_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(sources[0], tmp_path / "target", options, on_bytes=interrupted)
    convert(sources[1], tmp_path / "target", options)
    convert(sources[1], tmp_path / "clean", options)
    for file in (tmp_path / "clean").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "target" / file.name).read_bytes()


def test_a_killed_run_leaves_nothing_that_looks_finished_and_a_rerun_completes_it(tmp_path):
    source = make_source(tmp_path / "source", shard_size="20KB")
    options = "RetrofitOptions(chunk_size=4, window_chunks=2, sinks=1, shard_size=20_000)"
    script = f"""
import sys, time
from conversion import convert, RetrofitOptions
written = 0
def slowly(count):
    global written
    written += count
    if written > 60_000:
        print("half-way", flush=True)
        time.sleep(60)
convert(sys.argv[1], sys.argv[2], {options}, on_bytes=slowly)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script, source, tmp_path / "target"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline().strip() == "half-way"
    process.send_signal(signal.SIGKILL)
    process.wait()
    work = tmp_path / "target.incomplete"
    assert not (tmp_path / "target").exists()
    assert work.is_dir() and not list(work.glob("*.index.json")) and not (work / "config.json").exists()
    finished = {path: path.stat().st_mtime_ns for path in work.glob("*.safetensors")}
    assert finished

    time.sleep(0.01)
    again = RetrofitOptions(chunk_size=4, window_chunks=2, sinks=1, shard_size=20_000)
    convert(source, tmp_path / "target", again)
    assert not work.exists() and not (tmp_path / "target" / PLAN_FILE).exists()
    for path, modified in finished.items():
        assert (tmp_path / "target" / path.name).stat().st_mtime_ns == modified  # kept, not written again
    convert(source, tmp_path / "clean", again)
    for path in (tmp_path / "clean").iterdir():
        if path.name != "README.md":
            assert (tmp_path / "target" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_run_killed_just_before_the_folder_gets_its_name_is_completed_by_a_rerun(source, tmp_path, monkeypatch):
    rename = os.rename

    def killed(old, new):
        if new == tmp_path / "target":
            raise KeyboardInterrupt
        rename(old, new)

    with monkeypatch.context() as context:
        context.setattr(conversion.execute.os, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "target", OPTIONS)
    assert not (tmp_path / "target").exists()
    convert(source, tmp_path / "target", OPTIONS)
    AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert not (tmp_path / "target" / PLAN_FILE).exists()


def test_leftovers_of_another_plan_are_not_mixed_in(source, tmp_path):
    work = tmp_path / "target.incomplete"
    work.mkdir()
    (work / "model.safetensors").write_bytes(b"half a file")
    (work / PLAN_FILE).write_text("of something else")
    convert(source, tmp_path / "target", OPTIONS)
    AutoModelForCausalLM.from_pretrained(tmp_path / "target")


def test_a_folder_of_the_users_in_the_way_is_left_alone(source, tmp_path):
    (tmp_path / "target.incomplete").mkdir()
    (tmp_path / "target.incomplete" / "thesis.txt").write_text("do not lose")
    with pytest.raises(RetrofitError, match="is not ours"):
        convert(source, tmp_path / "target", OPTIONS)
    assert (tmp_path / "target.incomplete" / "thesis.txt").exists()


def test_a_source_that_has_the_name_of_the_work_folder_is_left_alone(tmp_path):
    source = make_source(tmp_path / "target.incomplete")
    with pytest.raises(RetrofitError, match="is not ours"):
        convert(source, tmp_path / "target", OPTIONS)
    AutoModelForCausalLM.from_pretrained(source)


def test_a_half_written_marker_does_not_block_a_rerun(source, tmp_path):
    (tmp_path / "target.incomplete").mkdir()
    (tmp_path / "target.incomplete" / PLAN_FILE).write_text("")
    convert(source, tmp_path / "target", OPTIONS)
    AutoModelForCausalLM.from_pretrained(tmp_path / "target")


def test_a_full_disk_is_said_and_what_is_finished_stays(source, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(conversion.execute.os, "fsync", full)
    with pytest.raises(RetrofitError, match="disk is full"):
        convert(source, tmp_path / "target", OPTIONS)
    assert not (tmp_path / "target").exists()
    monkeypatch.undo()
    convert(source, tmp_path / "target", OPTIONS)


def test_a_disk_that_is_too_small_is_refused_before_work(source, tmp_path, monkeypatch):
    usage = conversion.execute.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(conversion.execute.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(RetrofitError, match="GB free"):
        convert(source, tmp_path / "target", OPTIONS)
    assert not (tmp_path / "target.incomplete").exists()


def test_a_target_that_is_not_empty_is_left_alone(source, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "thesis.txt").write_text("do not lose")
    with pytest.raises(RetrofitError, match="not an empty folder"):
        convert(source, target, OPTIONS)
    assert (target / "thesis.txt").read_text() == "do not lose"
    (target / "thesis.txt").unlink()
    convert(source, target, OPTIONS)  # an empty folder is fine
    assert (target / "config.json").exists()


@pytest.mark.parametrize("damage", ["truncated", "garbage", "missing", "missing shard", "index"])
def test_damaged_weights_are_refused_before_anything_is_written(tmp_path, damage):
    source = make_source(tmp_path / "source", shard_size="20KB" if damage in ("missing shard", "index") else "5GB")
    file = sorted(source.glob("*.safetensors" if damage != "index" else "*.index.json"))[-1]
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage in ("garbage", "index"):
        file.write_bytes(b"\x7f" * 1000)
    else:
        file.unlink()
    with pytest.raises(RetrofitError, match=file.name):
        convert(source, tmp_path / "target", OPTIONS)
    assert not (tmp_path / "target").exists() and not (tmp_path / "target.incomplete").exists()


@pytest.mark.parametrize("what", ["missing", "quantized"])
def test_tensors_that_do_not_fit_are_refused_by_name(source, tmp_path, what):
    weights = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if what == "missing":
        del weights[name]
    else:
        weights[name] = weights[name].to(torch.int8)
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RetrofitError, match=name):
        convert(source, tmp_path / "target", OPTIONS)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(chunk_size=1024, window_chunks=2), "max_position_embeddings"),
        (dict(chunk_size=0), "chunk_size"),
        (dict(window_chunks=0), "num_window_chunks"),
        (dict(sinks=4, chunk_size=4), "sinks"),
        (dict(budget="fixed", state_size=3, chunk_size=4, sinks=1), "state_size"),
        (dict(budget="cube"), "budget"),
        (dict(state_size=99), "--growth"),
        (dict(budget="fixed", growth=2.0), "--state-size"),
        (dict(dtype="int8"), "dtype"),
        (dict(layers="7"), "layers 0 to 2"),
        (dict(layers="a"), "not understood"),
        (dict(layers="every:0"), "not understood"),
        (dict(layers="every:-1"), "not understood"),
        (dict(layers="2-1"), "names nothing"),
        (dict(layers="0-"), "not understood"),
        (dict(growth=float("inf")), "state_growth_factor"),
        (dict(layers=""), "not understood"),
        (dict(shard_size=0), "shard-size"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused_before_any_weight_is_read(source, tmp_path, monkeypatch, fields, words):
    monkeypatch.setattr("conversion.source.Source.read", lambda *args: pytest.fail("a weight was read"))
    with pytest.raises(RetrofitError, match=words):
        convert(source, tmp_path / "target", RetrofitOptions(**fields))
    assert os.listdir(tmp_path) == ["source"]


def test_layers_can_be_chosen():
    kinds = ["full_attention"] * 6
    assert select_layers("all", kinds) == [0, 1, 2, 3, 4, 5]
    assert select_layers("every:2", kinds) == [0, 2, 4]
    assert select_layers("1,3-5", kinds) == [1, 3, 4, 5]


def test_layers_that_are_not_converted_stay_full_attention(source, tmp_path):
    options = RetrofitOptions(layers="1", chunk_size=4, window_chunks=2, sinks=1)
    convert(source, tmp_path / "target", options)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert model.config.layer_types == ["full_attention", "kvm_attention", "full_attention"]


@pytest.mark.parametrize("kind", ["nowhere", "empty", "not a hub id"])
def test_a_source_that_is_not_there_is_said(tmp_path, kind, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    name = {"nowhere": "nobody/nothing", "empty": str(tmp_path / "empty"), "not a hub id": "a//b c"}[kind]
    with pytest.raises(RetrofitError):
        convert(name, tmp_path / "target", OPTIONS)


def test_a_damaged_gguf_file_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF nonsense")
    with pytest.raises(RetrofitError, match="GGUF"):
        convert(tmp_path / "model.gguf", tmp_path / "target", OPTIONS)
    assert os.listdir(tmp_path) == ["model.gguf"]


@pytest.mark.parametrize("text", ["[]", "null", "5", '{"weight_map": []}', '{"weight_map": {"a": 5}}', "{"])
def test_a_damaged_index_is_refused(source, tmp_path, text):
    (source / "model.safetensors").unlink()
    (source / "model.safetensors.index.json").write_text(text)
    with pytest.raises(RetrofitError, match="is damaged"):
        convert(source, tmp_path / "target", OPTIONS)

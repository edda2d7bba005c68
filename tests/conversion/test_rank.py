"""`retrofit rank-layers` and `--layers auto:N`: the costs are those of real conversions, and the dearest layers are kept."""

import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from small_sources import make_source
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from conversion import RankOptions, RetrofitError, RetrofitOptions, convert, make_plan, rank, rank_layers
from conversion.cli import app
from conversion.execute import PLAN_FILE
from conversion.rank import Reading
from conversion.source import open_source
from conversion.verification import TEXT

RETROFIT = RetrofitOptions(chunk_size=4, window_chunks=2, sinks=1, growth=2.0)
SETTINGS = ["--chunk-size", "4", "--window-chunks", "2", "--sinks", "1", "--growth", "2"]
OPTIONS = RankOptions(tokens=60, pieces=2, context=500, device="cpu")
L = 8
COMMAND = "how it was made"
PLOT = rank.plot


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """The beginning of Genesis: to read all of it takes longer than the measurements here."""
    path = tmp_path_factory.mktemp("text") / "genesis.txt"
    path.write_text(TEXT.read_text(encoding="utf-8")[:400])
    return path


@pytest.fixture(autouse=True)
def little_work(monkeypatch, text):
    monkeypatch.setattr(rank, "TEXT", text)
    monkeypatch.setattr(rank, "plot", lambda report, path: path.touch())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A source of four layers in which layer 1 does nothing. Nobody writes here."""
    folder = tmp_path_factory.mktemp("made") / "source"
    make_source(folder, num_hidden_layers=4, max_position_embeddings=64)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.o_proj.weight"].zero_()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def count_costs(monkeypatch):
    """The layers that are measured from here on."""
    layers, honest = [], Reading.cost

    def counted(self, index):
        layers.append(index)
        return honest(self, index)

    monkeypatch.setattr(Reading, "cost", counted)
    return layers


def log_probabilities(folder, pieces):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(pieces).logits.log_softmax(-1)


def read_pieces(source, text):
    ids = torch.tensor(AutoTokenizer.from_pretrained(source)(text.read_text()).input_ids)
    return torch.stack([ids[:60], ids[-60:]])


def order(report):
    return [entry["layer"] for entry in report["layers"]]


def files_but_card(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in ("README.md", "rank.json")}


@pytest.mark.parametrize("family", ["llama-bias-tied", "qwen2-sliding", "smollm3", "phi3-partial"])
def test_the_cost_of_a_layer_is_that_of_converting_it_alone(tmp_path, text, family):
    fields = dict(num_hidden_layers=4, max_window_layers=2) if family == "qwen2-sliding" else {}
    source = make_source(tmp_path / "source", family, **fields)
    report = rank_layers(source, RETROFIT, OPTIONS, output=tmp_path / "ranking")
    pieces = read_pieces(source, text)
    wanted = log_probabilities(source, pieces)[:, 2 * L - 1 : -1]
    labels = pieces[:, 2 * L :]
    loss = F.nll_loss(wanted.flatten(0, 1), labels.flatten()).item()
    assert report["source_loss"] == pytest.approx(loss, abs=1e-5)
    assert sorted(order(report)) == ([0, 1] if family == "qwen2-sliding" else [0, 1, 2])
    for entry in report["layers"]:
        target = tmp_path / str(entry["layer"])
        convert(source, target, replace(RETROFIT, layers=str(entry["layer"])))
        found = log_probabilities(target, pieces)[:, 2 * L - 1 : -1]
        divergence = F.kl_div(found.flatten(0, 1), wanted.flatten(0, 1), log_target=True, reduction="batchmean")
        assert divergence > 1e-3  # there is something to measure
        assert entry["divergence"] == pytest.approx(divergence.item(), abs=1e-5)
        above = F.nll_loss(found.flatten(0, 1), labels.flatten()).item() - loss
        assert entry["loss_above_source"] == pytest.approx(above, abs=1e-5)


def test_the_most_sensitive_layer_comes_first_and_one_that_does_nothing_costs_nothing(made, tmp_path):
    report = rank_layers(made, RETROFIT, OPTIONS, output=tmp_path)
    costs = [entry["divergence"] for entry in report["layers"]]
    assert costs == sorted(costs, reverse=True)
    assert report["layers"][-1]["layer"] == 1
    assert report["layers"][-1]["divergence"] == report["layers"][-1]["loss_above_source"] == 0
    assert report == json.loads((tmp_path / "rank.json").read_text())


@pytest.mark.parametrize("family", ["llama", "qwen2-sliding"])
def test_bytes_are_those_of_the_plans(tmp_path, family):
    source = make_source(tmp_path / "source", family, num_hidden_layers=4, max_window_layers=3)
    report = rank_layers(source, RETROFIT, OPTIONS, output=tmp_path / "ranking")
    with open_source(source, tmp_path / "work") as opened:
        for choice in report["choices"]:
            plan = make_plan(opened, replace(RETROFIT, layers=choice["layers"]))
            assert plan.cache_bytes(500) == choice["cache_bytes"]
            assert len(plan.converted) == len(report["layers"]) - choice["kept"]
        for entry in report["layers"]:
            plan = make_plan(opened, replace(RETROFIT, layers=str(entry["layer"])))
            assert report["cache_bytes"]["source"] - plan.cache_bytes(500) == entry["bytes_saved"]


def test_layers_that_slide_in_the_source_are_ranked_if_named(tmp_path):
    source = make_source(tmp_path / "source", "qwen2-sliding", num_hidden_layers=4, max_window_layers=2)
    report = rank_layers(source, replace(RETROFIT, layers="0-3"), OPTIONS, output=tmp_path / "ranking")
    saved = {entry["layer"]: entry["bytes_saved"] for entry in report["layers"]}
    assert len(saved) == 4 and saved[0] == saved[1] > 0 > saved[2]  # the window of 6 holds less than a state


@pytest.mark.parametrize("count", [1, 3])
def test_auto_keeps_the_most_sensitive_layers(made, tmp_path, count):
    plan = convert(made, tmp_path / "target", replace(RETROFIT, layers=f"auto:{count}"), command=COMMAND)
    report = json.loads((tmp_path / "target" / "rank.json").read_text())
    assert order(report) == order(rank_layers(made, RETROFIT, output=tmp_path / "ranking"))
    kept = [i for i, kind in enumerate(plan.config.layer_types) if kind == "full_attention"]
    assert kept == sorted(order(report)[:count]) and 1 not in kept
    assert any(f"{4 - count} of 4 converted" in line for line in plan.summary)
    assert f"{4 - count} of\n4 attention layers" in (tmp_path / "target" / "README.md").read_text()

    chosen = ",".join(str(layer) for layer in sorted(order(report)[count:]))
    convert(made, tmp_path / "explicit", replace(RETROFIT, layers=chosen), command=COMMAND)
    assert files_but_card(tmp_path / "target") == files_but_card(tmp_path / "explicit") | {"rank.png": b""}
    assert sorted(os.listdir(tmp_path)) == ["explicit", "ranking", "target"]


def test_an_interrupted_ranking_goes_on_where_it_was(made, tmp_path, monkeypatch, count_costs):
    expected = rank_layers(made, RETROFIT, OPTIONS, output=tmp_path / "clean")
    honest = Reading.cost

    def breaks_on_the_sixth(self, index):
        if len(count_costs) == 8 + 5:
            raise KeyboardInterrupt
        return honest(self, index)

    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
        context.setattr(Reading, "cost", breaks_on_the_sixth)
        rank_layers(made, RETROFIT, OPTIONS, output=tmp_path / "ranking")
    assert os.listdir(tmp_path / "ranking") == ["rank.partial.json"]
    assert rank_layers(made, RETROFIT, OPTIONS, output=tmp_path / "ranking") == expected
    assert len(count_costs) == 2 * 8  # no layer of a piece was measured twice
    assert sorted(os.listdir(tmp_path / "ranking")) == ["rank.json", "rank.png"]


def test_an_interrupted_conversion_does_not_rank_again(made, tmp_path, monkeypatch, count_costs):
    options = replace(RETROFIT, layers="auto:2", shard_size=20_000)

    def interrupted(count, written=[0]):  # noqa: B006
        written[0] += count
        if written[0] > 60_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(made, tmp_path / "target", options, on_bytes=interrupted)
    finished = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "target.incomplete").glob("*.safetensors")}
    assert finished and len(count_costs) == 4
    monkeypatch.setattr(rank, "load_models", lambda *args: pytest.fail("a model was loaded"))
    convert(made, tmp_path / "target", options)
    assert len(count_costs) == 4
    for name, modified in finished.items():
        assert (tmp_path / "target" / name).stat().st_mtime_ns == modified
    assert os.listdir(tmp_path) == ["target"] and not (tmp_path / "target" / PLAN_FILE).exists()


def test_a_dry_run_ranks_for_the_run_itself_whatever_its_number(made, tmp_path, count_costs):
    plan = convert(made, tmp_path / "target", replace(RETROFIT, layers="auto:1"), dry_run=True)
    assert len(plan.converted) == 3 and len(count_costs) == 4
    assert os.listdir(tmp_path) == ["target.ranking.json"]
    assert len(convert(made, tmp_path / "target", replace(RETROFIT, layers="auto:2")).converted) == 2
    assert len(count_costs) == 4
    assert os.listdir(tmp_path) == ["target"]


def test_measurements_of_other_weights_are_not_reused(made, tmp_path, count_costs):
    source = shutil.copytree(made, tmp_path / "source")
    for _ in range(2):
        convert(source, tmp_path / "target", replace(RETROFIT, layers="auto:1"), dry_run=True)
        (source / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    assert len(count_costs) == 8


@pytest.mark.parametrize("layers", ["auto:0", "auto:4", "auto:-1", "auto:x", "auto:", "auto:1.5"])
def test_a_number_that_cannot_be_kept_is_refused_before_any_weight_is_read(made, tmp_path, monkeypatch, layers):
    monkeypatch.setattr("conversion.source.read_headers", lambda *args: pytest.fail("weights were looked at"))
    with pytest.raises(RetrofitError, match=f"{layers}` is not understood.* 4 layers .* from 1 to 3"):
        convert(made, tmp_path / "target", replace(RETROFIT, layers=layers))
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("retrofit", "fields", "words"),
    [
        ({}, dict(tokens=16), "more than twice the window of 8"),
        ({}, dict(tokens=65), "at most the model's 64 positions"),
        (dict(growth=20.0), {}, "no layer costs anything"),
        ({}, dict(tokens=60, pieces=10**6), "Use a longer text"),
        ({}, dict(device="foo"), "foo"),
        ({}, dict(device="meta"), "meta"),
        (dict(layers="auto:2"), {}, "not understood"),
        (dict(layers="7"), {}, "layers 0 to 3"),
    ],
    ids=str,
)
def test_what_cannot_be_ranked_is_said_before_any_weight_is_read(made, tmp_path, monkeypatch, retrofit, fields, words):
    monkeypatch.setattr("conversion.source.Source.read", lambda *args: pytest.fail("a weight was read"))
    with pytest.raises(RetrofitError, match=words):
        rank_layers(made, replace(RETROFIT, **retrofit), RankOptions(**fields), output=tmp_path / "ranking")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("fields", [dict(pieces=0), dict(context=0), dict(dtype="int3")], ids=str)
def test_options_that_cannot_be_are_refused_by_name(fields):
    with pytest.raises(RetrofitError, match=f"--{next(iter(fields))}"):
        RankOptions(**fields)


def test_values_that_overflow_are_no_ranking(made, tmp_path):
    """In float16 a weight of 60000 is one, and its products are not."""
    source = shutil.copytree(made, tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"].fill_(60000)
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RetrofitError, match="float16` is too narrow"):
        rank_layers(source, RETROFIT, replace(OPTIONS, dtype="float16"), output=tmp_path / "ranking")
    assert not (tmp_path / "ranking" / "rank.json").exists()


def test_a_file_of_somebody_else_is_not_taken_for_measurements(made, tmp_path):
    """Somebody may well have kept a ranking under this name."""
    theirs = tmp_path / "target.ranking.json"
    for content in ('{"layers": []}', "[]", "notes"):
        theirs.write_text(content)
        with pytest.raises(RetrofitError, match="not ours"):
            convert(made, tmp_path / "target", replace(RETROFIT, layers="auto:1"))
        assert theirs.read_text() == content


@pytest.mark.parametrize("name", ["rank.partial.json", "rank.json"])
def test_a_folder_with_files_of_somebody_else_is_left_alone(made, tmp_path, name):
    (tmp_path / name).write_text("my notes")
    with pytest.raises(RetrofitError, match=f"{name}.* exists and is no"):
        rank_layers(made, RETROFIT, OPTIONS, output=tmp_path)
    assert (tmp_path / name).read_text() == "my notes"
    (tmp_path / name).unlink()
    rank_layers(made, RETROFIT, OPTIONS, output=tmp_path)
    assert rank_layers(made, RETROFIT, OPTIONS, output=tmp_path)["layers"]  # over its own


def test_places_and_numbers_that_cannot_be_are_refused(made, tmp_path):
    with pytest.raises(RetrofitError, match="cannot be made"):
        rank_layers(made, RETROFIT, OPTIONS, output=made / "config.json" / "ranking")
    (tmp_path / "target.ranking.json").mkdir()
    with pytest.raises(RetrofitError, match="not ours"):
        convert(made, tmp_path / "target", replace(RETROFIT, layers="auto:1"))
    with pytest.raises(RetrofitError, match=r"`--context .*use 16777216 or less"):
        RankOptions(context=10**15)


def test_a_source_without_tokenizer_and_an_output_that_is_a_file_are_said(made, tmp_path):
    with pytest.raises(RetrofitError, match="is a file"):
        rank_layers(made, RETROFIT, output=made / "config.json")
    source = shutil.copytree(made, tmp_path / "source", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(RetrofitError, match="no tokenizer"):
        rank_layers(source, RETROFIT, output=tmp_path / "ranking")
    with pytest.raises(RetrofitError, match="no tokenizer"):
        convert(source, tmp_path / "target", replace(RETROFIT, layers="auto:1"))
    assert os.listdir(tmp_path) == ["source"]


def test_ranking_by_command_gives_layers_that_to_kvm_takes(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rank, "plot", PLOT)
    result = CliRunner().invoke(app, ["rank-layers", str(made), *SETTINGS, "--quiet"])
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "source-ranking" / "rank.json").read_text())
    rows = [line.split("│")[1].strip() for line in result.output.splitlines() if line.startswith("│")]
    assert rows[:4] == [str(layer) for layer in order(report)]
    assert (tmp_path / "source-ranking" / "rank.png").stat().st_size > 10_000
    chosen = report["choices"][2]["layers"]
    assert f"--layers {chosen}\n" in result.output

    dry = CliRunner().invoke(app, ["to-kvm", str(made), "target", *SETTINGS, "--dry-run", "--layers", "auto:2"])
    assert dry.exit_code == 0, dry.output
    assert "2 of 4 converted" in dry.output and "target.ranking.json" in dry.output
    target = CliRunner().invoke(app, ["to-kvm", str(made), "target", *SETTINGS, "--quiet", "--layers", "auto:2"])
    assert (target.exit_code, target.output) == (0, "")
    assert (tmp_path / "target" / "rank.json").exists()

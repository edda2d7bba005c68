"""The command `retrofit`, as typed."""

from importlib.metadata import version

import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from conversion.cli import app

RUN = CliRunner()
SETTINGS = ["--chunk-size", "4", "--window-chunks", "2", "--sinks", "1"]


def test_the_version_is_that_of_the_distribution():
    assert RUN.invoke(app, ["--version"]).output.strip() == version("kvm-maglev-hf")


def test_a_dry_run_prints_the_plan_and_writes_nothing(source, tmp_path):
    result = RUN.invoke(app, ["to-kvm", str(source), str(tmp_path / "target"), "--dry-run", *SETTINGS])
    assert result.exit_code == 0, result.output
    for words in ("3 of 3 converted: 0-2", "= 8 tokens", "New parameters: 12", "tokenizer.json", "4k", "32k", "128k"):
        assert words in result.output.replace("\n", " "), words
    assert not (tmp_path / "target").exists() and not (tmp_path / "target.incomplete").exists()


def test_a_conversion_by_command_loads_and_says_how_it_was_made(source, tmp_path, monkeypatch):
    arguments = ["to-kvm", str(source), str(tmp_path / "target"), "--quiet", "--layers", "0,2", *SETTINGS]
    monkeypatch.setattr("sys.argv", ["retrofit", *arguments])
    result = RUN.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert result.output == ""
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert model.config.layer_types == ["kvm_attention", "full_attention", "kvm_attention"]
    assert " ".join(["retrofit", *arguments]) in (tmp_path / "target" / "README.md").read_text()


@pytest.mark.parametrize(
    "arguments",
    [
        ["to-kvm", "nowhere", "target"],
        ["to-kvm", "SOURCE", "target", "--chunk-size", "0"],
        ["verify", "SOURCE", "gone"],
    ],
)
def test_an_error_is_one_sentence_and_exit_status_one(source, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    result = RUN.invoke(app, [str(source) if word == "SOURCE" else word for word in arguments])
    assert result.exit_code == 1
    assert "Error:" in result.output and "Traceback" not in result.output


def test_verify_by_command(source, tmp_path):
    RUN.invoke(app, ["to-kvm", str(source), str(tmp_path / "target"), "-q", *SETTINGS])
    (tmp_path / "text").write_text("the quick brown fox. " * 20)
    result = RUN.invoke(
        app,
        ["verify", str(source), str(tmp_path / "target"), "--text", str(tmp_path / "text"), "--tokens", "60"]
        + ["--needles", "1", "--needle-tokens", "150", "--output", str(tmp_path / "report")],
    )
    assert result.exit_code == 0, result.output
    assert "gap closed" in result.output and "Passkeys" in result.output
    assert (tmp_path / "report" / "verify.png").exists()

"""Models, retrofits and adapters on a hub: pushed to a server on this machine, loaded from it by id, refused in time."""

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import huggingface_hub.constants
import pytest
import torch
from fresh_process import in_fresh_process
from huggingface_hub import HfApi, ModelCard
from local_hub import TOKEN, LocalHub
from small_sources import make_source
from transformers import AutoModelForCausalLM, AutoTokenizer

from conversion import HealOptions, RetrofitError, RetrofitOptions, VerifyOptions, convert, heal, verify
from conversion.texts import read_pieces

# The hub's client says so of its own uploads.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")
OPTIONS = RetrofitOptions(chunk_size=4, window_chunks=2, sinks=1, growth=2.0)
HEAL_OPTIONS = HealOptions(length=40, transfer_steps=1, steps=2, rank=2, held_out=2, device="cpu")
SETTINGS = "--chunk-size 4 --window-chunks 2 --sinks 1 --growth 2"

# What one does with our packages installed: a retrofit of a source of the hub, two models, an adapter.
PUBLISH = """
import json, sys
import peft, torch
from conversion.cli import app
from kvm_hf import peft_kvm
from small_maglev import make_model as make_maglev
from small_models import MIXED, generate, make_model
from transformers import AutoModelForCausalLM

sys.argv = ["retrofit", "to-kvm", "me/source", "retrofit", "--quiet", "--push-to-hub", "me/retrofit"] + {settings!r}.split()
app(standalone_mode=False)

made, ids = {{}}, torch.tensor({ids})
for repo, model in (("me/kvm", make_model(dtype=torch.float32, **MIXED)), ("me/maglev", make_maglev(dtype=torch.float32))):
    model.push_to_hub(repo)
    made[repo] = generate(model, ids, 20).tolist()

base = AutoModelForCausalLM.from_pretrained("me/retrofit", trust_remote_code=True)
adapted = peft_kvm.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=2, init_lora_weights=False))
with torch.no_grad():
    for name, parameter in adapted.named_parameters():
        if "temperature" in name:
            parameter.add_(0.5)
adapted.push_to_hub("me/adapter")
made["me/adapter"] = adapted.eval()(ids).logits.tolist()
print(json.dumps(made))
"""
# What somebody else does, who has none of them.
READ = """
import peft
from transformers import AutoTokenizer

ids = torch.tensor({ids})
settings = dict(attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0)
read = {{}}
for repo in ("me/retrofit", "me/kvm", "me/maglev"):
    model = AutoModelForCausalLM.from_pretrained(repo, trust_remote_code=True)
    read[repo] = [type(model).__module__, model.generate(ids, **settings).tolist()]
read["tokens"] = AutoTokenizer.from_pretrained("me/retrofit", trust_remote_code=True)("a<tool>b").input_ids
base = AutoModelForCausalLM.from_pretrained("me/retrofit", trust_remote_code=True)
adapted = peft.PeftModel.from_pretrained(base, "me/adapter").eval()
by_name = peft.AutoPeftModelForCausalLM.from_pretrained("me/adapter", trust_remote_code=True).eval()
read["me/adapter"] = [one(ids).logits.tolist() for one in (adapted, by_name)]
print(json.dumps(read))
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with LocalHub(tmp_path_factory.mktemp("hub")).serving() as hub:
        yield hub


@pytest.fixture(autouse=True)
def connected(hub, monkeypatch):
    """This process knows the local hub, and may upload to it."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name, value in (("ENDPOINT", hub.endpoint), ("HF_HUB_DISABLE_XET", True), ("HF_HUB_OFFLINE", False)):
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    yield
    hub.broken = None
    hub.requests.clear()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A source, the KVM model made from it, text. Nobody writes here."""
    folder = tmp_path_factory.mktemp("made")
    make_source(folder / "source")
    convert(folder / "source", folder / "target", OPTIONS)
    letters = torch.randint(97, 123, (900,), generator=torch.Generator().manual_seed(0))
    (folder / "text.txt").write_text("".join(map(chr, letters)))
    return folder


def card_on(hub, repo):
    return ModelCard.load(hub.files(repo) / "README.md")


def run_python(hub, folder, *arguments):
    """A process that has our packages, in `folder`, with a cache of its own."""
    result = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **hub.environment(folder / "home"), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd=folder,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_what_is_pushed_is_loaded_by_id_in_a_process_that_has_only_transformers(hub, made, tmp_path):
    """A retrofit of a source that is on the hub too, models, an adapter; more is read and generated than the window holds."""
    api = HfApi(token=TOKEN)
    api.create_repo("me/source")
    api.upload_folder(repo_id="me/source", folder_path=made / "source", commit_message="Source")
    (tmp_path / "modules").mkdir()
    ids = torch.randint(4, 40, (1, 30), generator=torch.Generator().manual_seed(0))
    script = PUBLISH.format(settings=SETTINGS, ids=ids.tolist())
    published = json.loads(run_python(hub, tmp_path, "-c", script).splitlines()[-1])

    reader = hub.environment(tmp_path / "home of a reader", token=None)
    read = in_fresh_process(READ.format(ids=ids.tolist()), tmp_path / "modules", **reader)

    local = AutoModelForCausalLM.from_pretrained(tmp_path / "retrofit")
    settings = dict(attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0)
    module, tokens = read["me/retrofit"]
    assert module.startswith("transformers_modules") and tokens == local.generate(ids, **settings).tolist()
    assert read["tokens"] == AutoTokenizer.from_pretrained(made / "source")("a<tool>b").input_ids
    for repo in ("me/kvm", "me/maglev"):
        assert read[repo][1] == published[repo]
    assert read["me/adapter"] == 2 * [published["me/adapter"]]
    assert published["me/adapter"] != local(ids).logits.tolist()

    card = card_on(hub, "me/retrofit")
    assert card.data.license == "apache-2.0" and card.data.base_model == "me/source"
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    assert 'path = "me/retrofit"\n' in card.text and f"--push-to-hub me/retrofit {SETTINGS}" in card.text
    files = {path.name for path in (tmp_path / "retrofit").iterdir()}
    assert {path.name for path in hub.files("me/retrofit").iterdir()} == files


@pytest.mark.parametrize("repo", ["model", "a/b/c", "me/a model", "./model", "me/model.git"])
def test_what_is_no_hub_id_is_refused_before_anything_else(made, hub, tmp_path, repo):
    with pytest.raises(RetrofitError, match="owner/name"):
        convert(made / "source", tmp_path / "target", OPTIONS, push_to_hub=repo)
    assert not hub.requests and not os.listdir(tmp_path)


@pytest.mark.parametrize("case", ["no token", "a wrong token", "nobody's", "somebody else's"])
def test_who_may_not_write_is_told_before_the_work(made, hub, tmp_path, monkeypatch, case):
    repo = "me/refused" if "token" in case else "you/refused"
    if case == "no token":
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    elif case == "a wrong token":
        monkeypatch.setenv("HF_TOKEN", "hf_of_you")
    elif case == "somebody else's":
        hub.add_commit("models", repo)
    healing = (made / "target", made / "source", [made / "text.txt"])
    commands = [
        lambda: convert(made / "source", tmp_path / "target", OPTIONS, push_to_hub=repo),
        lambda: heal(*healing, tmp_path / "healed", HEAL_OPTIONS, push_to_hub=repo),
    ]
    for command in commands:
        with pytest.raises(RetrofitError, match="hf auth login") as raised:
            command()
        assert "\n" not in str(raised.value)
    assert not os.listdir(tmp_path) and len(hub.commits(repo)) == (case == "somebody else's")


def test_a_source_that_is_refused_and_a_dry_run_leave_no_repository(made, hub, tmp_path):
    with pytest.raises(RetrofitError, match="max_position_embeddings"):
        convert(made / "source", tmp_path / "target", RetrofitOptions(chunk_size=4096), push_to_hub="me/nothing")
    convert(made / "source", tmp_path / "target", OPTIONS, push_to_hub="me/nothing", dry_run=True)
    assert not hub.requests


def test_an_upload_that_fails_loses_nothing_and_the_command_in_the_message_completes_it(made, hub, tmp_path):
    hub.broken = "/commit/"
    target = tmp_path / "the target"
    with pytest.raises(RetrofitError, match="Nothing is lost") as raised:
        convert(made / "source", target, OPTIONS, push_to_hub="me/broken")
    assert "\n" not in str(raised.value)
    AutoModelForCausalLM.from_pretrained(target)
    assert not list(hub.files("me/broken").iterdir())

    hub.broken = None
    program, *arguments = shlex.split(re.search("`(.*)`", str(raised.value))[1])
    assert program == "hf"
    run_python(hub, tmp_path, "-m", "huggingface_hub.cli.hf", *arguments)
    for path in target.iterdir():
        assert (hub.files("me/broken") / path.name).read_bytes() == path.read_bytes()


def test_pushing_again_replaces_the_model_with_its_shards_and_reports(made, hub, tmp_path):
    """Of the shards of two models together, transformers would load those of the old one."""
    sharded = RetrofitOptions(chunk_size=4, window_chunks=2, sinks=1, shard_size=20_000)
    HfApi(token=TOKEN).create_repo("me/again")
    for name, options in (("a", OPTIONS), ("b", sharded), ("c", OPTIONS)):
        convert(made / "source", tmp_path / name, options, push_to_hub="me/again")
        if name == "a":  # as if it had been healed
            HfApi(token=TOKEN).upload_file(path_or_fileobj=b"{}", path_in_repo="heal.json", repo_id="me/again")
            continue
        on_hub = {path.name for path in hub.files("me/again").iterdir()}
        assert on_hub == {path.name for path in (tmp_path / name).iterdir()}
    assert len(hub.commits("me/again")) == 5


def test_a_base_on_its_authors_disk_is_not_named_on_the_hub(hub, tmp_path):
    """The hub refuses such a card, and with it the upload."""
    source = make_source(tmp_path / "source")
    named = "base_model:\n- /home/me/llama\n- some/model\ntags:\nlicense: mit"
    (source / "README.md").write_text(f"---\n{named}\n---\n# A model\n")
    convert(source, tmp_path / "target", OPTIONS, push_to_hub="me/local")
    data = card_on(hub, "me/local").data
    assert data.base_model == ["some/model"] and data.license == "mit" and "kvm" in data.tags


def test_the_card_has_what_verify_measured_last(made, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["conversion.verification"], "plot", lambda report, path: path.touch())
    convert(made / "source", tmp_path / "target", OPTIONS, command="the command")
    before = (tmp_path / "target" / "README.md").read_text()
    short = VerifyOptions(tokens=60, needles=0, device="cpu")
    verify(made / "source", tmp_path / "target", short, text=made / "text.txt", output=tmp_path / "elsewhere")
    assert (tmp_path / "target" / "README.md").read_text() == before

    for options in (short, VerifyOptions(tokens=60, pieces=2, needles=2, needle_tokens=(150,), device="cpu")):
        report = verify(made / "source", tmp_path / "target", options, text=made / "text.txt")
    card = ModelCard.load(tmp_path / "target" / "README.md")
    assert card.text.count("## Measured") == 1 and "on 2 piece(s) of 60 tokens of text.txt" in card.text
    assert "do so before relying" not in card.text and "## Not measured\n\nQuality on any benchmark.\n" in card.text
    row = next(line for line in card.text.splitlines() if line.startswith("| KVM |"))
    assert row.split(" | ")[1:5] == [f"{value:.3f}" for value in report["loss"]["by_block"]["KVM"]]
    assert row.endswith(f"| {sum(report['needles']['150']['KVM'])} of 2 |")
    assert str(tmp_path) not in card.text and card.data.license == "apache-2.0"


def test_a_healed_model_is_pushed_and_names_the_dataset_that_it_was_trained_on(made, hub, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["conversion.heal"], "plot", lambda report, path: path.touch())
    asked = stub_datasets(monkeypatch, ({"text": (made / "text.txt").read_text()} for _ in itertools.count()))
    healed = tmp_path / "healed"
    report = heal(made / "target", made / "source", ["some/text:en"], healed, HEAL_OPTIONS, push_to_hub="me/healed")
    assert asked == [("some/text", "en")] and report["text"]["tokens"] == {"some/text:en": 901}
    card = card_on(hub, "me/healed")
    assert card.data.datasets == ["some/text"] and "some/text:en (901 tokens)" in card.text
    assert 'path = "me/healed"\n' in card.text and "divergence from the source" in card.text
    assert {path.name for path in hub.files("me/healed").iterdir()} == {path.name for path in healed.iterdir()}


def stub_datasets(monkeypatch, rows):
    """In the place of the package `datasets`; the list of what it was asked for."""
    asked = []

    def load_dataset(*names, split, streaming):
        assert split == "train" and streaming
        asked.append(names)
        return SimpleNamespace(select_columns=lambda column: rows)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return asked


def test_of_a_dataset_without_end_no_more_is_read_than_is_needed(made, monkeypatch):
    asked = stub_datasets(monkeypatch, ({"text": "abcdefghi"} for _ in itertools.count()))
    tokenizer = AutoTokenizer.from_pretrained(made / "source")
    pieces = read_pieces(tokenizer, ["some/text", made / "text.txt"], 20, held_out=1, enough=5)
    assert asked == [("some/text", None)]
    assert pieces.tokens == {"some/text": 100, str(made / "text.txt"): 901}


def test_a_dataset_that_cannot_be_read_is_said_in_a_sentence(made, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(made / "source")
    for second in ({}, {"text": None}):
        stub_datasets(monkeypatch, (row for row in [{"text": "a"}, second]))
        with pytest.raises(RetrofitError, match="some/text` is not a file, and as a dataset of the hub"):
            read_pieces(tokenizer, ["some/text"], 20, 1)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RetrofitError, match="pip install datasets"):
        read_pieces(tokenizer, ["some/text"], 20, 1)


def test_a_dataset_of_the_hub_is_read_through_datasets(made, hub, tmp_path):
    pytest.importorskip("datasets")
    api = HfApi(token=TOKEN)
    api.create_repo("me/text", repo_type="dataset")
    rows = "".join(json.dumps({"text": text, "number": 1}) + "\n" for text in ("abc", "defg"))
    api.upload_file(path_or_fileobj=rows.encode(), path_in_repo="train.jsonl", repo_id="me/text", repo_type="dataset")
    script = """
    import json
    from conversion import RetrofitError
    from conversion.texts import documents
    print(json.dumps(list(documents("me/text"))))
    try:
        list(documents("me/nothing"))
    except RetrofitError as error:
        print(json.dumps(str(error)))
    """
    read, said = map(json.loads, run_python(hub, tmp_path, "-c", textwrap.dedent(script)).splitlines()[-2:])
    assert read == ["abc", "defg"]
    assert "me/nothing" in said and "\n" not in said

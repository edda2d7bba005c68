"""The needle tasks: documents that are what they say, scores that can fail, the command and its picture."""

import json
import random
from pathlib import Path

import needles
import pytest
import typer
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from needle_documents import ANSWER, ANSWER_TOKENS, NEEDLE, QUESTION, make_dataset, score
from small_evaluation import kvm, make_tokenizer, save

from kvm_hf.cache_kvm import KVMLayer

DEPTHS = [0.0, 0.5, 1.0]
LENGTHS = [600, 1500]
PLACE = {"max_seq_lengths": LENGTHS, "depths": DEPTHS, "samples": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("needles") / "model", kvm(max_position_embeddings=1500))


@pytest.fixture(scope="module")
def tasks(folder):
    metadata = PLACE | {"pretrained": str(folder), "trust_remote_code": True}
    manager = TaskManager(include_path=needles.TASKS, include_defaults=False, metadata=metadata)
    return manager.load(["needles"])["tasks"]


def prompts(task) -> list[str]:
    """What lm-eval hands to a model."""
    task.build_all_requests(rank=0, world_size=1)
    return [instance.args[0] for instance in task.instances]


def test_the_tasks_are_the_variants_and_leave_room_for_the_answer(tasks):
    assert set(tasks) == {f"needle_{variant}" for variant in needles.VARIANTS}
    for task in tasks.values():
        assert task.config.generation_kwargs["max_gen_toks"] == ANSWER_TOKENS


@pytest.mark.parametrize("variant", needles.VARIANTS)
def test_a_prompt_has_the_tokens_that_were_asked_for_and_the_needle_at_its_depth(tasks, variant):
    task, tokenizer = tasks[f"needle_{variant}"], make_tokenizer()
    for prompt, document in zip(prompts(task), task.test_docs(), strict=True):
        tokens = len(tokenizer(prompt).input_ids)
        assert tokens == document["prompt_tokens"]
        # A token is a character here, so the next word may take twenty.
        assert document["length"] - 20 < tokens + ANSWER_TOKENS <= document["length"]
        kind = "uuid" if variant == "long" else "number"
        assert len(document["value"]) == (36 if variant == "long" else 7)
        needle = NEEDLE.format(kind=kind, key=document["key"], value=document["value"])
        assert prompt.count(document["value"]) == prompt.count(needle) == 1
        assert prompt.count("The secret") == 2 + (3 if variant == "keys" else 0)  # needles, and the answer's beginning
        assert prompt.endswith(ANSWER.format(kind=kind, key=document["key"]))
        before, after = prompt.split(needle)
        after = after.split(QUESTION.format(kind=kind, key=document["key"]))[0]
        before = before.split("\n\n")[1]
        if document["length"] == max(LENGTHS):
            # Sentences of Genesis have up to 300 characters, other needles 55 each.
            assert len(before) / len(before + after) == pytest.approx(document["depth"], abs=0.3)
        if variant != "keys":
            assert (not before) == (document["depth"] == 0)


def test_documents_depend_on_the_seed_and_nothing_else(folder):
    def documents(**fields):
        arguments = {"filler": "text", "kind": "number", "other_keys": 3, "pretrained": str(folder)} | PLACE | fields
        return list(make_dataset(**arguments)["test"])

    first = documents()
    random.seed(5)
    assert documents() == first
    assert len({document["value"] for document in first}) == len(first) == len(LENGTHS) * len(DEPTHS) * 2
    assert all(a["input"] != b["input"] for a, b in zip(documents(seed=1), first))
    # What is asked of one cell does not depend on which others there are.
    assert documents(max_seq_lengths=LENGTHS[1:], samples=1) == [
        document for document in first if document["length"] == LENGTHS[1] and document["sample"] == 0
    ]


@pytest.mark.parametrize(
    ("answer", "found"), [(" 1234567.", 1), ("1234567", 1), ("It is 1234567, I think", 1), ("1234568", 0), ("", 0)]
)
def test_only_the_whole_value_counts(answer, found):
    assert score({"value": "1234567"}, [answer]) == {"found": found}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_seq_lengths": [600, 1501]}, "Length 1501: .* takes 1500 tokens"),
        ({"max_seq_lengths": [1000], "max_length": 999}, "Length 1000: .* takes 999 tokens"),
        ({"max_seq_lengths": [200]}, "Length 200: .* Ask for longer texts"),
        ({"depths": [50]}, "`depths` .50.: give parts of the text"),
        ({"pretrained": None}, "name the model's tokenizer"),
    ],
)
def test_what_cannot_work_is_refused(folder, fields, message):
    arguments = {"filler": "noise", "kind": "number", "other_keys": 0, "pretrained": str(folder)} | PLACE | fields
    with pytest.raises(ValueError, match=message):
        make_dataset(**arguments)


def test_the_command_writes_numbers_and_a_picture(folder, tmp_path, capsys):
    needles.main([str(folder)], tmp_path, length=[600], variant=["noise", "keys"], depth=[0.5], samples=2)
    facts = json.loads((tmp_path / "needles.json").read_text())
    cells = [(row["variant"], row["length"], row["depth"]) for row in facts["results"][str(folder)]]
    assert cells == [("noise", 600, 0.5), ("keys", 600, 0.5)]
    for row in facts["results"][str(folder)]:
        assert row["found"] == [float(value in answer) for value, answer in zip(row["values"], row["answers"])]
        assert len(row["found"]) == 2
    assert (tmp_path / "needles.png").stat().st_size > 10_000
    assert "0 of 2" in capsys.readouterr().out


def test_the_command_refuses_before_it_runs(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(needles, "evaluate", lambda *_: pytest.fail("it ran"))
    with pytest.raises(typer.BadParameter, match="Length 2000"):
        needles.main([str(folder), str(folder)], tmp_path / "new", length=[600, 2000])
    with pytest.raises(typer.BadParameter, match="--variant hay: there are noise, text"):
        needles.main([str(folder)], tmp_path / "new", variant=["hay"])
    assert not (tmp_path / "new").exists()


def test_generating_shows_what_likelihoods_hide(tasks, monkeypatch):
    """A cache that drops the state between calls: no likelihood moves, since each is one call, and the needle is lost.

    The small model knows no numbers; its needle is what it writes while it is whole.
    """
    lm = HFLM(pretrained=kvm(max_position_embeddings=1500), tokenizer=make_tokenizer(), batch_size=4, device="cpu")
    task = tasks["needle_text"]
    contexts = prompts(task)[:3]

    def answers():
        arguments = task.config.generation_kwargs
        return lm.generate_until([Instance("generate_until", {}, (context, arguments), 0) for context in contexts])

    def likelihoods():
        pairs = zip(contexts, whole)
        return [score for score, _ in lm.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs])]

    whole = answers()
    documents = [{"value": answer} for answer in whole]
    before = likelihoods()

    update = KVMLayer.update

    def forgetful_update(self, *args, **kwargs):
        if self.is_initialized and self.state is not None:
            self.values[:, :, : self.state.rows] = 0
        return update(self, *args, **kwargs)

    monkeypatch.setattr(KVMLayer, "update", forgetful_update)
    assert likelihoods() == before
    found = [task.process_results(document, [answer])["found"] for document, answer in zip(documents, answers())]
    assert sum(found) == 0
    monkeypatch.undo()
    found = [task.process_results(document, [answer])["found"] for document, answer in zip(documents, answers())]
    assert sum(found) == len(found)

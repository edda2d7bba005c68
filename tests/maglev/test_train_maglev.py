"""The training example: its task is what it says, and what it trained it does not train again."""

import importlib.util
import itertools
import json
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[2] / "examples" / "train_maglev.py"


@pytest.fixture
def example(monkeypatch):
    spec = importlib.util.spec_from_file_location("train_maglev", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in {"HELD_OUT": 8, "BATCH": 4, "PROBED_SEQUENCES": 1}.items():
        monkeypatch.setattr(module, name, value)
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)


def test_every_answer_is_the_value_that_was_set_last(example):
    data = example.Recall(50, seed=3)
    answers = 0
    for ids, labels, distances in zip(data.input_ids.tolist(), data.labels.tolist(), data.distance.tolist()):
        assert labels[0] == -100
        known = {}
        for position, token in enumerate(ids[:-1]):
            label = labels[position + 1]
            if example.FIRST_STATEMENT <= token < example.FIRST_QUESTION:
                variable, value = divmod(token - example.FIRST_STATEMENT, example.VALUES)
                known[variable] = 1 + value, position
            if token < example.FIRST_QUESTION:
                assert label == -100
                continue
            value, stated = known[token - example.FIRST_QUESTION]
            assert (label, distances[position]) == (value, position - stated)
            answers += 1
    assert answers > 1000


def test_a_seed_gives_the_same_tokens_and_another_one_others(example):
    assert torch.equal(example.Recall(3, seed=1).input_ids, example.Recall(3, seed=1).input_ids)
    assert not torch.equal(example.Recall(3, seed=1).input_ids, example.Recall(3, seed=2).input_ids)


def test_it_writes_what_it_measured_and_does_not_train_twice(example, tmp_path, monkeypatch):
    def run():
        example.main(seeds=[0], steps=2, output=tmp_path / "output", work=tmp_path / "work")
        return json.loads((tmp_path / "output" / "train-maglev.json").read_text())

    found = run()
    assert (tmp_path / "output" / "train-maglev.png").stat().st_size > 10_000
    runs = found["seeds"]["0"]
    assert len(runs["maglev"]["deployed"]["accuracy"]) == len(found["task"]["distance_bins"])
    assert runs["maglev"]["memory_gain_per_lag"][0] > 0
    monkeypatch.setattr(example.RecallTrainer, "train", lambda *args, **kwargs: pytest.fail("trained again"))
    assert run() == found


def test_an_interrupted_run_ends_as_if_it_had_not_been(example, tmp_path, monkeypatch):
    settings = example.Settings(steps=3)
    whole = example.train("maglev", 0, settings, tmp_path / "whole")
    measure, calls = example.answer, itertools.count()

    def interrupted(*args):
        if next(calls) == 2:  # in the second evaluation; there are two ways to measure
            raise KeyboardInterrupt
        return measure(*args)

    monkeypatch.setattr(example, "answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        example.train("maglev", 0, settings, tmp_path / "parts")
    assert [path.name for path in (tmp_path / "parts").glob("*/checkpoint-*")] == ["checkpoint-1"]
    resumed = example.train("maglev", 0, settings, tmp_path / "parts")
    assert resumed["deployed"] == whole["deployed"]
    assert resumed["memory_gain_per_lag"] == whole["memory_gain_per_lag"]

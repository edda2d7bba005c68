"""The recall example: its task is what it says, and what it trained it does not train again."""

import importlib.util
import json
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[2] / "examples" / "train_recall.py"


@pytest.fixture
def example(monkeypatch):
    spec = importlib.util.spec_from_file_location("train_recall", PATH)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "train_recall", module)
    spec.loader.exec_module(module)
    for name, value in {"HELD_OUT": 8, "BATCH": 4}.items():
        monkeypatch.setattr(module, name, value)
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)


def test_every_answer_is_the_value_of_its_key(example):
    data = example.Recall(20, seed=3)
    answers = set()
    for ids, labels, distances in zip(data.input_ids.tolist(), data.labels.tolist(), data.distance.tolist()):
        known = {}
        for key in range(0, example.LENGTH, 2):
            value, label = ids[key + 1], labels[key + 1]  # what the model says at the key is compared with the latter
            assert labels[key] == -100
            if value != example.FILLER:
                assert ids[key] not in known and value > example.KEYS and label == -100
                known[ids[key]] = value, key
                continue
            value, stated = known[ids[key]]
            assert (label, distances[key + 1]) == (value, key - stated)
            answers.add(key - stated)
    assert min(answers) == 2 and max(answers) > 10 * example.WINDOW


def test_a_seed_gives_the_same_tokens_and_another_one_others(example):
    assert torch.equal(example.Recall(3, seed=1).input_ids, example.Recall(3, seed=1).input_ids)
    assert not torch.equal(example.Recall(3, seed=1).input_ids, example.Recall(3, seed=2).input_ids)


def test_the_accuracy_of_a_bin_is_that_of_its_answers(example):
    data = example.Recall(6, seed=0)

    class OnlyNear:
        """Knows the answers that are less than 16 tokens away."""

        def eval(self):
            pass

        def __call__(self, ids, use_cache):
            at = next(i for i in range(0, 6, 4) if torch.equal(data.input_ids[i : i + 4], ids))
            labels, near = data.labels[at : at + 4].clone(), data.distance[at : at + 4] < 16
            said = torch.where(near & (labels > 0), labels, 0).roll(-1, 1)
            return type("Output", (), {"logits": torch.nn.functional.one_hot(said, example.VOCABULARY)})

    assert example.accuracy_over_distance(OnlyNear(), data) == [1, 1, 0, 0, 0, 0]


def test_it_writes_what_it_measured_and_goes_on_where_it_was(example, tmp_path, monkeypatch):
    """In this process; the pool only spreads the same calls over others."""

    class Pool:
        def __init__(self, *args, **kwargs):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *args):
            pass

        def submit(self, function, *args):
            future = Future()
            future.set_result(function(*args))
            return future

    monkeypatch.setattr(example, "ProcessPoolExecutor", Pool)

    def run():
        example.main(seeds=[0], steps=2, output=tmp_path / "output", work=tmp_path / "work")
        return json.loads((tmp_path / "output" / "train-recall.json").read_text())

    found = run()
    assert (tmp_path / "output" / "train-recall.png").stat().st_size > 10_000
    runs = found["seeds"]["0"]
    assert set(runs) == set(example.MODELS)
    assert [runs[kind]["rows_at_the_end"] for kind in example.MODELS] == [0, 16, 62, 69, 0]
    assert all(len(run["accuracy_over_distance"]) == len(found["task"]["distance_bins"]) for run in runs.values())
    monkeypatch.setattr(example.Trainer, "train", lambda *args, **kwargs: pytest.fail("trained again"))
    assert run()["seeds"] == found["seeds"]

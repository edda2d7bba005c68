"""lm-eval over saved folders, as on the machine of somebody who has only the folder: scores, texts, maximum length."""

import json

import pytest
from fresh_process import in_fresh_process
from small_evaluation import FAMILIES, LONGEST, save

# Longer than the windows of the small models (8 and 5), shorter, and longer than what they take.
TEXTS = ["abc " * 5, "x", "The quick brown fox jumps over the lazy dog. " * 2, "0123456789" * 12, "k" * 31, "Hello, "]
ENDINGS = ["dog", "y", " 1234567890, and so on", "!", "??", "world"]

SCRIPT = """
import lm_eval
from datasets import Dataset
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

rows = [{{"text": text, "ending": ending}} for text, ending in zip({texts}, {endings})]
shared = {{
    "custom_dataset": lambda **_: {{"test": Dataset.from_list(rows)}},
    "test_split": "test",
    "doc_to_text": "text",
    "doc_to_target": "ending",
    "target_delimiter": "",
}}
scored = shared | {{"task": "scored", "output_type": "loglikelihood", "metric_list": [{{"metric": "perplexity"}}]}}
written = shared | {{
    "task": "written",
    "output_type": "generate_until",
    "generation_kwargs": {{"max_gen_toks": 12, "until": [], "do_sample": False}},
    "metric_list": [{{"metric": "exact_match"}}],
}}
manager = TaskManager(include_defaults=False)  # reading the thousands that come with lm-eval takes half a minute
results = {{}}
for family, folder in {folders}.items():
    for batch in (1, 4, "auto"):
        arguments = {{"batch_size": batch, "max_batch_size": 3, "device": "cpu"}}
        lm = HFLM.create_from_arg_string(f"pretrained={{folder}},trust_remote_code=True", arguments)
        found = lm_eval.simple_evaluate(model=lm, tasks=[scored, written], task_manager=manager, bootstrap_iters=0)
        samples = found["samples"]
        results.setdefault(family, {{}})[batch] = {{
            "scores": [sample["filtered_resps"][0] for sample in samples["scored"]],
            "texts": [sample["filtered_resps"][0] for sample in samples["written"]],
            "longest": lm.max_length,
            "module": type(lm.model).__module__,
        }}
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory) -> dict[str, dict[str, dict]]:
    """By family and batch size: what lm-eval found."""
    root = tmp_path_factory.mktemp("evaluation")
    folders = {family: str(save(root / family, make())) for family, make in FAMILIES.items()}
    (root / "modules").mkdir()
    script = SCRIPT.format(texts=TEXTS, endings=ENDINGS, folders=json.dumps(folders))
    return in_fresh_process(script, root / "modules", OMP_NUM_THREADS="1")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_batch_size_gives_the_same_scores_and_texts(evaluated, family):
    one = evaluated[family]["1"]
    assert one["module"].startswith("transformers_modules")
    assert len(set(one["texts"])) == len(TEXTS)
    for batch in ("4", "auto"):
        other = evaluated[family][batch]
        for (score, greedy), (expected, expected_greedy) in zip(other["scores"], one["scores"]):
            assert score == pytest.approx(expected, abs=1e-3)  # float32, sums of about 100
            assert greedy == expected_greedy
        assert other["texts"] == one["texts"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_maximum_length_is_that_of_the_config(evaluated, family):
    assert {found["longest"] for found in evaluated[family].values()} == {LONGEST}

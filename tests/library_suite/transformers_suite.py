"""transformers' own model tests, which only its sdist carries: where they lie, and what they need to be imported.

Depends on the folder that `make suite` unpacks, one per version of transformers.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
import transformers
from transformers.models.auto import modeling_auto

PACKAGE = "transformers_tests"
FOLDER = Path(__file__).parents[2] / ".venv" / "suite" / transformers.__version__

# Modules that the sdist lacks, and what the others import from them.
MISSING = {
    # Tests of export and of generation. They are not there to be run.
    "exporters.test_export": {"ExportTesterMixin": type("ExportTesterMixin", (), {})},
    "generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
    # Arguments that every config takes; the values are ours, and none of them is the default.
    "utils.test_configuration_utils": {
        "config_common_kwargs": {
            "return_dict": False,
            "output_hidden_states": True,
            "dtype": "float16",
            "chunk_size_feed_forward": 5,
            "architectures": ["AnyModel"],
            "id2label": {0: "good", 1: "bad"},
            "label2id": {"good": 0, "bad": 1},
            "problem_type": "regression",
        }
    },
}


def load(name: str) -> ModuleType:
    """A module of the suite. If the suite is not there, whoever is being imported is skipped."""
    if not FOLDER.exists():
        pytest.skip(
            f"The tests of transformers {transformers.__version__} itself are not in {FOLDER}; `make suite` fetches them "
            "for the newest version we support, and for no other.",
            allow_module_level=True,
        )
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    for path, names in MISSING.items():
        module = sys.modules.setdefault(f"{PACKAGE}.{path}", ModuleType(f"{PACKAGE}.{path}"))
        vars(module).update(names)
    return importlib.import_module(f"{PACKAGE}.{name}")


@contextmanager
def registered(model_type: str, classes: dict[str, type]) -> Iterator[None]:
    """Meanwhile transformers finds the classes by name: the suite asks for it to know which labels a class takes.

    Args:
        classes: by what comes before `_MAPPING_NAMES` in the name of the mapping.
    """
    with ExitStack() as stack:
        for task, model_class in classes.items():
            names = getattr(modeling_auto, f"{task}_MAPPING_NAMES")
            stack.enter_context(patch.dict(names, {model_type: model_class.__name__}))
        yield

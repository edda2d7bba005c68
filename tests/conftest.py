"""Fixtures for all tests; helpers are in `small_models` and `small_sources`."""

import os

import pytest
import torch
import transformers
from small_sources import make_source


def pytest_configure():
    """`make test` says which transformers it means to test; a slip of paths must not go unnoticed."""
    expected = os.environ.get("EXPECTED_TRANSFORMERS", transformers.__version__)
    if transformers.__version__ != expected:
        raise pytest.UsageError(f"transformers {transformers.__version__} was imported instead of {expected}")


@pytest.fixture(autouse=True)
def one_thread():
    """The tests run on several processes already."""
    torch.set_num_threads(1)


@pytest.fixture
def source(tmp_path):
    """A random Llama checkpoint as people publish them."""
    return make_source(tmp_path / "source")

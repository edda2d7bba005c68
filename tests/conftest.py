"""Fixtures for all tests; helpers are in `small_models` and `small_sources`."""

import pytest
import torch
from small_sources import make_source


@pytest.fixture(autouse=True)
def one_thread():
    """The tests run on several processes already."""
    torch.set_num_threads(1)


@pytest.fixture
def source(tmp_path):
    """A random Llama checkpoint as people publish them."""
    return make_source(tmp_path / "source")

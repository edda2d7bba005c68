"""Each package is flat and imports nothing of ours from elsewhere, so files that both need are there twice."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("part", ["layer", "padding", "parallel", "peft"])
def test_files_that_both_packages_need_are_the_same(part):
    ours = (ROOT / "kvm_hf" / f"{part}_kvm.py").read_text()
    assert (ROOT / "maglev_hf" / f"{part}_maglev.py").read_text() == ours.replace("_kvm", "_maglev")

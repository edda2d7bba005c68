"""Two processes (gloo, CPU) train like one, through Trainer, with uneven numbers of labels and tokens; FSDP2 likewise."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
from small_training import FAMILIES, arguments_for, make_rows, pad, parameters_of
from test_accumulation import TOLERANCE, TRAINERS, error

# In the order in which two processes see them, one row each at a time.
WORKER = """
import sys
sys.path[:0] = {paths!r}
import torch
torch.set_num_threads(1)
from small_training import FAMILIES, arguments_for, make_rows, pad, parameters_of
from test_accumulation import TRAINERS

rank, folder = int(sys.argv[1]), sys.argv[2]
steps = {{}}
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
            steps[f"{{family}} {{checkpointing}} {{name}}"] = tensor - before[name]
        steps[f"{{family}} {{checkpointing}} loss"] = torch.tensor(logged["loss"])

from torch.distributed.fsdp import fully_shard

for family in FAMILIES:
    model = FAMILIES[family]()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    batch = pad("left")(make_rows()[2 * rank : 2 * rank + 2])
    model(**batch).loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            steps[f"{{family}} fsdp {{name}}"] = parameter.grad.full_tensor()
if rank == 0:
    torch.save(steps, folder + "/steps.pt")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def test_two_processes_train_like_one(tmp_path):
    folder = Path(__file__).parent
    paths = [str(part) for part in (folder, folder.parent, folder.parent / "maglev", folder.parents[1])]
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(paths=paths))
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
    steps = torch.load(tmp_path / "steps.pt")

    def of(prefix):
        return {name.removeprefix(prefix): step for name, step in steps.items() if name.startswith(prefix)}

    for family in FAMILIES:
        model = FAMILIES[family]()
        before = parameters_of(model)
        arguments = arguments_for(tmp_path, learning_rate=1.0, per_device_train_batch_size=8)
        trainer = TRAINERS[family](model, arguments, train_dataset=make_rows(), data_collator=pad("left"))
        trainer.train()
        loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
        alone = {name: tensor - before[name] for name, tensor in parameters_of(model).items()}
        for checkpointing in (False, True):
            together = of(f"{family} {checkpointing} ")
            assert abs(together.pop("loss") - loss) < 1e-4  # of about 5, in float32
            assert together.keys() == alone.keys()
            assert error(together, alone) < TOLERANCE, (family, checkpointing)

        # FSDP2 takes the mean of the two processes' gradients.
        model = FAMILIES[family]()
        for rows in (make_rows()[:2], make_rows()[2:4]):
            (model(**pad("left")(rows)).loss / 2).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        sharded = of(f"{family} fsdp ")
        assert sharded.keys() == gradients.keys()
        assert error(sharded, gradients) < TOLERANCE, family

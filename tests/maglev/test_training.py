"""Training: what gradients pass through, Trainer and its log, accumulation, checkpointing, several processes."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from small_maglev import LLAMA_STYLE, make_model
from small_models import generate, random_ids
from transformers import TrainerCallback, TrainingArguments

from maglev_hf import GrowingSweeps, MaglevCache, MaglevConfig, MaglevForCausalLM, MaglevForPreTraining, MaglevTrainer

SHARINGS = pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])


def trainee(**fields):
    return make_model(model_class=MaglevForPreTraining, **fields).train()


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@SHARINGS
@pytest.mark.parametrize("injection", ["kv", "residual", "cross_attention"])
def test_every_parameter_learns(shared, injection):
    model = trainee(share_prefiller=shared, memory_injection=injection)
    ids = random_ids(model, 20, batch=2)
    grads = gradients(model, model(ids, labels=ids).loss)
    assert grads.keys() == dict(model.named_parameters()).keys()
    assert all(grad.abs().max() > 0 for grad in grads.values())


@SHARINGS
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("style", [{}, LLAMA_STYLE], ids=["paper", "llama"])
def test_gradients_are_the_same_with_checkpointing(shared, reentrant, style):
    model = trainee(share_prefiller=shared, self_feeding_sweeps=1, **style)
    ids = random_ids(model, 20, batch=2)
    plain = gradients(model, model(ids, labels=ids).loss)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with_checkpoints = gradients(model, model(ids, labels=ids).loss)
    assert plain.keys() == with_checkpoints.keys()
    for name, grad in plain.items():
        assert (grad - with_checkpoints[name]).abs().max() < 1e-12, name
    assert model.config.use_cache


def test_checkpointing_in_training_does_not_disturb_what_is_deployed():
    """Also in training mode, where the layers would drop their cache."""
    model = make_model()
    ids = random_ids(model, 20, batch=2)
    with torch.no_grad():
        expected = model(ids, rollout="sequential").logits
        tokens = generate(model, ids, 8)
        model.train().gradient_checkpointing_enable()
        assert (model(ids, rollout="sequential").logits - expected).abs().max() < 1e-12
        assert torch.equal(generate(model, ids, 8), tokens)


@SHARINGS
def test_each_way_into_the_prefiller_can_be_detached(shared):
    def of_prefiller(**fields):
        model = trainee(share_prefiller=shared, **fields)
        ids = random_ids(model, 20)
        grads = gradients(model, model(ids, labels=ids).loss)
        return model, {name: grad for name, grad in grads.items() if name.startswith("prefiller.")}

    _, everything = of_prefiller()
    _, through_target = of_prefiller(detach_memory=True)
    _, through_fed = of_prefiller(detach_target=True)
    assert everything.keys() == through_target.keys() == through_fed.keys() and everything
    for name, grad in everything.items():
        # The two ways add up, as gradients do.
        assert (through_target[name] + through_fed[name] - grad).abs().max() < 1e-9 * max(1, grad.abs().max()), name
        assert through_target[name].abs().max() > 0 and through_fed[name].abs().max() > 0
    frozen, nothing = of_prefiller(detach_memory=True, detach_target=True)
    assert not nothing
    assert not any(p.requires_grad for name, p in frozen.named_parameters() if name.startswith("prefiller."))


def test_self_feeding_reads_what_the_pass_before_made():
    model = trainee(self_feeding_sweeps=2)
    ids = random_ids(model, 20)
    outputs = model(ids, labels=ids)
    memory = model.model(ids, rollout="teacher_forced", prefiller=model.prefiller).target
    target = memory
    for _ in range(3):
        fed = torch.cat([torch.zeros_like(memory[:, :1]), memory[:, :-1]], dim=1)
        memory = model.model(ids, fed=fed).last_hidden_state
    assert (model.compute_logits(memory) - outputs.logits).abs().max() < 1e-12
    distance = (memory - target).pow(2).mean(-1).sqrt().mean()
    assert (outputs.consistency_loss - distance).abs() < 1e-12
    # The deployed loss needs no teacher: with as many sweeps as tokens, training's is the same.
    model.config.self_feeding_sweeps = 19
    assert (model(ids, labels=ids).ce_loss - model.eval()(ids, labels=ids, rollout="sequential").loss).abs() < 1e-6


@torch.no_grad()
def test_evaluation_is_of_the_deployed_model_unless_asked_otherwise():
    model = make_model(model_class=MaglevForPreTraining, std=0.1, rollout_tolerance=1e-10)
    ids = random_ids(model, 30, batch=2)
    decoder = MaglevForCausalLM(model.config).double().eval()
    decoder.load_state_dict(model.state_dict(), strict=False)
    deployed = decoder(ids, labels=ids, rollout="sequential").loss
    for rollout in (None, "fixed_point", "sequential"):
        outputs = model(ids, labels=ids, rollout=rollout)
        assert (outputs.loss - deployed).abs() < 1e-6 and torch.equal(outputs.loss, outputs.ce_loss)
    forced = model(ids, labels=ids, rollout="teacher_forced")
    trained = model.train()(ids, labels=ids)
    for name in ("loss", "ce_loss", "consistency_loss"):
        assert torch.equal(forced[name], trained[name])
    assert (forced.ce_loss - deployed).abs() > 1e-4
    weighted = forced.ce_loss + model.config.consistency_weight * forced.consistency_loss
    assert (forced.loss - weighted).abs() < 1e-12


def test_labels_of_minus_100_leave_tokens_out_of_the_first_term_only():
    model = trainee()
    ids = random_ids(model, 20)
    whole, part = model(ids, labels=ids), model(ids, labels=ids.masked_fill(torch.arange(20) < 15, -100))
    assert torch.equal(whole.consistency_loss, part.consistency_loss)
    logits = model(ids).logits[0, 14:-1]
    assert (part.ce_loss - torch.nn.functional.cross_entropy(logits, ids[0, 15:])).abs() < 1e-6


def test_accumulated_batches_count_like_one():
    """Rows of the same length, so that the share of labels is that of tokens."""
    model = trainee()
    ids = random_ids(model, 20, batch=4)
    whole = gradients(model, model(ids, labels=ids).loss)
    items = torch.tensor(4 * 19)
    parts = [model(ids[rows], labels=ids[rows], num_items_in_batch=items) for rows in (slice(0, 1), slice(1, 4))]
    accumulated = gradients(model, sum(part.loss for part in parts))
    for name, grad in whole.items():
        assert (grad - accumulated[name]).abs().max() < 1e-6 * max(1, grad.abs().max())  # the cross-entropy is float32


def test_the_decoder_alone_trains_on_its_own_memories():
    """Its loss is the deployed one; gradients pass through the reading of each memory, and not through the memory."""
    model = make_model(rollout="sequential").train()
    ids = random_ids(model, 20)
    loss = model(ids, labels=ids).loss
    found = gradients(model, loss)
    with torch.no_grad():
        memory = model.model(ids, rollout="sequential").last_hidden_state
    fed = torch.cat([torch.zeros_like(memory[:, :1]), memory[:, :-1]], dim=1)
    again = model(ids, labels=ids, fed=fed).loss
    assert (again - loss).abs() < 1e-6
    for name, grad in gradients(model, again).items():
        assert (grad - found[name]).abs().max() < 1e-9, name
    assert found["model.layers.0.self_attn.memory.k_proj.weight"].abs().max() > 0


class Rows(torch.utils.data.Dataset):
    def __init__(self, model, count=8):
        self.ids = random_ids(model, 16, batch=count)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Log(TrainerCallback):
    def __init__(self):
        self.entries = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.entries.append(dict(logs))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_trainer_logs_both_terms_and_evaluates_what_is_deployed(tmp_path, accumulation):
    model = trainee(dtype=torch.float32, std=0.1)
    log, data = Log(), Rows(model)
    arguments = TrainingArguments(
        tmp_path,
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=4,
        save_steps=4,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    MaglevTrainer(model, arguments, train_dataset=data, eval_dataset=data, callbacks=[log]).train()
    steps = [entry for entry in log.entries if "loss" in entry]
    assert len(steps) == 2
    for entry in steps:
        total = entry["ce_loss"] + model.config.consistency_weight * entry["consistency_loss"]
        # Trainer's log is rounded to four digits.
        assert abs(entry["loss"] - total) < 2e-4
    evaluated = next(entry["eval_loss"] for entry in log.entries if "eval_loss" in entry)
    model.eval()
    deployed = torch.stack([model(row[None], labels=row[None], rollout="sequential").loss for row in data.ids]).mean()
    assert abs(evaluated - deployed.item()) < 1e-3
    again = MaglevForPreTraining.from_pretrained(tmp_path / "checkpoint-4")
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    MaglevTrainer(again, arguments, train_dataset=data, eval_dataset=data).train(resume_from_checkpoint=True)


WORKER = """
import sys
sys.path[:0] = {paths!r}
import torch
import torch.distributed as dist
from small_maglev import make_model
from small_models import random_ids
from maglev_hf import MaglevForPreTraining

rank = int(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
recipes = [
    dict(share_prefiller=shared, memory_injection=injection, **more)
    for shared in (True, False)
    for injection, more in (
        ("kv", {{}}),
        ("kv", dict(self_feeding_sweeps=1)),
        ("kv", dict(detach_memory=True, detach_target=True)),
        ("residual", {{}}),
        ("cross_attention", {{}}),
    )
]
for fields in recipes:
    for checkpointing in (False, True):
        alone = make_model(model_class=MaglevForPreTraining, **fields).train()
        model = make_model(model_class=MaglevForPreTraining, **fields).train()
        if checkpointing:
            model.gradient_checkpointing_enable({{"use_reentrant": False}})
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        ids = random_ids(model, 12, batch=4)
        for step in range(2):  # DDP notices an unused parameter in the second
            model.zero_grad()
            mine = ids[2 * rank : 2 * rank + 2]
            parallel(mine, labels=mine).loss.backward()
        alone(ids, labels=ids).loss.backward()
        for (name, one), two in zip(alone.named_parameters(), model.parameters()):
            if one.requires_grad:
                assert (one.grad - two.grad).abs().max() < 1e-6 * max(1, one.grad.abs().max()), name
dist.barrier()
dist.destroy_process_group()
print("fine")
"""


def test_two_processes_train_like_one(tmp_path):
    """DDP with gloo, every recipe of training: no parameter is unused or counted twice."""
    folder = Path(__file__).parent
    script = tmp_path / "worker.py"
    paths = [str(folder), str(folder.parent), str(folder.parents[1])]
    script.write_text(textwrap.dedent(WORKER.format(paths=paths)))
    command = [sys.executable, str(script)]
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in range(2)
    ]
    for worker in workers:
        output, _ = worker.communicate(timeout=240)
        assert worker.returncode == 0 and b"fine" in output, output.decode()


def test_trainer_refuses_a_loss_without_the_second_term(tmp_path):
    arguments = TrainingArguments(tmp_path, label_smoothing_factor=0.1, report_to=[], use_cpu=True)
    with pytest.raises(ValueError, match="label_smoothing_factor"):
        MaglevTrainer(trainee(), arguments)


def test_a_batch_without_labels_adds_nothing_to_an_accumulated_step():
    model = trainee()
    ids = random_ids(model, 12)
    empty = model(ids, labels=torch.full_like(ids, -100), num_items_in_batch=torch.tensor(5))
    assert empty.loss == 0
    assert all(grad.eq(0).all() for grad in gradients(model, empty.loss).values())


def test_a_resumed_run_logs_what_an_uninterrupted_one_does(tmp_path):
    def run(folder, steps, resume=False):
        model = trainee(dtype=torch.float32, std=0.1)
        log = Log()
        arguments = TrainingArguments(
            folder,
            max_steps=6,
            per_device_train_batch_size=2,
            logging_steps=1,
            save_steps=3,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = MaglevTrainer(model, arguments, train_dataset=Rows(model, 12), callbacks=[log, Stop(steps)])
        trainer.train(resume_from_checkpoint=resume)
        return [
            [entry[name] for name in ("loss", "ce_loss", "consistency_loss")]
            for entry in log.entries
            if "loss" in entry
        ]

    whole = run(tmp_path / "whole", 6)
    first = run(tmp_path / "parts", 3)
    second = run(tmp_path / "parts", 6, resume=True)
    assert len(whole) == 6 and first == whole[:3] and second[-3:] == whole[3:]


class Stop(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def test_dropout_does_not_keep_memories_from_settling():
    model = make_model(std=0.1, attention_dropout=0.5).train()
    ids = random_ids(model, 40)
    outputs = model.model(ids)
    assert outputs.sweeps[0] < 40 and len(outputs.sweeps) == 1
    expected = model.eval().model(ids, rollout="sequential").last_hidden_state
    assert not torch.allclose(outputs.last_hidden_state, expected, atol=1e-3)  # the pass that is trained drops


@pytest.mark.parametrize("injection", ["kv", "cross_attention", "residual"])
def test_keys_and_values_have_one_dtype_under_autocast(injection):
    model = make_model(dtype=torch.float32, std=0.1, memory_injection=injection)
    cache = MaglevCache(model.config)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model(random_ids(model, 20), past_key_values=cache)
    assert {tensor.dtype for layer in cache.layers[:-1] for tensor in (layer.keys, layer.values)} == {torch.bfloat16}


class Sweeps(TrainerCallback):
    def __init__(self):
        self.made = []

    def on_step_end(self, args, state, control, model, **kwargs):
        self.made.append(model.config.self_feeding_sweeps)


def test_growing_sweeps_are_drawn_for_each_step_and_not_saved(tmp_path):
    model, sweeps = trainee(dtype=torch.float32, std=0.1), Sweeps()
    arguments = TrainingArguments(
        tmp_path,
        max_steps=10,
        per_device_train_batch_size=2,
        save_steps=10,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    MaglevTrainer(model, arguments, train_dataset=Rows(model), callbacks=[sweeps, GrowingSweeps(20)]).train()
    limits = [round(20 * min(1, step / 8)) for step in range(10)]
    assert len(sweeps.made) == 10 and all(0 <= made <= limit for made, limit in zip(sweeps.made, limits))
    assert max(sweeps.made) > 3 and len(set(sweeps.made)) > 4
    assert MaglevConfig.from_pretrained(tmp_path / "checkpoint-10").self_feeding_sweeps == 0

"""transformers' Trainer over our models: checkpointing, precision, evaluation, resuming, checkpoints as remote code."""

import numpy as np
import pytest
import torch
from fresh_process import in_fresh_process
from small_training import FAMILIES, LENGTHS, Losses, arguments_for, largest_difference, make_rows, pad, parameters_of
from transformers import Trainer

from maglev_hf import MaglevTrainer

TRAINERS = {"llama": Trainer, "gptalpha": Trainer, "maglev": MaglevTrainer}


def run(family, folder, model=None, resume=None, **fields):
    """The trained model, and the log of every step."""
    model, losses = FAMILIES[family]() if model is None else model, Losses()
    settings = dict(max_steps=3, per_device_train_batch_size=2, optim="adamw_torch", learning_rate=1e-3)
    trainer = TRAINERS[family](
        model,
        arguments_for(folder, **{**settings, **fields}),
        train_dataset=make_rows(),
        data_collator=pad("right"),
        callbacks=[losses],
    )
    trainer.train(resume_from_checkpoint=resume)
    return model, losses.of_step


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_changes_nothing_that_is_learned_or_saved(tmp_path, family, reentrant):
    plain, losses = run(family, tmp_path / "plain")
    model, with_checkpoints = run(
        family,
        tmp_path / "run",
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": reentrant},
        save_strategy="steps",
        save_steps=3,
    )
    assert model.is_gradient_checkpointing
    for step, log in losses.items():
        assert abs(log["loss"] - with_checkpoints[step]["loss"]) < 1e-5  # float32, of about 5
    # Three steps of Adam move a weight by 3e-3; where a gradient is near zero, rounding decides on part of that.
    assert largest_difference(parameters_of(model), parameters_of(plain)) < 3e-4
    saved = type(model).from_pretrained(tmp_path / "run" / "checkpoint-3")
    assert saved.config.use_cache is True
    assert largest_difference(parameters_of(saved), parameters_of(model)) == 0
    ids = torch.arange(20)[None]
    assert saved.generate(ids, max_new_tokens=3, pad_token_id=0, do_sample=False).shape == (1, 23)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_autocast_learns_nearly_the_same(tmp_path, family):
    """Also what is near 1 and moves by less than bfloat16 could hold."""
    _, plain = run(family, tmp_path)
    before = parameters_of(FAMILIES[family]())
    model, losses = run(family, tmp_path, bf16=True)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    for step, log in losses.items():
        assert abs(log["loss"] / plain[step]["loss"] - 1) < 0.02  # three digits in every operation
        assert log["loss"] != plain[step]["loss"]
    for name, tensor in parameters_of(model).items():
        if "temperature" in name or name.endswith("residual_scale"):
            assert (tensor != before[name]).any() and (tensor - before[name]).abs().max() < 2**-8, name


@pytest.mark.parametrize("family", FAMILIES)
def test_evaluation_gives_compute_metrics_the_logits_of_every_token(tmp_path, family):
    model, rows = FAMILIES[family](), make_rows()
    seen = {}

    def compute_metrics(prediction):
        logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
        seen.update(logits=logits, labels=prediction.label_ids)
        counted = prediction.label_ids[:, 1:] != -100
        hits = logits[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
        return {"accuracy": hits[counted].mean().item()}

    trainer = TRAINERS[family](
        model,
        arguments_for(tmp_path, per_device_eval_batch_size=4),
        eval_dataset=rows,
        data_collator=pad("right"),
        compute_metrics=compute_metrics,
    )
    metrics = trainer.evaluate()
    model.eval()
    hits, total = 0, 0
    with torch.no_grad():
        for number, row in enumerate(rows):
            logits, length = model(row["input_ids"][None]).logits[0], LENGTHS[number]
            # Batches of another size and width, in float32.
            assert np.abs(seen["logits"][number, :length] - logits.numpy()).max() < 1e-3
            counted = row["labels"][1:] != -100
            hits += (logits[:-1].argmax(-1) == row["labels"][1:])[counted].sum().item()
            total += counted.sum().item()
    assert metrics["eval_accuracy"] == pytest.approx(hits / total)
    assert np.isfinite(metrics["eval_loss"])


@pytest.mark.parametrize("family", FAMILIES)
def test_an_interrupted_run_goes_on_with_the_same_losses(tmp_path, family):
    """And ends with the same weights, bit for bit."""
    settings = dict(save_strategy="steps", save_steps=2, gradient_accumulation_steps=2, num_train_epochs=3)
    whole, losses = run(family, tmp_path / "whole", max_steps=5, **settings)
    run(family, tmp_path / "parts", max_steps=2, **settings)
    again = FAMILIES[family]()
    with torch.no_grad():
        again.lm_head.weight.zero_()  # whatever it starts from, the checkpoint is what it goes on from
    again, rest = run(family, tmp_path / "parts", again, resume=True, max_steps=5, **settings)
    assert sorted(losses) == [1, 2, 3, 4, 5] and sorted(rest) == [3, 4, 5]
    for step, log in rest.items():
        for name in ("loss", "grad_norm", "ce_loss", "consistency_loss"):
            assert log.get(name) == losses[step].get(name), (step, name)
    assert largest_difference(parameters_of(again), parameters_of(whole)) == 0


def test_a_checkpoint_of_a_model_that_came_as_remote_code_loads_as_remote_code(tmp_path):
    """Case 20: two processes, neither of which can import our packages, with a cache of modules each."""
    for family in FAMILIES:
        FAMILIES[family]().save_pretrained(tmp_path / family)
    for name in ("cache", "cache2"):
        (tmp_path / name).mkdir()
    load = f"""
        from transformers import AutoModelForPreTraining, Trainer, TrainingArguments
        auto = dict(llama=AutoModelForCausalLM, gptalpha=AutoModelForCausalLM, maglev=AutoModelForPreTraining)
        folder, ids = {str(tmp_path)!r}, torch.arange(30)
    """
    trained = in_fresh_process(
        load
        + """
        result = {}
        for family, auto_class in auto.items():
            model = auto_class.from_pretrained(f"{folder}/{family}", trust_remote_code=True)
            arguments = TrainingArguments(f"{folder}/{family}-run", max_steps=1, save_steps=1, report_to=[],
                                          disable_tqdm=True, use_cpu=True, learning_rate=1e-2, logging_strategy="no",
                                          gradient_checkpointing=True)
            Trainer(model, arguments, train_dataset=[{"input_ids": ids, "labels": ids}] * 8).train()
            result[family] = [p.double().sum().item() for p in model.parameters()]
        print(json.dumps(result))
        """,
        tmp_path / "cache",
    )
    loaded = in_fresh_process(
        load
        + """
        result = {}
        for family, auto_class in auto.items():
            model = auto_class.from_pretrained(f"{folder}/{family}-run/checkpoint-1", trust_remote_code=True)
            decoder = AutoModelForCausalLM.from_pretrained(f"{folder}/{family}-run/checkpoint-1", trust_remote_code=True)
            tokens = decoder.generate(ids[None], max_new_tokens=4, do_sample=False, pad_token_id=0)
            result[family] = [[p.double().sum().item() for p in model.parameters()], type(model).__module__,
                              model.config.use_cache, list(tokens.shape)]
        print(json.dumps(result))
        """,
        tmp_path / "cache2",
    )
    for family, (sums, module, use_cache, shape) in loaded.items():
        assert sums == trained[family] and use_cache and shape == [1, 34]
        assert module.startswith("transformers_modules")
        before = [p.double().sum().item() for p in FAMILIES[family]().parameters()]
        assert sum(one != two for one, two in zip(sums, before)) > 0.9 * len(before)

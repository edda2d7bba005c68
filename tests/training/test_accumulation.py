"""Accumulated batches count like one, with as many labels and tokens as they happen to have."""

import pytest
import torch
from small_training import FAMILIES, arguments_for, make_rows, pack, pad, parameters_of
from torch.nn.functional import cross_entropy
from transformers import DataCollatorWithFlattening, Trainer

from kvm_hf import KVMTrainer
from maglev_hf import MaglevTrainer

TRAINERS = {"llama": KVMTrainer, "gptalpha": KVMTrainer, "maglev": MaglevTrainer}
RATE = 1.0
# How a step's eight rows come: rows per batch, batches, collator.
PADDED = {
    "8 in a batch": (8, 1, {}),
    "2 in a batch": (2, 4, {}),
    "1 in a batch": (1, 8, {}),
    "1 in a batch, padded": (1, 8, dict(width=33)),
}


def expected_step(family, rows) -> dict[str, torch.Tensor]:
    """Gradient of the loss by its definition, every row alone: the sum over its terms, divided by the number of labels of all
    rows, and for the second term by the number of their tokens."""
    model = FAMILIES[family]()
    labels = sum((row["labels"][1:] != -100).sum() for row in rows)
    tokens = sum(len(row["labels"]) for row in rows)
    for row in rows:
        ids = row["input_ids"][None]
        outputs = model(ids, labels=ids)
        loss = cross_entropy(outputs.logits[0, :-1], row["labels"][1:], reduction="sum") / labels
        if family == "maglev":
            loss = loss + model.config.consistency_weight * outputs.consistency_loss * len(row["labels"]) / tokens
        loss.backward()
    return {name: -RATE * p.grad for name, p in model.named_parameters() if p.grad is not None}


def trained_step(family, rows, trainer_class, folder, per_batch, batches, collator) -> dict[str, torch.Tensor]:
    model = FAMILIES[family]()
    before = parameters_of(model)
    arguments = arguments_for(
        folder,
        learning_rate=RATE,
        per_device_train_batch_size=per_batch,
        gradient_accumulation_steps=batches,
    )
    trainer_class(model, arguments, train_dataset=rows, data_collator=collator).train()
    return {name: tensor - before[name] for name, tensor in parameters_of(model).items()}


def error(found: dict, expected: dict) -> float:
    """Relative to the largest step of each parameter, or of the model where that is less than a thousandth of it."""
    largest = max(step.abs().max() for step in expected.values())
    return max(
        ((found[name] - step).abs().max() / step.abs().max().clamp_min(1e-3 * largest)).item()
        for name, step in expected.items()
    )


# A step is the difference of two float32 weights of about 1, known to 1e-7; `error` looks at steps down to a thousandth
# of the largest one, which is about 0.1 here.
TOLERANCE = 1e-3


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_over_eight_rows_is_the_same_however_they_are_padded_and_accumulated(tmp_path, family, side):
    rows = make_rows()
    expected = expected_step(family, rows)
    for name, (per_batch, batches, width) in PADDED.items():
        step = trained_step(family, rows, TRAINERS[family], tmp_path, per_batch, batches, pad(side, **width))
        assert error(step, expected) < TOLERANCE, name


@pytest.mark.parametrize("family", ["llama", "gptalpha"])
def test_plain_trainer_is_exact_for_right_padding_and_for_its_own_packing(tmp_path, family):
    rows = make_rows()
    expected = expected_step(family, rows)
    flat = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    listed = [{name: tensor.tolist() for name, tensor in row.items()} for row in rows]
    for given, per_batch, batches, collator in ((rows, 2, 4, pad("right")), (listed, 2, 4, flat)):
        step = trained_step(family, given, Trainer, tmp_path, per_batch, batches, collator)
        assert error(step, expected) < TOLERANCE, collator


@pytest.mark.parametrize("family", FAMILIES)
def test_our_trainers_are_exact_for_packs_of_which_only_positions_tell(tmp_path, family):
    rows = make_rows()
    step = trained_step(family, rows, TRAINERS[family], tmp_path, 2, 4, pack)
    assert error(step, expected_step(family, rows)) < TOLERANCE


def test_plain_trainer_says_that_it_cannot_count_behind_left_padding(tmp_path):
    """And would have to: the step is another one. In one batch it is exact even so."""
    rows = make_rows()
    expected = expected_step("llama", rows)
    with pytest.warns(UserWarning, match="KVMTrainer counts them right"):
        step = trained_step("llama", rows, Trainer, tmp_path, 2, 4, pad("left"))
    assert error(step, expected) > 10 * TOLERANCE
    assert error(trained_step("llama", rows, Trainer, tmp_path, 8, 1, pad("left")), expected) < TOLERANCE


def test_without_a_count_of_tokens_the_second_term_goes_by_the_share_of_labels(tmp_path):
    """As under plain Trainer: near, not exact. MaglevTrainer's own count is what makes it so."""
    rows = make_rows()
    expected = expected_step("maglev", rows)
    assert error(trained_step("maglev", rows, Trainer, tmp_path, 1, 8, pad("right")), expected) > 10 * TOLERANCE


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_batch_whose_labels_are_all_left_out_adds_nothing():
    for family in FAMILIES:
        model = FAMILIES[family]()
        ids = torch.arange(12).view(2, 6)
        mask = torch.tensor([[0] * 5 + [1]] * 2)  # the only token of a row is predicted by none
        for labels in (torch.full_like(ids, -100), ids.masked_fill(mask == 0, -100)):
            outputs = model(ids, attention_mask=mask, labels=labels, num_items_in_batch=torch.tensor(7))
            assert (outputs.ce_loss if family == "maglev" else outputs.loss) == 0
            assert outputs.loss.isfinite()

"""Rows of different lengths with some labels left out, collators, and one Trainer run over them."""

import torch
from small_maglev import make_model as make_maglev
from small_models import GPTALPHA, HALF, MIXED, make_model
from torch.nn.utils.rnn import pad_sequence
from transformers import TrainerCallback, TrainingArguments

from maglev_hf import MaglevForPreTraining

VOCABULARY = 61
# Longer than the windows of the small models (8 and 5), and shorter.
LENGTHS = (23, 3, 17, 9, 30, 12, 5, 20)


def llama(**fields):
    fields = dict(rope_parameters=HALF, state_treatment="normalized", **MIXED) | fields
    return make_model(dtype=torch.float32, **fields).train()


def gptalpha(**fields):
    return make_model(dtype=torch.float32, **(GPTALPHA | fields)).train()


def maglev(**fields):
    """Weights for which the memory of a token depends on that of the one before without chaos."""
    model = make_maglev(dtype=torch.float32, std=0.1, model_class=MaglevForPreTraining, **fields).train()
    model.tie_weights()
    return model


FAMILIES = {"llama": llama, "gptalpha": gptalpha, "maglev": maglev}


def make_rows(lengths=LENGTHS, seed=0) -> list[dict[str, torch.Tensor]]:
    """A third of the labels are left out, and all of the second row."""
    rows, generator = [], torch.Generator().manual_seed(seed)
    for number, length in enumerate(lengths):
        ids = torch.randint(VOCABULARY, (length,), generator=generator)
        left_out = torch.rand(length, generator=generator) < (1 if number == 1 else 0.3)
        left_out[0] &= number == 1  # the first label, which nothing predicts, is there as people leave it
        rows.append({"input_ids": ids, "labels": ids.masked_fill(left_out, -100)})
    return rows


def pad(side: str, width: int | None = None):
    """A collator; `width` pads also a single row."""

    def collate(rows):
        batch = {}
        for name, filler in (("input_ids", 0), ("labels", -100), ("attention_mask", 0)):
            parts = [torch.ones_like(row["input_ids"]) if name == "attention_mask" else row[name] for row in rows]
            batch[name] = pad_sequence(parts, batch_first=True, padding_value=filler, padding_side=side)
            if width is not None:
                more = width - batch[name].shape[1]
                batch[name] = torch.nn.functional.pad(
                    batch[name], (more, 0) if side == "left" else (0, more), value=filler
                )
        return batch

    return collate


def pack(rows):
    """One row of several sequences, told apart by positions alone."""
    flat = {name: torch.cat([row[name] for row in rows])[None] for name in ("input_ids", "labels")}
    return flat | {"position_ids": torch.cat([torch.arange(len(row["labels"])) for row in rows])[None]}


def arguments_for(folder, **fields) -> TrainingArguments:
    """Plain gradient descent without clipping, so that a step is the gradient times the rate."""
    settings = dict(
        max_steps=1,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
    )
    return TrainingArguments(folder, **{**settings, **fields})


class Losses(TrainerCallback):
    def __init__(self):
        self.of_step = {}

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.of_step[state.global_step] = dict(logs)


def parameters_of(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def largest_difference(one: dict, two: dict) -> float:
    assert one.keys() == two.keys()
    return max((one[name] - two[name]).abs().max().item() for name in one)

"""A Trainer that weighs and logs both terms of Maglev's loss, and a schedule of self-feeding. Depends on `padding_maglev`
and on transformers' Trainer."""

import random

import torch
import torch.nn.functional as F
from transformers import Trainer, TrainerCallback

from .padding_maglev import batch_within_sequences


class MaglevTrainer(Trainer):
    """transformers' Trainer; its log also has `ce_loss` and `consistency_loss`, means over the steps since the last
    entry like `loss` itself, which is the first plus `consistency_weight` times the second. Where gradients accumulate,
    over batches and processes, the first is the mean over all their labels that the loss counts, the second over all
    their tokens.

    Raises:
        ValueError: label smoothing or a loss of one's own, which would leave the second term out; evaluation of the deployed
            decoder under FSDP.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.label_smoother is not None or self.compute_loss_func is not None:
            raise ValueError(
                "`label_smoothing_factor` and `compute_loss_func` replace the model's loss, and with it the distance "
                "between memories and targets, without which nothing is learned to remember. Leave them out."
            )
        config = self.model.config
        shards = getattr(getattr(config, "distributed_config", None), "fsdp_size", None) or 1
        evaluates = self.args.eval_strategy != "no" and config.rollout != "teacher_forced"
        if evaluates and (self.is_fsdp_enabled or shards > 1):
            raise ValueError(
                "Under FSDP the deployed decoder, whose loss evaluation gives, cannot search for its memories. Set "
                "`model.config.rollout = 'teacher_forced'` for the loss of training in its place, or use DDP."
            )
        self._terms, self._first_step, self._num_tokens = {}, 0, None

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, num_items = super().get_batch_samples(map(batch_within_sequences, epoch_iterator), num_batches, device)
        # Trainer adds tokens up over processes as it does labels.
        tokens = iter([{"labels": tokens_as_labels(batch)} for batch in batches])
        _, self._num_tokens = super().get_batch_samples(tokens, len(batches), device)
        return batches, num_items

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if num_items_in_batch is not None and self._num_tokens is not None:
            inputs = {**inputs, "num_tokens_in_batch": self._num_tokens}
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        if model.training:
            # As Trainer does with the loss itself: the mean over accumulation steps, unless the model divided by the items
            # of all of them; and then their mean over processes, unless it divided by the items of all of those too.
            counted = num_items_in_batch is not None and self.model_accepts_loss_kwargs
            steps = 1 if counted else self.args.gradient_accumulation_steps
            scale = (
                self.accelerator.num_processes // self.get_tp_size()
                if counted and self.args.average_tokens_across_devices
                else 1
            )
            if not self._terms:
                self._first_step = self.state.global_step
            for name in ("ce_loss", "consistency_loss"):
                term = outputs.get(name)
                if term is not None:
                    self._terms[name] = self._terms.get(name, 0.0) + term.detach() * scale / steps
        return (loss, outputs) if return_outputs else loss

    def log(self, logs, *args, **kwargs):
        if "loss" in logs and self._terms:
            steps = max(1, self.state.global_step - self._first_step)
            for name, total in self._terms.items():
                logs[name] = round(self.accelerator.gather(torch.as_tensor(total)).mean().item() / steps, 4)
            self._terms = {}
        super().log(logs, *args, **kwargs)


class GrowingSweeps(TrainerCallback):
    """How many self-feeding sweeps a step of training makes: drawn from 0 to a limit, which grows to `sweeps` in the first
    four fifths of the steps. First the decoder learns to read memories, then to keep them for ever more tokens. Steps
    without a sweep keep memories and targets alike; a fixed number would be learned by heart.

    In place of `config.self_feeding_sweeps`, which it sets for the time of each step: what is saved has its own.
    """

    def __init__(self, sweeps: int):
        self.sweeps = sweeps

    def on_step_begin(self, args, state, control, model, **kwargs):
        self._before = model.config.self_feeding_sweeps
        model.config.self_feeding_sweeps = self.draw(state.global_step, state.max_steps, args.seed)

    def on_step_end(self, args, state, control, model, **kwargs):
        model.config.self_feeding_sweeps = self._before

    def draw(self, step: int, steps: int, seed: int) -> int:
        """The number for a step. Of the step alone, so that a resumed run draws as one that was not interrupted, and all
        processes alike."""
        limit = round(self.sweeps * min(1, step / steps / 0.8))
        return random.Random(f"{seed}, {step}").randint(0, limit)


def tokens_as_labels(batch) -> torch.Tensor:
    """`[B, 1 + T]`: -100 at pads and in the first column, which Trainer does not count either."""
    mask = batch.get("attention_mask")
    if mask is None:
        given = batch.get("input_ids", batch.get("inputs_embeds"))
        mask = torch.ones(given.shape[:2], dtype=torch.long, device=given.device)
    return F.pad(torch.where(mask == 1, 1, -100), (1, 0), value=-100)

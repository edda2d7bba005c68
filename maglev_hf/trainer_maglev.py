"""A Trainer that logs both terms of Maglev's loss. Depends on transformers' Trainer (and so on accelerate) alone."""

import torch
from transformers import Trainer


class MaglevTrainer(Trainer):
    """transformers' Trainer; its log also has `ce_loss` and `consistency_loss`, means over the steps since the last
    entry like `loss` itself, which is the first plus `consistency_weight` times the second.

    Raises:
        ValueError: label smoothing or a loss of one's own, which would leave the second term out.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.label_smoother is not None or self.compute_loss_func is not None:
            raise ValueError(
                "`label_smoothing_factor` and `compute_loss_func` replace the model's loss, and with it the distance "
                "between memories and targets, without which nothing is learned to remember. Leave them out."
            )
        self._terms, self._logged_at = {}, 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        if model.training:
            # As Trainer does with the loss itself: the mean over accumulation steps, unless the model divided by the items
            # of all of them; and then their mean over processes, unless it divided by the items of all of those too.
            counted = num_items_in_batch is not None and self.model_accepts_loss_kwargs
            steps = 1 if counted else self.args.gradient_accumulation_steps
            scale = self.accelerator.num_processes if counted and self.args.average_tokens_across_devices else 1
            for name in ("ce_loss", "consistency_loss"):
                term = outputs.get(name)
                if term is not None:
                    self._terms[name] = self._terms.get(name, 0.0) + term.detach() * scale / steps
        return (loss, outputs) if return_outputs else loss

    def log(self, logs, *args, **kwargs):
        if "loss" in logs and self._terms:
            steps = max(1, self.state.global_step - self._logged_at)
            for name, total in self._terms.items():
                logs[name] = round(self.accelerator.gather(torch.as_tensor(total)).mean().item() / steps, 4)
            self._terms, self._logged_at = {}, self.state.global_step
        super().log(logs, *args, **kwargs)

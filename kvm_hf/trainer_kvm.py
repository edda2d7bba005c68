"""A Trainer that weighs accumulated batches exactly. Depends on `padding_kvm` and on transformers' Trainer alone."""

from transformers import Trainer

from .padding_kvm import batch_within_sequences


class KVMTrainer(Trainer):
    """transformers' Trainer, which counts the labels of all batches of a step beforehand; here those that the loss counts.

    The two differ where a sequence's first token does not stand in the first column and its label is not -100: behind left
    padding, or in packed batches of other collators than transformers'. For other batches Trainer itself is exact.
    """

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        return super().get_batch_samples(map(batch_within_sequences, epoch_iterator), num_batches, device)

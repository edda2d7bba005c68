"""Small models of every family in folders as people evaluate them, with a tokenizer of one token per character."""

import string
from pathlib import Path

import torch
from small_maglev import make_model as make_maglev
from small_models import GPTALPHA, MIXED, make_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

LONGEST = 96
FIELDS = dict(
    vocab_size=2 + len(string.printable), max_position_embeddings=LONGEST, eos_token_id=1, dtype=torch.float32
)


def kvm(**fields):
    return make_model(**FIELDS | MIXED | fields)


def gptalpha(**fields):
    return make_model(**FIELDS | GPTALPHA | fields)


def maglev(**fields):
    """Weights for which the memory of a token depends on that of the one before without chaos."""
    return make_maglev(**FIELDS | dict(std=0.1) | fields)


FAMILIES = {"kvm": kvm, "gptalpha": gptalpha, "maglev": maglev}


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<unk>", "</s>", *string.printable]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def save(folder: Path, model) -> Path:
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder

"""What is measured: a prompt, a step of decoding, a step of training; and the memory that the first and the last need."""

import torch
from transformers import DynamicCache, PreTrainedModel

from conversion.plan import cache_bytes
from kvm_hf import KVMConfig
from kvm_hf.modeling_kvm import CACHE_NAME

from .measuring import added_memory
from .models import make_model, prompt


def read(model: PreTrainedModel, ids: torch.Tensor, **kwargs):
    """The cache after a prompt."""
    return getattr(model(ids, use_cache=True, logits_to_keep=1, **kwargs), CACHE_NAME)


def step(model: PreTrainedModel, cache, token: torch.Tensor, **kwargs) -> None:
    model(token, **{CACHE_NAME: cache}, use_cache=True, **kwargs)


def train_step(model: PreTrainedModel, ids: torch.Tensor) -> None:
    model.zero_grad()
    model.train()(ids, labels=ids, use_cache=False).loss.backward()


def training_memory(name: str, size: dict, tokens: int, device: str) -> int:
    model = make_model(name, size, device)
    train_step(model, prompt(size, 16, device))  # gradients exist
    return added_memory(lambda: train_step(model, prompt(size, tokens, device)), device)


def prefill_memory(name: str, size: dict, tokens: int, device: str) -> dict:
    model, caches = make_model(name, size, device), []
    with torch.inference_mode():
        read(model, prompt(size, 16, device))
        added = added_memory(lambda: caches.append(read(model, prompt(size, tokens, device))), device)
    by_formula = cache_bytes(model.config, tokens, model.dtype) if isinstance(model.config, KVMConfig) else None
    return {"added_bytes": added, "cache_bytes": _held(caches[0]), "cache_bytes_by_formula": by_formula}


def _held(cache: DynamicCache) -> int:
    if hasattr(cache, "nbytes"):
        return cache.nbytes
    return sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values))

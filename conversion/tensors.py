"""The values of planned tensors: one at a time for the shards of a target, or all of them as a model in memory."""

import torch
from safetensors import SafetensorError

from kvm_hf import KVMConfig, KVMForCausalLM
from kvm_hf.modeling_kvm import KVMRotaryEmbedding

from .errors import RetrofitError
from .plan import TargetTensor
from .source import Source


def make_tensor(source: Source, tensor: TargetTensor) -> torch.Tensor:
    """The values of a planned tensor, in its dtype."""
    origin = tensor.origin
    if origin.name is None:
        return torch.full(tensor.shape, origin.fill, dtype=tensor.dtype)
    try:
        original = source.read(origin.name, origin.start, origin.stop)
    except SafetensorError as error:
        raise RetrofitError(f"Tensor {origin.name!r} of the source cannot be read: {error}") from error
    made = original.to(tensor.dtype)
    if made.dtype != original.dtype and not made.isfinite().all() and original.isfinite().all():
        raise RetrofitError(
            f"Tensor {origin.name!r} has values beyond the range of {tensor.dtype}; choose another --dtype."
        )
    return made


def make_model(config: KVMConfig, weights: dict[str, torch.Tensor]) -> KVMForCausalLM:
    """A frozen model over `weights`, which are not copied; those that it has no place for are left out."""
    with torch.device("meta"):
        model = KVMForCausalLM(config)
    if config.tie_word_embeddings:
        weights = weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}
    model.load_state_dict({name: weights[name] for name in model.state_dict()}, assign=True)
    model.tie_weights()
    # Its buffers are in no checkpoint.
    model.model.rotary_emb = KVMRotaryEmbedding(config).to(model.lm_head.weight.device)
    return model.requires_grad_(False).eval()

"""On a GPU, code that asks a tensor for its values makes the processor wait. Tensors on the meta device have none to give:
whatever asks fails."""

import pytest
import torch
from small_maglev import make_model as make_maglev
from small_models import GPTALPHA, HALF, MIXED, make_model

MODELS = {
    "positional": lambda: make_model(),
    "normalized": lambda: make_model(rope_parameters=HALF),
    "fixed": lambda: make_model(state_budget="fixed"),
    "beside other layers": lambda: make_model(**MIXED),
    "gptalpha": lambda: make_model(**GPTALPHA),
    "maglev": lambda: make_maglev(rollout="sequential"),
}


@pytest.mark.parametrize("name", MODELS)
def test_nothing_in_prefill_and_decode_asks_for_the_value_of_a_tensor(name):
    model = MODELS[name]().eval().to("meta")

    def ids(tokens):
        return torch.zeros(2, tokens, dtype=torch.long, device="meta")

    with torch.no_grad():
        outputs = model(ids(37), use_cache=True)
        cache = outputs.get("cache", outputs.get("past_key_values"))
        for _ in range(9):  # over two borders of chunks
            outputs = model(ids(1), use_cache=True, cache=cache)
    assert outputs.logits.shape == (2, 1, model.config.vocab_size)
    assert cache.get_seq_length() == 46


def test_the_meta_device_would_notice():
    for ask in (torch.Tensor.item, torch.Tensor.tolist, bool, int, torch.nonzero):
        with pytest.raises((RuntimeError, NotImplementedError)):
            ask(torch.zeros(1, device="meta"))

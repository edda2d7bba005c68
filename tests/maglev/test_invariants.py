"""A sequence gives the same however it is fed and in any company (specification, section 5, rows 1 to 3 and 5)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_maglev import configs, make_model
from small_models import random_ids
from transformers import MistralConfig, MistralForCausalLM

from maglev_hf import MaglevCache, MaglevForPreTraining, rollout_maglev

INJECTIONS = ("kv", "residual", "cross_attention")
W = 5  # the window of `SMALL`


def padded(sequences, side, extra=0):
    """Sequences `[n]` of ids as one batch and its mask; pads are id 7, a token like any other."""
    width = max(len(ids) for ids in sequences) + extra
    batch = torch.full((len(sequences), width), 7)
    mask = torch.zeros_like(batch)
    for row, ids in enumerate(sequences):
        columns = slice(width - len(ids), width) if side == "left" else slice(0, len(ids))
        batch[row, columns], mask[row, columns] = ids, 1
    return batch, mask


def sequences_of(model, lengths, seed=0):
    return [random_ids(model, length, seed=100 * seed + row)[0] for row, length in enumerate(lengths)]


def pieces(length, sizes):
    """Slices of `sizes` tokens; the last size repeats."""
    start, sizes = 0, list(sizes)
    while start < length:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        yield slice(start, min(start + size, length))
        start += size


@settings(max_examples=60, deadline=None)
@given(
    fields=configs(),
    length=st.integers(1, 30),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    seed=st.integers(0, 5),
)
@torch.no_grad()
def test_a_pass_that_is_fed_memories_equals_steps_that_are_fed_the_same(fields, length, sizes, seed):
    model = make_model(seed, **fields)
    ids = random_ids(model, length, batch=2, seed=seed)
    fed = torch.randn(2, length, model.config.hidden_size, dtype=torch.float64, generator=torch.manual_seed(seed))
    whole = model.model(ids, fed=fed).last_hidden_state
    for taken in (sizes, [1]):
        cache = MaglevCache(model.config)
        parts = [
            model.model(ids[:, part], fed=fed[:, part], cache=cache).last_hidden_state for part in pieces(length, taken)
        ]
        assert (torch.cat(parts, dim=1) - whole).abs().max() < 1e-9
        assert torch.equal(cache.memory, parts[-1][:, -1])


@pytest.mark.parametrize("injection", INJECTIONS)
@torch.no_grad()
def test_what_is_fed_moves_every_memory_from_then_on_and_none_before(injection):
    """Or the tests above would compare models that do not look at memories."""
    model = make_model(memory_injection=injection)
    ids = random_ids(model, 12)
    fed = torch.randn(1, 12, model.config.hidden_size, dtype=torch.float64, generator=torch.manual_seed(0))
    other = fed.clone()
    other[:, 6] += 1.0
    moved = (model.model(ids, fed=fed).last_hidden_state - model.model(ids, fed=other).last_hidden_state).norm(dim=-1)
    assert (moved[0, :6] == 0).all() and (moved[0, 6:] > 1e-3).all()


@settings(max_examples=60, deadline=None)
@given(
    fields=configs(),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    with_prefiller=st.booleans(),
    seed=st.integers(0, 5),
)
@torch.no_grad()
def test_the_fixed_point_is_what_single_steps_give_in_any_split(fields, lengths, sizes, with_prefiller, seed):
    """Left-padded batches, prompts shorter and longer than the window. What is left of the last sweep's movement may grow
    on its way through the layers, hence the factor."""
    model = make_model(seed, model_class=MaglevForPreTraining, std=0.1, **fields)
    model.config.rollout_tolerance = 1e-11
    sequences = sequences_of(model, lengths, seed)
    ids, mask = padded(sequences, "left")
    prefiller = model.prefiller if with_prefiller else None
    cache, parts = MaglevCache(model.config), []
    for part in pieces(ids.shape[1], sizes):
        outputs = model.model(
            ids[:, part], attention_mask=mask[:, : part.stop], cache=cache, rollout="fixed_point", prefiller=prefiller
        )
        parts.append(outputs.last_hidden_state)
    memory = torch.cat(parts, dim=1)
    for row, sequence in enumerate(sequences):
        alone, steps = MaglevCache(model.config), []
        for token in sequence:
            steps.append(model.model(token[None, None], cache=alone).last_hidden_state[0])
        assert (memory[row, -len(sequence) :] - torch.cat(steps)).abs().max() < 1e-9
        assert (memory[row, : -len(sequence)] == 0).all()
        assert cache.lengths[row] == alone.lengths[0] == len(sequence)
        for layer, reference in zip(cache.layers, alone.layers):
            if hasattr(layer, "tail"):
                assert (layer.tail[row, -1] - reference.tail[0, -1]).abs().max() < 1e-9
            else:
                held = reference.keys.shape[2]
                assert (layer.keys[row, :, -held:] - reference.keys[0]).abs().max() < 1e-9
                assert (layer.values[row, :, -held:] - reference.values[0]).abs().max() < 1e-9


@settings(max_examples=40, deadline=None)
@given(
    fields=configs(),
    lengths=st.lists(st.integers(2, 24), min_size=1, max_size=4),
    side=st.sampled_from(["left", "right", "packed"]),
    extra=st.integers(0, 3),
    training=st.booleans(),
    seed=st.integers(0, 5),
)
def test_a_sequence_gives_the_loss_and_gradients_in_a_batch_that_it_gives_alone(
    fields, lengths, side, extra, training, seed
):
    """Both terms of training's loss, and the deployed loss: the batch's is the mean over all labels, or tokens."""
    fields |= dict(rollout="sequential", self_feeding_sweeps=seed % 3, attention_dropout=0.0)
    model = make_model(seed, model_class=MaglevForPreTraining, **fields).train(training)
    sequences = sequences_of(model, lengths, seed)
    if side == "packed":
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        ids = labels = torch.cat(sequences)[None]
        inputs = dict(input_ids=ids, position_ids=positions)
    else:
        ids, mask = padded(sequences, side, extra)
        labels = ids.masked_fill(mask == 0, -100)
        inputs = dict(input_ids=ids, attention_mask=mask)

    def gradients():
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return {name: grad.clone() for name, grad in grads.items()}

    outputs = model(**inputs, labels=labels)
    outputs.loss.backward()
    found = gradients()
    loss, weight = 0.0, model.config.consistency_weight
    for ids in sequences:
        alone = model(ids[None], labels=ids[None])
        loss = loss + alone.ce_loss * (len(ids) - 1) / (sum(lengths) - len(lengths))
        if training:
            loss = loss + weight * alone.consistency_loss * len(ids) / sum(lengths)
    loss.backward()
    # transformers computes the cross-entropy in float32.
    assert abs(outputs.loss - loss) < 1e-5
    assert (outputs.consistency_loss is None) == (not training)
    wanted = gradients()
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert (found[name] - grad).abs().max() <= 1e-5 * max(1.0, grad.abs().max().item()), name


@pytest.mark.parametrize("injection", INJECTIONS)
@pytest.mark.parametrize("rollout", ["sequential", "fixed_point"])
@torch.no_grad()
def test_packed_sequences_are_rolled_out_each_from_zero(injection, rollout):
    model = make_model(std=0.1, memory_injection=injection, rollout_tolerance=1e-11)
    sequences = sequences_of(model, [3, 17, 1, 8])
    ids = torch.cat(sequences)[None]
    positions = torch.cat([torch.arange(len(row)) for row in sequences])[None]
    borders = torch.tensor([0, 3, 20, 21, 29])
    alone = torch.cat([model(row[None], rollout="sequential").logits[0] for row in sequences])
    for inputs in (dict(position_ids=positions), dict(cu_seq_lens_q=borders)):
        outputs = model(ids, rollout=rollout, **inputs)
        assert (outputs.logits[0] - alone).abs().max() < 1e-9
    two_rows = model(ids.expand(2, -1), position_ids=positions.expand(2, -1), rollout=rollout).logits
    assert (two_rows - alone).abs().max() < 1e-9


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.1)], ids=str)
@torch.no_grad()
def test_padded_batches_agree_in_lower_precision(dtype, tolerance):
    """bfloat16 holds 8 bits, logits are up to 3 here."""
    model = make_model(dtype=dtype, std=0.1)
    sequences = sequences_of(model, [1, W, 4 * W + 3])
    ids, mask = padded(sequences, "left")
    logits = model(ids, attention_mask=mask).logits
    for row, sequence in enumerate(sequences):
        alone = model(sequence[None], rollout="sequential").logits[0]
        assert (logits[row, -len(sequence) :] - alone).abs().max() < tolerance


@torch.no_grad()
def test_without_memory_keys_and_values_the_model_is_mistral():
    """And with `memory_injection="none"`: the sliding-window baseline."""
    fields = dict(
        gated_mlp=True,
        use_qk_norm=False,
        use_residual_scales=False,
        norm_embeddings=False,
        final_logit_softcapping=None,
    )
    model, plain = make_model(**fields), make_model(memory_injection="none", **fields)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    names += ("num_key_value_heads", "sliding_window", "rms_norm_eps", "rope_parameters", "max_position_embeddings")
    config = MistralConfig(**{name: getattr(model.config, name) for name in names})
    mistral = MistralForCausalLM(config).double().eval()
    for layer in model.model.layers:
        for part in (layer.self_attn.memory.k_proj, layer.self_attn.memory.v_proj, layer.self_attn.memory.local_gate):
            part.weight.zero_()
    ids = random_ids(model, 6 * W, batch=2)
    for ours in (model, plain):
        weights = {name: tensor for name, tensor in ours.state_dict().items() if ".memory." not in name}
        mistral.load_state_dict(weights)
        # Mistral's norms and RoPE tables are float32.
        assert (ours(ids).logits - mistral(ids).logits).abs().max() < 1e-5


@torch.no_grad()
def test_the_interleaved_twin_sees_everything_and_the_sliding_twin_its_windows():
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    reach = 3 * (W - 1)
    ids = random_ids(make_model(), 40)
    other = ids.clone()
    other[:, 5] = (other[:, 5] + 1) % 61
    for fields, last in ((dict(layer_types=types), 39), (dict(), 5 + reach)):
        model = make_model(memory_injection="none", **fields)
        moved = (model(ids).logits - model(other).logits).abs().amax(-1)[0]
        assert (moved[:5] == 0).all() and (moved[5 : last + 1] > 0).all() and (moved[last + 1 :] == 0).all()
    memory = make_model()  # the memory carries it on
    moved = (memory(ids, rollout="sequential").logits - memory(other, rollout="sequential").logits).abs().amax(-1)[0]
    assert (moved[:5] == 0).all() and (moved[5:] > 0).all()


@torch.no_grad()
def test_no_logit_looks_ahead():
    """One call, pieces, and the prefiller (whose target may not know a later token either)."""
    model = make_model(model_class=MaglevForPreTraining, std=0.1)
    ids = random_ids(model, 4 * W + 3)
    for changed in (1, W, 3 * W):
        other = ids.clone()
        other[:, changed] = (other[:, changed] + 1) % 61
        for rollout in ("sequential", "teacher_forced"):
            moved = (model(ids, rollout=rollout).logits != model(other, rollout=rollout).logits).any(-1)[0]
            assert not moved[:changed].any() and moved[changed]


@pytest.mark.parametrize(
    "inputs, words",
    [
        (dict(input_ids=torch.zeros(1, 0, dtype=torch.long)), "empty"),
        (dict(), "exactly one of"),
        (dict(input_ids=torch.ones(1, 4, dtype=torch.long), output_attentions=True), "output_attentions"),
        (dict(input_ids=torch.ones(1, 4, dtype=torch.long), rollout="parallel"), "`rollout` must be one of"),
        (dict(input_ids=torch.ones(1, 4, dtype=torch.long), rollout="teacher_forced"), "needs the prefiller"),
        (
            dict(input_ids=torch.ones(1, 4, dtype=torch.long), attention_mask=torch.tensor([[1, 0, 1, 1]])),
            "neither left nor right",
        ),
        (
            dict(input_ids=torch.ones(1, 4, dtype=torch.long), attention_mask=torch.ones(1, 1, 4, 4)),
            "must be 2D",
        ),
        (dict(input_ids=torch.ones(1, 4, dtype=torch.long), fed=torch.zeros(1, 3, 24)), "`fed` has shape"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(inputs, words):
    with pytest.raises(ValueError, match=words):
        make_model()(**inputs)


def test_padding_between_tokens_is_refused():
    model = make_model()
    ids, mask = padded(sequences_of(model, [3, 6]), "right")
    cache = MaglevCache(model.config)
    model(ids, attention_mask=mask, cache=cache)
    with pytest.raises(ValueError, match="padding between its tokens"):
        model(ids[:, :1], attention_mask=torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1), cache=cache)


def test_a_decoder_without_memory_has_no_prefiller():
    with pytest.raises(ValueError, match="leaves nothing for a prefiller"):
        make_model(model_class=MaglevForPreTraining, memory_injection="none")
    plain = make_model(memory_injection="none")
    with pytest.raises(ValueError, match="gives memories to read"):
        plain(random_ids(plain, 3), fed=torch.zeros(1, 3, 24, dtype=torch.float64))


@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-4])
@torch.no_grad()
def test_small_memories_are_found_as_exactly_as_large_ones(size):
    """What reads them norms them, so a movement counts against their size."""
    model = make_model(std=0.2, rms_norm_eps=1e-12, rollout_tolerance=1e-8)
    model.model.norm.weight.mul_(size)
    model.lm_head.weight.div_(size)
    for layer in model.model.layers:
        layer.self_attn.memory.v_proj.weight.div_(size)
    ids = random_ids(model, 40)
    assert (model(ids).logits - model(ids, rollout="sequential").logits).abs().max() < 1e-5


@torch.no_grad()
def test_labels_of_a_later_call_know_what_came_before():
    """The second sequence begins in the second call, behind padding."""
    model = make_model()
    ids, mask = padded(sequences_of(model, [9, 4]), "left")
    labels = ids.clone()
    whole = model(ids[1:], attention_mask=mask[1:], labels=labels[1:]).loss
    cache = MaglevCache(model.config)
    model(ids[1:, :3], attention_mask=mask[1:, :3], cache=cache)
    later = model(ids[1:, 3:], attention_mask=mask[1:], cache=cache, labels=labels[1:, 3:]).loss
    assert (later - whole).abs() < 1e-6


@torch.no_grad()
def test_borders_may_hold_an_empty_sequence():
    model = make_model()
    ids = random_ids(model, 12)
    losses = [
        model(ids, labels=ids, cu_seq_lens_q=torch.tensor(borders)).loss for borders in ([0, 4, 12], [0, 4, 12, 12])
    ]
    assert losses[0] == losses[1]


@torch.no_grad()
def test_a_checkpoint_of_teacher_forced_training_is_deployed_by_itself():
    model = make_model(std=0.1, rollout="teacher_forced")
    ids = random_ids(model, 20)
    assert torch.equal(model(ids).logits, model(ids, rollout="fixed_point").logits)


@pytest.mark.parametrize("rollout", ["sequential", "fixed_point"])
@torch.no_grad()
def test_every_block_of_a_padded_prompt_has_a_mask_of_its_own(monkeypatch, rollout):
    monkeypatch.setattr(rollout_maglev, "BLOCK", 8)
    model = make_model(std=0.1, rollout_tolerance=1e-11)
    sequences = sequences_of(model, [29, 17])
    ids, mask = padded(sequences, "left")
    logits = model(ids, attention_mask=mask, rollout=rollout).logits
    for row, sequence in enumerate(sequences):
        alone = model(sequence[None], rollout="sequential").logits[0]
        assert (logits[row, -len(sequence) :] - alone).abs().max() < 1e-9

"""A sequence gives the same in any company: padded batches and packed sequences (specification, section 6.2)."""

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import (
    GPTALPHA,
    HALF,
    MIXED,
    configs,
    generate,
    golden_llama_cases,
    load_golden_llama,
    make_model,
    random_ids,
    run_in_pieces,
)
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

from kvm_hf import KVMCache

C, L = 4, 8
TWO_KINDS = dict(layer_types=["kvm_attention", "full_attention"])
FIELDS = {"positional": {}, "normalized": dict(rope_parameters=HALF), "mixed": MIXED, "gptalpha": GPTALPHA}


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


def assert_layers_hold_what_they_hold_alone(cache, row, alone, tolerance):
    for layer, reference in zip(cache.layers, alone.layers):
        if hasattr(layer, "tail"):
            assert (layer.tail[row, -1] - reference.tail[0, -1]).abs().max() <= tolerance
        if not hasattr(layer, "rows"):
            continue
        rows, fill = reference.rows[0], reference.fills[0]
        assert (layer.lengths[row], layer.rows[row], layer.fills[row]) == (reference.lengths[0], rows, fill)
        if rows:
            for part, expected in zip(layer.state, reference.state):
                assert (part[row, :, :rows] - expected[0]).abs().max() <= tolerance
        window = slice(layer._state_columns + layer.stop - fill, layer._state_columns + layer.stop)
        expected = slice(reference._state_columns + reference.stop - fill, reference._state_columns + reference.stop)
        assert (layer.keys[row, :, window] - reference.keys[0, :, expected]).abs().max() <= tolerance


@settings(max_examples=60, deadline=None)
@given(
    fields=configs(),
    lengths=st.lists(st.floats(0, 1), min_size=1, max_size=4),
    side=st.sampled_from(["left", "right"]),
    extra=st.integers(0, 3),
    later=st.integers(0, 9),
    seed=st.integers(0, 5),
)
def test_a_row_of_a_padded_batch_gives_what_it_gives_alone(fields, lengths, side, extra, later, seed):
    """Logits, loss, gradients, greedy tokens and every row's state; sequences of one to six chunks, then steps of one
    token."""
    model = make_model(seed, **fields)
    lengths = [1 + int(part * (6 * model.config.chunk_size - 1)) for part in lengths]
    sequences = sequences_of(model, lengths, seed)
    ids, mask = padded(sequences, side, extra)
    # Padding between tokens is refused for sliding layers.
    steps = 0 if side == "right" and "sliding_attention" in model.config.layer_types else later

    def loss_and_gradients(rows):
        """Of the logits of all rows, in float64; transformers' own loss is float32."""
        model.zero_grad()
        loss = sum(
            torch.nn.functional.cross_entropy(logits[:-1], sequence[1:], reduction="sum")
            for logits, sequence in zip(rows, sequences)
        )
        loss.backward()
        return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    logits = model(ids, attention_mask=mask, use_cache=False).logits
    loss, gradients = loss_and_gradients([logits[row][mask[row] == 1] for row in range(len(lengths))])
    expected_loss, expected = loss_and_gradients([model(row[None], use_cache=False).logits[0] for row in sequences])
    assert abs(loss - expected_loss) <= 1e-9 * (1 + abs(expected_loss))
    for name in gradients.keys() | expected.keys():
        zero = torch.zeros(())
        scale = 1 + expected.get(name, zero).abs().max()
        assert (gradients.get(name, zero) - expected.get(name, zero)).abs().max() <= 1e-9 * scale, name

    with torch.no_grad():
        uncached = model(ids, attention_mask=mask, use_cache=False).logits
        cache = KVMCache(model.config)
        cached = model(ids, attention_mask=mask, past_key_values=cache).logits
        outputs, tokens = [], []
        last = [(mask[row] == 1).nonzero().max() for row in range(len(lengths))]
        logits = torch.stack([cached[row, column] for row, column in enumerate(last)])
        for _ in range(steps):
            tokens.append(logits.argmax(-1))
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            logits = model(tokens[-1][:, None], attention_mask=mask, past_key_values=cache).logits[:, 0]
            outputs.append(logits)
        for row, sequence in enumerate(sequences):
            real = mask[row, : ids.shape[1]] == 1
            alone = KVMCache(model.config)
            expected = model(sequence[None], past_key_values=alone).logits[0]
            assert (uncached[row][real] - expected).abs().max() <= 1e-9
            assert (cached[row][real] - expected).abs().max() <= 1e-9
            token = expected[-1].argmax()
            for step in range(steps):
                assert token == tokens[step][row]
                expected = model(token[None, None], past_key_values=alone).logits[0, 0]
                assert (outputs[step][row] - expected).abs().max() <= 1e-9
                token = expected.argmax()
            assert_layers_hold_what_they_hold_alone(cache, row, alone, 1e-9)


@settings(max_examples=60, deadline=None)
@given(
    fields=configs(),
    kind=st.sampled_from(["kvm_attention", "full_attention"]),
    counts=st.integers(1, 4).flatmap(
        lambda batch: st.lists(st.lists(st.integers(0, 14), min_size=batch, max_size=batch), min_size=1, max_size=6)
    ),
    sides=st.lists(st.sampled_from(["left", "right"]), min_size=6, max_size=6),
    seed=st.integers(0, 5),
)
def test_rows_may_take_any_number_of_tokens_in_every_call(fields, kind, counts, sides, seed):
    """Continued prefill of ragged batches: every call is padded on its own, and some rows take nothing in it."""
    kinds = [kind if layer == "sliding_attention" else layer for layer in fields["layer_types"]]
    model = make_model(seed, **{**fields, "layer_types": kinds})
    sequences = sequences_of(model, [sum(row) for row in zip(*counts)], seed)
    cache, mask, done, outputs = KVMCache(model.config), torch.zeros(len(sequences), 0, dtype=torch.long), 0, []
    done = [0] * len(sequences)
    with torch.no_grad():
        for call, side in zip(counts, sides):
            parts = [ids[start : start + count] for ids, start, count in zip(sequences, done, call)]
            ids, new = padded(parts, side, extra=int(max(call) == 0))
            mask = torch.cat([mask, new], dim=1)
            outputs.append(model(ids, attention_mask=mask, past_key_values=cache).logits)
            done = [start + count for start, count in zip(done, call)]
        logits = torch.cat(outputs, dim=1)
        assert logits.isfinite().all()
        assert cache.lengths == done
        for row, sequence in enumerate(sequences):
            if len(sequence):
                alone = KVMCache(model.config)
                expected = model(sequence[None], past_key_values=alone).logits[0]
                assert (logits[row][mask[row] == 1] - expected).abs().max() <= 1e-9
                assert_layers_hold_what_they_hold_alone(cache, row, alone, 1e-9)


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, None)], ids=str)
def test_padded_batches_agree_in_lower_precision(fields, dtype, tolerance):
    """In bfloat16 decisions may flip, so the measure is the model's own noise: its distance from float64."""
    exact, model = make_model(**fields), make_model(dtype=dtype, **fields)
    sequences = sequences_of(model, [3, C, 5 * C + 1, 6 * C])
    ids, mask = padded(sequences, "left")
    cache = KVMCache(model.config)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, past_key_values=cache).logits
        for row, sequence in enumerate(sequences):
            mine = logits[row][mask[row] == 1].double()
            alone = model(sequence[None]).logits[0].double()
            if tolerance is None:
                noise = (alone - exact(sequence[None]).logits[0]).abs().mean()
                assert (mine - alone).abs().mean() <= 2 * noise
            else:
                assert (mine - alone).abs().max() <= tolerance


@pytest.mark.parametrize("case", golden_llama_cases())
def test_golden_rows_as_one_padded_batch(case):
    model, golden = load_golden_llama(case, torch.float32)
    sequences = [golden[f"row{row}.input_ids"] for row in range(3) if f"row{row}.input_ids" in golden]
    ids, mask = padded(sequences, "left")
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
    for row in range(len(sequences)):
        assert (logits[row][mask[row] == 1] - golden[f"row{row}.logits"]).abs().max() <= 1e-5


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("pads", [1, C - 1, C, L + 3])
def test_the_number_of_pads_changes_nothing(pads, fields):
    model = make_model(**fields)
    sequence = random_ids(model, 3 * L + 2)
    ids, mask = torch.cat([torch.full((1, pads), 7), sequence], 1), torch.ones(1, pads + 3 * L + 2, dtype=torch.long)
    mask[:, :pads] = 0
    alone, cache = KVMCache(model.config), KVMCache(model.config)
    with torch.no_grad():
        expected = model(sequence, past_key_values=alone).logits[:, -1]
        assert (model(ids, attention_mask=mask, past_key_values=cache).logits[:, -1] - expected).abs().max() <= 1e-9
    assert cache.get_seq_length() == 3 * L + 2 + pads
    assert_layers_hold_what_they_hold_alone(cache, 0, alone, 1e-9)


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("options", [{}, dict(num_beams=3), dict(prefill_chunk_size=3)], ids=str)
def test_generating_for_a_left_padded_batch_gives_each_prompts_own_tokens(fields, options):
    model = make_model(**fields)
    prompts = sequences_of(model, [3, C, 5 * C, 3 * L + 5])
    ids, mask = padded(prompts, "left")
    tokens = model.generate(
        ids, attention_mask=mask, max_new_tokens=2 * L + 1, do_sample=False, pad_token_id=7, **options
    )
    for row, prompt in enumerate(prompts):
        alone = generate(model, prompt[None], 2 * L + 1, **{k: v for k, v in options.items() if k == "num_beams"})
        assert torch.equal(tokens[row, ids.shape[1] :], alone[0, len(prompt) :])


def test_rows_of_a_ragged_batch_can_be_reordered_selected_and_repeated():
    model = make_model()
    lengths = [3, 5 * C + 1, 6 * C]
    sequences, more = sequences_of(model, lengths), random_ids(model, 6, seed=9)
    ids, mask = padded(sequences, "left")
    alone = []
    for sequence in sequences:
        whole = torch.cat([sequence[None], more], dim=1)
        alone.append(run_in_pieces(model, whole, [100], KVMCache(model.config))[0, len(sequence) :])
    for change, rows in (
        (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 1])), [2, 0, 1]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        (lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ):
        cache = KVMCache(model.config)
        with torch.no_grad():
            model(ids, attention_mask=mask, past_key_values=cache)
            change(cache)
            assert cache.lengths == [lengths[row] for row in rows]
            after = mask[rows]
            for step in range(more.shape[1]):
                after = torch.cat([after, torch.ones_like(after[:, :1])], dim=1)
                token = more[:, step : step + 1].expand(len(rows), -1)
                logits = model(token, attention_mask=after, past_key_values=cache).logits[:, 0]
                for position, row in enumerate(rows):
                    assert (logits[position] - alone[row][step]).abs().max() <= 1e-9


def test_a_decode_step_of_a_ragged_batch_is_one_write_and_one_attention_call():
    """What sequences of one length pay, whatever their lengths; buffers move only when some sequence opens a chunk."""
    model = make_model(state_budget="fixed", state_size=6)
    ids, mask = padded(sequences_of(model, [9, 14, 23]), "left")
    cache, calls = KVMCache(model.config), []
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        for _ in range(4 * C):
            layer = cache.layers[0]
            opens = [length >= L and (length - L) % C == 0 for length in layer.lengths]
            place = layer.keys.data_ptr()
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            model(ids[:, :1], attention_mask=mask, past_key_values=cache)
            calls.append(any(opens))
            assert any(opens) or layer.keys.data_ptr() == place
            assert layer.keys.shape[2] <= max(layer.rows) + L + C
    assert calls.count(False) == C  # three sequences at three phases of a chunk of four


@pytest.mark.parametrize("count_bias", [0.0, 1.0])
@pytest.mark.parametrize("kernel", ["eager", "sdpa", "flex_attention"])
def test_every_kernel_hides_what_a_sequence_does_not_hold(kernel, count_bias):
    """Kernels that take no mask read the bias from extra key channels."""
    model = make_model(dtype=torch.float32, head_dim=16, count_bias=count_bias)
    sequences = sequences_of(model, [3, 5 * C + 1, 6 * C])
    ids, mask = padded(sequences, "left")
    more = random_ids(model, L, batch=3, seed=5)
    model.set_attn_implementation(kernel)
    cache = KVMCache(model.config)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, past_key_values=cache).logits
        steps = []
        for step in range(L):
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            steps.append(model(more[:, step : step + 1], attention_mask=mask, past_key_values=cache).logits)
        model.set_attn_implementation("sdpa")
        for row, sequence in enumerate(sequences):
            expected = model(torch.cat([sequence, more[row]])[None]).logits[0]
            mine = torch.cat([logits[row, -len(sequence) :], torch.cat(steps, 1)[row]])
            assert (mine - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("side", ["left", "right"])
def test_pads_take_nothing_from_tokens(side):
    """Else a loss that looks at pads would train tokens by them."""
    model = make_model()
    sequences = sequences_of(model, [3 * L, 5])
    ids, mask = padded(sequences, side)
    other = ids.clone()
    other[mask == 1] = (other[mask == 1] + 1) % model.config.vocab_size
    with torch.no_grad():
        for use_cache in (True, False):
            one, two = (model(batch, attention_mask=mask, use_cache=use_cache).logits for batch in (ids, other))
            assert torch.equal(one[mask == 0], two[mask == 0])
            assert not torch.equal(one[mask == 1], two[mask == 1])


# Packed sequences


def packed(sequences):
    positions = torch.cat([torch.arange(len(ids)) for ids in sequences])
    return torch.cat(sequences)[None], positions[None]


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("borders", ["position_ids", "cu_seq_lens_q", "both"])
def test_packed_sequences_give_what_each_gives_alone(fields, borders):
    model = make_model(**fields)
    lengths = [5, 3 * L + 1, 1, 2 * L]
    sequences = sequences_of(model, lengths)
    ids, positions = packed(sequences)
    inputs = dict(position_ids=positions, cu_seq_lens_q=torch.tensor([0, 5, 3 * L + 6, 3 * L + 7, 5 * L + 7]))
    inputs = inputs if borders == "both" else {borders: inputs[borders]}

    model.zero_grad()
    labels = ids.masked_fill(positions == 0, -100)  # as the flattening collator has them
    output = model(ids, labels=labels, num_items_in_batch=1, **inputs)
    output.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    alone = [model(row[None], labels=row[None], num_items_in_batch=1) for row in sequences if len(row) > 1]
    sum(one.loss for one in alone).backward()
    expected = [model(row[None]).logits[0] for row in sequences]
    assert (output.logits[0] - torch.cat(expected)).abs().max() <= 1e-9
    assert torch.allclose(output.loss, sum(one.loss for one in alone), rtol=1e-5)
    for name, parameter in model.named_parameters():
        assert torch.allclose(gradients[name], parameter.grad, rtol=2e-5, atol=2e-5), name
    assert output.past_key_values is None


def test_rows_may_be_packed_differently():
    model = make_model()
    ids = random_ids(model, 5 * L, batch=2)
    positions = torch.stack([torch.arange(5 * L) % 13, torch.arange(5 * L)])
    with torch.no_grad():
        logits = model(ids, position_ids=positions).logits
        for start in range(0, 5 * L, 13):
            expected = model(ids[:1, start : start + 13]).logits[0]
            assert (logits[0, start : start + 13] - expected).abs().max() <= 1e-9
        assert (logits[1] - model(ids[1:]).logits[0]).abs().max() <= 1e-9


def test_the_flattening_collator_of_transformers_is_understood():
    model = make_model()
    sequences = sequences_of(model, [5, 3 * L + 1, 2 * L])
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    inputs = collator([{"input_ids": ids.tolist()} for ids in sequences])
    with torch.no_grad():
        logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits[0]
        expected = torch.cat([model(ids[None]).logits[0] for ids in sequences])
    assert (logits - expected).abs().max() <= 1e-9


def test_left_padding_does_not_train_first_tokens_on_pads():
    """Labels often are a copy of the ids: a pad's logits must not be asked for the first token."""
    model = make_model()
    sequences = sequences_of(model, [3, 2 * L])
    ids, mask = padded(sequences, "left")
    together = model(ids, attention_mask=mask, labels=ids).loss
    losses = [model(row[None], labels=row[None], num_items_in_batch=1).loss for row in sequences]
    assert torch.allclose(together, sum(losses) / (2 + 2 * L - 1), rtol=1e-6)


def test_counted_labels_of_first_tokens_leave_the_count():
    """Trainer counts labels beforehand and gives the number, of which a left-padded batch uses fewer."""
    model = make_model()
    sequences = sequences_of(model, [3, 9, 5, 14])
    losses = {}
    for side in ("left", "right"):
        ids, mask = padded(sequences, side)
        labels = ids.masked_fill(mask == 0, -100)
        counted = (labels[:, 1:] != -100).sum()
        losses[side] = model(ids, attention_mask=mask, labels=labels, num_items_in_batch=counted).loss
    assert torch.allclose(losses["left"], losses["right"], rtol=1e-6)


@pytest.mark.parametrize("kernel", ["eager", "sdpa", "flex_attention"])
def test_hidden_columns_stay_hidden_however_low_the_scores_are(kernel):
    """A constant added to all of a sequence's scores changes nothing, so nothing may be compared with a number."""
    model = make_model(dtype=torch.float32, head_dim=16, attention_bias=True, rope_parameters=HALF)
    model.set_attn_implementation(kernel)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.bias.view(-1, 16)[:, -1] += 400.0
            layer.self_attn.k_proj.bias.view(-1, 16)[:, -1] -= 400.0
        sequences = sequences_of(model, [5, 17, 30])
        ids, mask = padded(sequences, "left")
        logits = model(ids, attention_mask=mask, past_key_values=KVMCache(model.config)).logits
        for row, sequence in enumerate(sequences):
            expected = model(sequence[None], past_key_values=KVMCache(model.config)).logits[0]
            assert (logits[row][mask[row] == 1] - expected).abs().max() <= 2e-2  # float32 beside scores of -40,000


# What is refused


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (dict(attention_mask=torch.tensor([[1, 1, 0, 1]])), "neither left nor right padding"),
        (dict(attention_mask=torch.tensor([[0, 1, 1, 0]])), "neither left nor right padding"),
        (dict(attention_mask=torch.ones(1, 1, 4, 4)), "2D"),
        (dict(attention_mask={"full_attention": torch.ones(1, 4)}), "2D"),
        (dict(attention_mask=torch.ones(1, 3)), "expected"),
        (dict(attention_mask=torch.tensor([[-1e9, 0.0, 0.0, 0.0]])), "1 for tokens and 0 for padding"),
        (dict(position_ids=torch.tensor([[5]])), "position_ids"),
        (dict(position_ids=torch.arange(4)), "position_ids"),
        (dict(position_ids=torch.tensor([[0, 1, 3, 4]])), "go up by one"),
        (dict(position_ids=torch.tensor([[0, 1, 1, 2]])), "go up by one"),
        (dict(position_ids=torch.tensor([[0, 1, 0, 1]]), cu_seq_lens_q=torch.tensor([0, 3, 4])), "restart at"),
        (dict(cu_seq_lens_q=torch.tensor([0, 2, 3])), "from 0 to the number of tokens"),
        (dict(cu_seq_lens_q=torch.tensor([0, 3, 1, 4])), "go up from 0"),
        (dict(cu_seq_lens_q=torch.tensor([[0, 4]])), "whole numbers"),
        (dict(cu_seq_lens_q=torch.tensor([0.0, 4.0])), "whole numbers"),
        (dict(seq_idx=torch.tensor([[0, 0, 1, 1]])), "does not say where"),
        (dict(position_ids=torch.tensor([[5, 6, 7, 8]])), "begin at 5, but it has 0 tokens"),
        (
            dict(attention_mask=torch.tensor([[0, 0, 1, 1]]), position_ids=torch.arange(4)[None]),
            "begin at 2, but it has 0 tokens",
        ),
        (
            dict(attention_mask=torch.tensor([[0, 0, 1, 1]]), position_ids=torch.tensor([[0, 0, 0, 0]])),
            "go up by one",
        ),
        (
            dict(attention_mask=torch.tensor([[0, 0, 1, 1]]), cu_seq_lens_q=torch.tensor([0, 2, 4])),
            "cannot be padded",
        ),
    ],
    ids=str,
)
def test_other_masks_and_positions_are_refused_in_a_sentence(inputs, words):
    model = make_model()
    with pytest.raises(ValueError, match=words):
        model(random_ids(model, 4), **inputs)


def test_a_mask_that_does_not_fit_the_cache_is_refused():
    model = make_model()
    sequences = sequences_of(model, [3, 2 * L])
    ids, mask = padded(sequences, "left")
    cache = KVMCache(model.config)
    token, more = ids[:, :1], torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        with pytest.raises(ValueError, match="holds padded sequences"):
            model(token, past_key_values=cache)
        with pytest.raises(ValueError, match="counts 16 tokens of sequence 0 before this call, the cache holds 3"):
            model(token, attention_mask=torch.ones_like(more), past_key_values=cache)
        with pytest.raises(ValueError, match="cannot continue or fill a cache"):
            model(ids[:1, :4], position_ids=torch.tensor([[0, 1, 0, 1]]), past_key_values=one_row(model))
        with pytest.raises(ValueError, match="sequence 0 begin at 16, but it has 3 tokens"):
            model(token, attention_mask=more, position_ids=torch.full((2, 1), 16), past_key_values=cache)
        positions = torch.tensor([[3], [16]])
        model(token, attention_mask=more, position_ids=positions, past_key_values=cache)  # nothing was lost


def test_generating_for_a_right_padded_batch_is_refused():
    """transformers warns, and takes the next token from a pad and counts on from it."""
    model = make_model()
    ids, mask = padded(sequences_of(model, [3, 2 * L]), "right")
    with pytest.raises(ValueError, match="padded on the left"):
        model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=7)


def test_packed_sequences_do_not_fill_a_cache():
    model = make_model()
    ids, positions = packed(sequences_of(model, [9, 11]))
    with pytest.raises(ValueError, match="cannot continue or fill a cache"):
        model(ids, position_ids=positions, past_key_values=KVMCache(model.config))
    with pytest.raises(ValueError):
        model.generate(ids, position_ids=positions, max_new_tokens=3, do_sample=False)


def one_row(model):
    cache = KVMCache(model.config)
    model(random_ids(model, 5), past_key_values=cache)
    return cache


def test_positions_of_pads_are_nobodys_business():
    model = make_model()
    ids = random_ids(model, 5, batch=2)
    mask = torch.tensor([[0] * 5, [0, 0, 1, 1, 1]])
    positions = torch.tensor([[9] * 5, [8, 8, 0, 1, 2]])
    cache = KVMCache(model.config)
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
    assert cache.lengths == [0, 3]


def test_padding_between_tokens_is_refused_for_sliding_layers():
    model = make_model(**MIXED)
    ids, mask = padded(sequences_of(model, [3, 2 * L]), "right")
    cache = KVMCache(model.config)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        with pytest.raises(ValueError, match="padding between its tokens"):
            model(ids[:, :1], attention_mask=torch.cat([mask, torch.ones_like(mask[:, :1])], 1), past_key_values=cache)


def test_generate_without_a_mask_warns_and_behaves_as_llama_does(caplog):
    """With pad = eos transformers takes every id for a token, and says so; so do we."""
    shared = dict(vocab_size=61, hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4)
    llama, model = LlamaForCausalLM(LlamaConfig(**shared)).double().eval(), make_model()
    ids = random_ids(model, 3 * L, batch=2) % 50 + 5
    ids[:, :4] = 3
    warnings, tokens = {}, {}
    transformers.utils.logging.enable_propagation()
    for name, generator in (("llama", llama), ("kvm", model)):
        transformers.utils.logging.warning_once.cache_clear()
        with caplog.at_level("WARNING"):
            caplog.clear()
            tokens[name] = generator.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=3, eos_token_id=3)
            warnings[name] = [
                record.getMessage() for record in caplog.records if "attention mask" in record.getMessage()
            ]
    assert warnings["kvm"] == warnings["llama"] and warnings["kvm"]
    expected = generate(model, ids, 5, eos_token_id=3)
    assert torch.equal(tokens["kvm"], expected)

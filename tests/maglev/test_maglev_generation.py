"""`generate()` and what is built on it: rollouts, beams, drafts, chats, sampling, and both classes in either mode."""

import copy

import pytest
import torch
from small_maglev import LLAMA_STYLE, make_model
from small_models import generate, random_ids, run_in_pieces
from transformers import LlamaConfig, LlamaForCausalLM

import maglev_hf.modeling_maglev as modeling
from maglev_hf import MaglevCache, MaglevForPreTraining
from maglev_hf.modeling_maglev import CACHE_NAME

W = 5
PROMPT = 4 * W + 3
FIELDS = {
    "kv": {},
    "llama": LLAMA_STYLE,
    "residual": dict(memory_injection="residual"),
    "mixed": dict(
        memory_injection="cross_attention", layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
}
each_kind = pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)


def contracting_model(seed=0, **fields):
    """Weights so small that a change of a memory dies out within some tokens, yet it decides many tokens; those of the
    head are larger, so that tokens differ by far more than the tolerance of a search."""
    model = make_model(seed, std=0.1, **fields)
    with torch.no_grad():
        if not model.config.tie_word_embeddings:
            model.lm_head.weight.normal_(std=0.5)
        for name, parameter in model.named_parameters():
            if ".memory." in name and name.endswith(("k_proj.weight", "v_proj.weight")):
                parameter.mul_(2)
    return model


def without_memory(model):
    """The same model whose memory says nothing."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".memory." in name and name.endswith(("k_proj.weight", "v_proj.weight")):
                parameter.zero_()
    return model


def stepwise(model, ids, count, mask=None):
    """Greedy tokens of a loop that knows no cache: every step reads all tokens so far, one after the other."""
    mask = torch.ones_like(ids) if mask is None else mask
    with torch.no_grad():
        for _ in range(count):
            logits = model(ids, attention_mask=mask, use_cache=False, rollout="sequential").logits[:, -1:]
            ids, mask = torch.cat([ids, logits.argmax(-1)], 1), torch.cat([mask, mask[:, -1:]], 1)
    return ids


def left_padded(rows):
    width = max(row.shape[1] for row in rows)
    pads = [width - row.shape[1] for row in rows]
    ids = torch.cat([torch.nn.functional.pad(row, (pad, 0)) for row, pad in zip(rows, pads)])
    return ids, torch.stack([(torch.arange(width) >= pad).long() for pad in pads])


def llama_of(model):
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=model.config.vocab_size,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).double().eval()


# Ways to the memories


@each_kind
def test_both_rollouts_give_the_greedy_tokens_of_a_loop_alone_and_in_a_padded_batch(fields):
    """Prompts shorter and longer than the window. The loop has no cache, and knows nothing of padding or of a search."""
    model = contracting_model(**fields)
    count = 8
    prompts = [random_ids(model, length, seed=length) for length in (1, W - 1, W, W + 1, 5 * W)]
    wanted = [stepwise(model, prompt, count)[:, prompt.shape[1] :] for prompt in prompts]
    ids, mask = left_padded(prompts)
    for rollout in ("sequential", "fixed_point"):
        for prompt, tokens in zip(prompts, wanted):
            assert torch.equal(generate(model, prompt, count, rollout=rollout)[:, prompt.shape[1] :], tokens)
        together = model.generate(
            ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0, rollout=rollout
        )
        assert torch.equal(together[:, ids.shape[1] :], torch.cat(wanted))
    # What is tested: searches that do converge, of memories that do matter.
    with torch.no_grad():
        sweeps = model.model(ids, attention_mask=mask).sweeps
    assert len(sweeps) == 1 and 3 <= sweeps[0] < 5 * W
    silent = without_memory(model)
    changed = [
        not torch.equal(generate(silent, prompt, count)[:, -count:], tokens) for prompt, tokens in zip(prompts, wanted)
    ]
    assert sum(changed) >= 4


@pytest.mark.parametrize("length", [PROMPT, 300])
def test_a_search_over_one_block_or_several_ends_where_single_steps_end(length):
    """300 tokens are more than one block of the search."""
    model = contracting_model()
    ids = random_ids(model, length)
    caches = {}
    for rollout in ("sequential", "fixed_point"):
        caches[rollout] = MaglevCache(model.config)
        with torch.no_grad():
            model(ids, past_key_values=caches[rollout], rollout=rollout)
    one, other = caches.values()
    assert one.lengths == other.lengths == [length]
    # The tolerance of the search, and what later tokens make of it.
    assert (one.memory - other.memory).abs().max() <= 20 * model.config.rollout_tolerance
    assert torch.equal(
        generate(model, ids, 2 * W, rollout="sequential"), generate(model, ids, 2 * W, rollout="fixed_point")
    )


def test_generate_passes_the_rollout_on(monkeypatch):
    model = make_model()
    asked = []

    def noted(self, inputs, rollout, *args, honest=modeling.MaglevModel._deployed):
        asked.append(rollout)
        return honest(self, inputs, rollout, *args)

    monkeypatch.setattr(modeling.MaglevModel, "_deployed", noted)
    for rollout in ("sequential", "fixed_point"):
        asked.clear()
        generate(model, random_ids(model, PROMPT), 3, rollout=rollout)
        assert asked == [rollout] * 3
    with pytest.raises(ValueError, match="`rollout` must be one of"):
        generate(model, random_ids(model, PROMPT), 3, rollout="fast")


@each_kind
def test_greedy_tokens_are_those_without_a_cache(fields):
    model = make_model(rollout="sequential", **fields)
    ids = random_ids(model, PROMPT, batch=2)
    assert torch.equal(generate(model, ids, W), generate(model, ids, W, use_cache=False))
    assert type(getattr(generate(model, ids, 2, return_dict_in_generate=True), CACHE_NAME)) is MaglevCache


@pytest.mark.parametrize("sizes", [[2], [3], [W - 1], [W], [W + 1], [1, 2, 3, 5, 8]], ids=str)
def test_several_tokens_per_call_give_the_logits_of_one_call(sizes):
    model = make_model(rollout="sequential")
    ids = random_ids(model, 6 * W)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
    assert (run_in_pieces(model, ids, sizes, MaglevCache(model.config)) - whole).abs().max() <= 1e-9  # float64


# Beams, samples, drafts


@each_kind
@pytest.mark.parametrize(
    "options", [dict(num_beams=3), dict(num_beams=4, num_return_sequences=4)], ids=["3 beams", "4 beams returned"]
)
def test_beams_equal_beams_without_a_cache(fields, options):
    model = make_model(rollout="sequential", **fields)
    ids = random_ids(model, 3 * W, batch=2)
    assert torch.equal(generate(model, ids, 2 * W, **options), generate(model, ids, 2 * W, use_cache=False, **options))


def test_beams_of_a_padded_batch_equal_those_of_its_rows():
    model = make_model(rollout="sequential")
    rows = [random_ids(model, 2, seed=1), random_ids(model, 4 * W, seed=2)]
    ids, mask = left_padded(rows)
    options = dict(num_beams=3, num_return_sequences=2, max_new_tokens=2 * W, do_sample=False, pad_token_id=0)
    together = model.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :]
    alone = [model.generate(row, attention_mask=torch.ones_like(row), **options)[:, row.shape[1] :] for row in rows]
    assert torch.equal(together, torch.cat(alone))


def test_beams_really_change_places(monkeypatch):
    """Planted: memories, or keys, that stay in the old order must give other tokens, or the tests above are blind."""
    model = make_model()
    ids = random_ids(model, 3 * W, batch=2)
    right = generate(model, ids, 3 * W, num_beams=4)
    for layer_class in {type(layer) for layer in MaglevCache(model.config).layers}:
        with monkeypatch.context() as patch:
            patch.setattr(layer_class, "reorder_cache", lambda self, beam_idx: None)
            assert not torch.equal(generate(model, ids, 3 * W, num_beams=4), right)


@each_kind
def test_sampled_sequences_equal_those_sampled_without_a_cache(fields):
    model = make_model(rollout="sequential", **fields)
    ids = random_ids(model, 3 * W)
    samples = []
    for use_cache in (True, False):
        torch.manual_seed(5)
        samples.append(
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                num_return_sequences=4,
                max_new_tokens=2 * W,
                use_cache=use_cache,
                pad_token_id=0,
            )
        )
    assert torch.equal(*samples)
    assert len(set(map(tuple, samples[0].tolist()))) > 1


@each_kind
@pytest.mark.parametrize(("rollout", "seed"), [("sequential", 0), ("fixed_point", 1)])
def test_prompt_lookup_gives_greedy_tokens(fields, rollout, seed):
    """Few tokens, so that drafts are found, taken and rejected."""
    model = contracting_model(seed, vocab_size=7, rollout=rollout, **fields)
    ids = random_ids(model, PROMPT, seed=seed)
    assert torch.equal(generate(model, ids, 5 * W, prompt_lookup_num_tokens=3), generate(model, ids, 5 * W))


@each_kind
@pytest.mark.parametrize("assistant", ["llama", "maglev", "itself"])
def test_assisted_generation_gives_greedy_tokens(fields, assistant):
    model = contracting_model(vocab_size=11, **fields)
    helper = {
        "llama": llama_of,
        "maglev": lambda model: contracting_model(5, vocab_size=11),
        "itself": lambda model: model,
    }
    ids = random_ids(model, PROMPT)
    # Assistants make their masks from the ids, so the padding must be an id that does not occur.
    tokens = generate(model, ids, 5 * W, assistant_model=helper[assistant](model), pad_token_id=11)
    assert torch.equal(tokens, generate(model, ids, 5 * W))


@pytest.mark.parametrize("seed", range(2))
def test_as_an_assistant_of_another_model(seed):
    model = contracting_model(vocab_size=11)
    llama = llama_of(model)
    ids = random_ids(model, PROMPT, seed=seed)
    tokens = generate(llama, ids, 5 * W, assistant_model=model, pad_token_id=11)
    assert torch.equal(tokens, generate(llama, ids, 5 * W))


def test_drafts_that_stay_in_the_memory_are_noticed(monkeypatch):
    """Planted: a crop of the memory that only counts back gives other tokens."""
    model = make_model(vocab_size=7)
    ids = random_ids(model, PROMPT)
    right = generate(model, ids, 5 * W)
    layer_class = type(MaglevCache(model.config).layers[-1])

    def only_count(self, tokens_to_remove):
        self.seen += int(tokens_to_remove)
        self.lengths = [length + int(tokens_to_remove) for length in self.lengths]

    monkeypatch.setattr(layer_class, "crop", only_count)
    assert not torch.equal(generate(model, ids, 5 * W, prompt_lookup_num_tokens=3), right)


# Chats, prompts


@pytest.mark.parametrize("fields", [{}, FIELDS["mixed"]], ids=["kv", "mixed"])
@pytest.mark.parametrize("length", [W - 2, PROMPT])
def test_a_second_turn_gives_the_same_tokens_however_it_is_given(fields, length):
    """All ids with the cache, only the new ids with the cache, and no cache."""
    model = make_model(rollout="sequential", **fields)
    ids, question = random_ids(model, length), random_ids(model, 4, seed=1)
    first = generate(model, ids, W, return_dict_in_generate=True)
    cache = getattr(first, CACHE_NAME)
    whole = torch.cat([first.sequences, question], dim=1)
    expected = stepwise(model, whole, 2 * W)
    seen = cache.get_seq_length()
    assert seen == length + W - 1
    assert torch.equal(generate(model, whole, 2 * W), expected)
    assert torch.equal(generate(model, whole, 2 * W, past_key_values=copy.deepcopy(cache)), expected)
    new = whole[:, seen:]
    rest = model.generate(
        new,
        attention_mask=torch.ones_like(whole),
        past_key_values=cache,
        max_new_tokens=2 * W,
        do_sample=False,
        pad_token_id=0,
    )
    assert torch.equal(rest[:, new.shape[1] :], expected[:, whole.shape[1] :])


def test_one_prompt_serves_many_continuations_without_being_changed():
    model = make_model(rollout="sequential")
    ids, questions = random_ids(model, PROMPT), [random_ids(model, 3, seed=seed) for seed in (7, 8)]
    prompt = MaglevCache(model.config)
    run_in_pieces(model, ids, [PROMPT], prompt)
    memory = prompt.memory.clone()
    for question in questions:
        whole = torch.cat([ids, question], dim=1)
        expected = stepwise(model, whole, W)
        assert torch.equal(generate(model, whole, W, past_key_values=copy.deepcopy(prompt)), expected)
        several = copy.deepcopy(prompt)
        several.batch_repeat_interleave(3)
        many = generate(model, whole.expand(3, -1), W, past_key_values=several)
        assert torch.equal(many, expected.expand(3, -1))
    assert prompt.get_seq_length() == PROMPT and torch.equal(prompt.memory, memory)


def test_embeddings_as_a_prompt():
    model = make_model()
    ids = random_ids(model, PROMPT, batch=2)
    tokens = model.generate(
        inputs_embeds=model.get_input_embeddings()(ids),
        attention_mask=torch.ones_like(ids),
        max_new_tokens=2 * W,
        do_sample=False,
        pad_token_id=0,
    )
    assert torch.equal(tokens, generate(model, ids, 2 * W)[:, PROMPT:])


# What is refused


@pytest.mark.parametrize(
    ("implementation", "words"),
    [
        ("static", "StaticSlidingWindowLayer is not available"),
        ("offloaded_static", "StaticSlidingWindowLayer is not available"),
        ("quantized", "only supported for models with only full attention layers"),
    ],
)
def test_other_kinds_of_cache_are_refused_by_name(implementation, words):
    model = make_model()
    with pytest.raises(ValueError, match=words):
        generate(model, random_ids(model, PROMPT), 3, cache_implementation=implementation)


def test_an_offloaded_cache_needs_cuda():
    """transformers' own words; that keys and values may be away between calls is tested with the cache."""
    model = make_model()
    ids = random_ids(model, PROMPT)
    if torch.cuda.is_available():
        model, ids = model.cuda(), ids.cuda()
        assert torch.equal(generate(model, ids, 9, cache_implementation="offloaded"), generate(model, ids, 9))
    else:
        with pytest.raises((AssertionError, RuntimeError), match="CUDA"):
            generate(model, ids, 3, cache_implementation="offloaded")


def test_attentions_are_refused_by_generate_too():
    model = make_model()
    with pytest.raises(ValueError, match="output_attentions"):
        generate(model, random_ids(model, PROMPT), 3, return_dict_in_generate=True, output_attentions=True)


# Both stacks, and training mode


@pytest.fixture(params=[True, False], ids=["shared", "separate"])
def trained(request):
    """A model with its prefiller, and the decoder alone with the same weights."""
    model = contracting_model(model_class=MaglevForPreTraining, share_prefiller=request.param)
    decoder = contracting_model()
    decoder.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if "prefiller" not in name})
    return model, decoder


def test_a_model_with_its_prefiller_generates_what_the_decoder_alone_does(trained):
    model, decoder = trained
    ids = random_ids(model, PROMPT, batch=2)
    expected = generate(decoder, ids, 3 * W)
    assert torch.equal(generate(model, ids, 3 * W), expected)
    assert torch.equal(generate(model, ids, 3 * W, rollout="sequential"), expected)
    with torch.no_grad():
        first = model.prefiller(*self_inputs(model, ids))
        begun = model.model(ids, prefiller=model.prefiller)
    assert (begun.target - first).abs().max() <= 1e-12  # the same pass; the search begins with it


def self_inputs(model, ids):
    """What the prefiller takes: the inputs as the model reads them, and the model."""
    return model.model._read_inputs(ids, None, None, None, None, None, False, {}), model.model


def test_a_search_that_begins_at_good_targets_is_short(trained, monkeypatch):
    """Planted: a prefiller that knows the memories. One sweep, to see that nothing moves."""
    model, _ = trained
    ids = random_ids(model, PROMPT)
    with torch.no_grad():
        memories = model.model(ids, rollout="sequential").last_hidden_state
        far = model.model(ids, prefiller=model.prefiller).sweeps
        monkeypatch.setattr(model.prefiller, "forward", lambda inputs, decoder: memories)
        near = model.model(ids, prefiller=model.prefiller).sweeps
    assert near == [1] and far[0] > 3


def test_teacher_forced_prompts_read_the_targets_and_later_tokens_the_memory(trained):
    model, decoder = trained
    ids = random_ids(model, PROMPT)
    with torch.no_grad():
        target = model.prefiller(*self_inputs(model, ids))
        fed = torch.cat([torch.zeros_like(target[:, :1]), target[:, :-1]], dim=1)
        cache = MaglevCache(decoder.config)
        hidden = decoder.model(ids, fed=fed, past_key_values=cache).last_hidden_state
    token = decoder.compute_logits(hidden[:, -1:]).argmax(-1)
    expected = [token]
    for _ in range(3 * W - 1):
        with torch.no_grad():
            expected.append(decoder(expected[-1], past_key_values=cache).logits.argmax(-1))
    found = generate(model, ids, 3 * W, rollout="teacher_forced")[:, PROMPT:]
    assert torch.equal(found, torch.cat(expected, dim=1))
    exact = generate(model, ids, 3 * W, rollout="sequential")[:, PROMPT:]
    assert not torch.equal(found, exact)  # it is an approximation, or this test would not see which it was
    with pytest.raises(ValueError, match="only `MaglevForPreTraining` has"):
        generate(decoder, ids, 3, rollout="teacher_forced")


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_a_model_in_training_mode_generates_as_in_evaluation(trained, checkpointing):
    """As people look at samples between steps. There is no dropout here."""
    model, decoder = trained
    ids = random_ids(model, PROMPT)
    expected = generate(decoder, ids, 3 * W)
    for one in (model, decoder):
        one.train()
        if checkpointing:
            one.gradient_checkpointing_enable()
        for use_cache in (True, False):  # without one too, as trainers set it, what is fed is the model's own memory
            assert torch.equal(generate(one, ids, 3 * W, use_cache=use_cache), expected)
        assert one.training and one.config.use_cache

"""`generate()` and what is built on it: beams, drafts, streamers, pipelines, chats, embeddings as prompts."""

import copy
from threading import Thread

import pytest
import torch
import transformers
from small_models import GPTALPHA, MIXED, generate, greedy_without_cache, make_model, random_ids, run_in_pieces
from small_sources import make_source
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)

from conversion import RetrofitOptions, convert
from kvm_hf import KVMCache

C, L = 4, 8
FIELDS = {"kvm": {}, "mixed": MIXED, "gptalpha": GPTALPHA}
PROMPT = 3 * L + 5


def prompt_of(model, batch=1, seed=0):
    return random_ids(model, PROMPT, batch, seed)


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


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("options", [dict(num_beams=4), dict(num_beams=4, num_return_sequences=4)], ids=str)
def test_beams_equal_beams_without_a_cache(fields, options):
    model = make_model(**fields)
    ids = prompt_of(model, batch=2)
    assert torch.equal(generate(model, ids, 2 * L, **options), generate(model, ids, 2 * L, use_cache=False, **options))


def test_beams_really_change_places():
    """Planted: beams that keep their caches in the old order must give other tokens, or the test above is blind."""
    model = make_model()
    ids = prompt_of(model, batch=2)
    right = generate(model, ids, 2 * L, num_beams=4)
    for layer_class in {type(layer) for layer in KVMCache(model.config).layers}:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layer_class, "reorder_cache", lambda self, beam_idx: None)
            assert not torch.equal(generate(model, ids, 2 * L, num_beams=4), right)


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_sampled_sequences_equal_those_sampled_without_a_cache(fields):
    model = make_model(**fields)
    ids = prompt_of(model)
    samples = []
    for use_cache in (True, False):
        torch.manual_seed(5)
        samples.append(
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                num_return_sequences=4,
                max_new_tokens=2 * L,
                use_cache=use_cache,
                pad_token_id=0,
            )
        )
    assert torch.equal(*samples)
    assert len(set(map(tuple, samples[0].tolist()))) > 1


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("seed", range(3))
def test_prompt_lookup_gives_greedy_tokens(fields, seed):
    model = make_model(vocab_size=11, **fields)  # few tokens, so that drafts are found, taken and rejected
    ids = prompt_of(model, seed=seed)
    assert torch.equal(generate(model, ids, 5 * L, prompt_lookup_num_tokens=3), generate(model, ids, 5 * L))


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("assistant", ["llama", "kvm", "itself"])
def test_assisted_generation_gives_greedy_tokens(fields, seed, assistant):
    model = make_model(vocab_size=11, **fields)
    helper = {"llama": llama_of, "kvm": lambda model: make_model(5, vocab_size=11), "itself": lambda model: model}
    ids = prompt_of(model, seed=seed)
    # Assistants make their masks from the ids, so the padding must be an id that does not occur.
    tokens = generate(model, ids, 5 * L, assistant_model=helper[assistant](model), pad_token_id=11)
    assert torch.equal(tokens, generate(model, ids, 5 * L))


@pytest.mark.parametrize("seed", range(3))
def test_as_an_assistant_of_another_model(seed):
    model = make_model(vocab_size=11)
    llama = llama_of(model)
    ids = prompt_of(model, seed=seed)
    tokens = generate(llama, ids, 5 * L, assistant_model=model, pad_token_id=11)
    assert torch.equal(tokens, generate(llama, ids, 5 * L))


def test_drafts_that_stay_in_the_state_are_noticed(monkeypatch):
    """Planted: a crop that only counts back gives other tokens."""
    model = make_model(vocab_size=11)
    ids = prompt_of(model)
    right = generate(model, ids, 5 * L)
    layer_class = type(KVMCache(model.config).layers[0])

    def only_count(self, tokens_to_remove):
        self.seen += int(tokens_to_remove)
        self.lengths = [length + int(tokens_to_remove) for length in self.lengths]

    monkeypatch.setattr(layer_class, "crop", only_count)
    assert not torch.equal(generate(model, ids, 5 * L, prompt_lookup_num_tokens=3), right)


def test_one_prompt_serves_many_continuations_without_being_changed():
    model = make_model()
    ids, questions = prompt_of(model), [random_ids(model, 5, seed=seed) for seed in (7, 8)]
    prompt = KVMCache(model.config)
    run_in_pieces(model, ids, [PROMPT], prompt)
    held = {name: tensor.clone() for name, tensor in prompt.layers[0].tensors().items()}
    for question in questions:
        whole = torch.cat([ids, question], dim=1)
        expected = greedy_without_cache(model, whole, 2 * L)
        assert torch.equal(generate(model, whole, 2 * L, past_key_values=copy.deepcopy(prompt)), expected)
        several = copy.deepcopy(prompt)
        several.batch_repeat_interleave(3)
        many = generate(model, whole.expand(3, -1), 2 * L, past_key_values=several)
        assert torch.equal(many, expected.expand(3, -1))
    assert prompt.get_seq_length() == PROMPT
    assert all(torch.equal(held[name], tensor) for name, tensor in prompt.layers[0].tensors().items())


def test_embeddings_as_a_prompt():
    model = make_model()
    ids = prompt_of(model, batch=2)
    tokens = model.generate(
        inputs_embeds=model.get_input_embeddings()(ids),
        attention_mask=torch.ones_like(ids),
        max_new_tokens=2 * L,
        do_sample=False,
        pad_token_id=0,
    )
    assert torch.equal(tokens, generate(model, ids, 2 * L)[:, PROMPT:])


def test_only_the_logits_asked_for_are_computed():
    model = make_model()
    ids = prompt_of(model)
    with torch.no_grad():
        whole = model(ids).logits
        assert (model(ids, logits_to_keep=3).logits - whole[:, -3:]).abs().max() <= 1e-12
        chosen = torch.tensor([2, 5])
        assert (model(ids, logits_to_keep=chosen).logits - whole[:, chosen]).abs().max() <= 1e-12


def test_attentions_are_refused_by_generate_too():
    model = make_model()
    with pytest.raises(ValueError, match="output_attentions"):
        generate(model, prompt_of(model), 3, return_dict_in_generate=True, output_attentions=True)


@pytest.mark.parametrize("implementation", ["static", "quantized", "offloaded"])
def test_every_other_kind_of_cache_is_refused_by_name(implementation):
    """Offloading works (see test_placement), but transformers' own needs CUDA."""
    model = make_model()
    with pytest.raises((ValueError, RuntimeError, AssertionError, ImportError), match=r"(?i)static|quant|cuda|offload"):
        generate(model, prompt_of(model), 3, cache_implementation=implementation)


# With a tokenizer: a retrofitted Llama

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role[0] }}{{ m.content }}{{ '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}<s>a{% endif %}"
)


@pytest.fixture(scope="module")
def chatting(tmp_path_factory):
    """A converted model and its tokenizer, with a window of 8 tokens."""
    folder = tmp_path_factory.mktemp("chat")
    make_source(folder / "source")
    convert(folder / "source", folder / "target", RetrofitOptions(chunk_size=C, window_chunks=2, sinks=1, growth=2.0))
    tokenizer = AutoTokenizer.from_pretrained(folder / "source", padding_side="left", pad_token="<unk>")
    tokenizer.chat_template = TEMPLATE
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "target").eval()
    model.generation_config = transformers.GenerationConfig(pad_token_id=0, do_sample=False)
    return model, tokenizer


TEXTS = ["hello there, how are you today?", "one. two. three. four. five. six. seven. eight. nine.", "why?"]


def test_a_pipeline_batches_prompts_of_different_lengths(chatting):
    model, tokenizer = chatting
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    together = generator(TEXTS, batch_size=3, max_new_tokens=2 * L)
    alone = [generator(text, max_new_tokens=2 * L) for text in TEXTS]
    assert together == alone
    assert all(len(one[0]["generated_text"]) > len(text) for one, text in zip(alone, TEXTS))


def test_streamers_give_the_same_text(chatting, capsys):
    model, tokenizer = chatting
    inputs = tokenizer(TEXTS[1], return_tensors="pt")
    expected = tokenizer.decode(model.generate(**inputs, max_new_tokens=2 * L)[0, inputs["input_ids"].shape[1] :])
    model.generate(**inputs, max_new_tokens=2 * L, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.strip() == expected.strip()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = Thread(target=model.generate, kwargs=dict(inputs, max_new_tokens=2 * L, streamer=streamer))
    thread.start()
    assert "".join(streamer).strip() == expected.strip()
    thread.join()


@pytest.mark.parametrize("batch", [1, 2])
def test_a_chat_of_several_turns_keeps_one_cache(chatting, batch):
    """Every turn is the whole chat through the template, with the cache of all turns before; rows of different
    lengths."""
    model, tokenizer = chatting
    chats = [[] for _ in range(batch)]
    cache, questions = KVMCache(model.config), [TEXTS, ["what is 7 and 8?", "a b c.", "?"], ["x", "y, z", "0"]]
    fed = None
    for turn in questions:
        for chat, question in zip(chats, turn):
            chat.append({"role": "user", "content": question})
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
        )
        if fed is not None and batch > 1:
            # Rows have grown by different lengths; what the cache has seen is a prefix of each, padded as it was.
            new = [ids[mask == 1][int(seen.sum()) :] for ids, mask, seen in zip(*inputs.values(), fed[1])]
            width = max(map(len, new))
            pad = torch.stack([torch.nn.functional.pad(ids, (width - len(ids), 0)) for ids in new])
            mask = torch.stack([torch.arange(width) >= width - len(ids) for ids in new]).long()
            inputs = {"input_ids": torch.cat([fed[0], pad], 1), "attention_mask": torch.cat([fed[1], mask], 1)}
        output = model.generate(**inputs, max_new_tokens=L, past_key_values=cache)
        prompt = inputs["input_ids"].shape[1]
        for row, chat in enumerate(chats):
            ids = inputs["input_ids"][row][inputs["attention_mask"][row] == 1]
            alone = model.generate(ids[None], attention_mask=torch.ones_like(ids)[None], max_new_tokens=L)
            assert torch.equal(output[row, prompt:], alone[0, len(ids) :])
            # Decoding and encoding again gives the same ids: the tokenizer knows single characters only.
            chat.append({"role": "assistant", "content": tokenizer.decode(output[row, prompt:]).replace(" ", "")})
        seen = cache.get_seq_length()
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, seen - prompt), value=1)
        fed = output[:, :seen], mask

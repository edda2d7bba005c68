"""The model around the attention: Llama's function within the window, training, heads, saving, neutral values."""

import pytest
import torch
from accelerate.utils import send_to_device
from small_models import GPTALPHA, SMALL, make_model, random_ids
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from kvm_hf import (
    KVMCache,
    KVMConfig,
    KVMForCausalLM,
    KVMForQuestionAnswering,
    KVMForSequenceClassification,
    KVMForTokenClassification,
    KVMModel,
    state_kvm,
)

L = 8
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
# transformers' Llama computes its norms in float32 even in a float64 model; ours does not.
FLOAT32_NORMS = 1e-6
ROPES = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
]


def llama_and_kvm(rope, dtype=torch.float64, **fields):
    """A random Llama and a KVM model with its weights; everything of ours at its neutral value."""
    torch.manual_seed(0)
    shared = {name: SMALL[name] for name in SMALL if name in LlamaConfig().to_dict()} | {"rope_parameters": dict(rope)}
    llama = LlamaForCausalLM(LlamaConfig(**shared)).to(dtype).eval()
    for parameter in llama.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    kvm = KVMForCausalLM(KVMConfig(**{**SMALL, "rope_parameters": dict(rope), **fields})).to(dtype).eval()
    loaded = kvm.load_state_dict(llama.state_dict(), strict=False)
    assert not loaded.unexpected_keys
    return llama, kvm


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_the_first_window_equals_llama_and_later_tokens_do_not(rope):
    llama, kvm = llama_and_kvm(rope)
    ids = random_ids(kvm, 4 * L)
    with torch.no_grad():
        difference = (llama(ids).logits - kvm(ids).logits).abs().amax(dim=(0, 2))
    assert difference[:L].max() <= FLOAT32_NORMS
    assert difference[L:].max() > 1e-3


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_a_state_with_room_for_every_token_equals_llama_throughout(rope):
    """Each token keeps a row of its own, whose key is turned back and forth: nothing may be lost, whatever the RoPE."""
    llama, kvm = llama_and_kvm(rope, state_size=1000)
    ids = random_ids(kvm, 6 * L + 3)
    with torch.no_grad():
        assert (llama(ids).logits - kvm(ids).logits).abs().max() <= FLOAT32_NORMS


@pytest.mark.parametrize("fields", [dict(rope_parameters=HALF), dict(gate_keys=True, gate_values=True)])
def test_gradients_reach_every_parameter(fields):
    model = make_model(**fields).train()
    ids = random_ids(model, 7 * L)
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("fields", [{}, dict(rope_parameters=HALF)])
def test_gradients_of_merged_tokens_are_those_of_finite_differences(fields):
    """A fixed state of four rows, so that tokens from the fourth on are merged."""
    model = make_model(state_budget="fixed", state_size=4, **fields)
    embeds = model.model.embed_tokens(random_ids(model, 4 * L)).detach()

    def last_logit(inputs):
        return model(inputs_embeds=inputs).logits[0, -1, 0]

    inputs = embeds.clone().requires_grad_()
    last_logit(inputs).backward()
    for token, channel in [(5, 0), (9, 3), (14, 7)]:
        step = torch.zeros_like(embeds)
        step[0, token, channel] = 1e-6
        with torch.no_grad():
            slope = (last_logit(embeds + step) - last_logit(embeds - step)) / 2e-6
        assert abs(slope - inputs.grad[0, token, channel]) <= 1e-6 * max(1.0, abs(slope))


@pytest.mark.parametrize("fields", [{}, dict(rope_parameters=HALF)])
def test_autocast_keeps_the_state_in_float32_and_gives_nearly_the_same_loss(fields, monkeypatch):
    model = make_model(dtype=torch.float32, **fields).train()
    compared = set()
    for treatment in (state_kvm.NormalizedKeys, state_kvm.PositionalKeys):

        def similarity(self, *args, honest=treatment.similarity):
            result = honest(self, *args)
            compared.add(result.dtype)
            return result

        monkeypatch.setattr(treatment, "similarity", similarity)
    ids = random_ids(model, 5 * L)
    cache = KVMCache(model.config)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=ids, past_key_values=cache).loss
    loss.backward()
    assert {part.dtype for part in cache.layers[0].state} == compared == {torch.float32}
    assert cache.layers[0].keys.dtype == torch.bfloat16
    assert abs(loss - model(ids, labels=ids).loss) < 0.05 * loss
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_the_training_forward_equals_the_eval_forward():
    model = make_model()
    ids = random_ids(model, 5 * L)
    with torch.no_grad():
        evaluated = model(ids).logits
    assert torch.equal(model.train()(ids).logits.detach(), evaluated)


@pytest.mark.parametrize("fields", [{}, GPTALPHA], ids=["llama", "gptalpha"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients_and_leaves_use_cache_alone(reentrant, fields):
    model = make_model(**fields).train()
    ids = random_ids(model, 5 * L)

    def gradients():
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    plain = gradients()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    checkpointed = gradients()
    assert all(torch.allclose(plain[name], checkpointed[name], atol=1e-12) for name in plain)
    assert model.config.use_cache is True


def test_a_checkpoint_without_our_parameters_gets_their_neutral_values(tmp_path):
    fields = dict(rope_parameters=HALF, use_qk_norm=False)
    model = make_model(dtype=torch.float32, **fields)
    ours = ("state_norm", "merge_gate", "temperature")
    state = {name: tensor for name, tensor in model.state_dict().items() if not any(part in name for part in ours)}
    model.save_pretrained(tmp_path, state_dict=dict(state))
    loaded = KVMForCausalLM.from_pretrained(tmp_path)
    for name, parameter in loaded.named_parameters():
        if any(part in name for part in ours):
            neutral = 0.0 if "merge_gate" in name or name.endswith("bias") else 1.0
            assert parameter.eq(neutral).all(), name
        else:
            assert torch.equal(parameter, state[name])


@pytest.mark.parametrize("temperatures", [True, False])
def test_a_new_model_starts_at_the_neutral_values(temperatures):
    """Also in layers that have no bare parameters, over which transformers passes in custom code."""
    model = KVMForCausalLM(KVMConfig(**SMALL, rope_parameters=HALF, region_temperatures=temperatures))
    for layer in model.model.layers:
        assert layer.self_attn.merge_gate.weight.eq(0).all()
        assert hasattr(layer.self_attn, "state_temperature") == temperatures


@pytest.mark.parametrize("load", [{}, {"device_map": "auto"}, {"dtype": torch.bfloat16}], ids=str)
@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_every_buffer_survives_loading(tmp_path, load, rope):
    """Buffers are not in the file; loading goes through the meta device."""
    model = make_model(dtype=torch.float32, rope_parameters=rope)
    model.save_pretrained(tmp_path)
    buffers = dict(AutoModelForCausalLM.from_pretrained(tmp_path, **load).named_buffers())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffers[name].to(buffer.dtype), buffer), name
    assert buffers


def test_labels_give_the_loss_of_shifted_tokens():
    model = make_model()
    ids = random_ids(model, 5 * L)
    output = model(ids, labels=ids)
    expected = torch.nn.functional.cross_entropy(output.logits[0, :-1], ids[0, 1:])
    assert torch.allclose(output.loss.double(), expected, rtol=1e-6)  # transformers takes the loss in float32


def test_logits_to_keep_and_embeddings_as_input():
    model = make_model()
    ids = random_ids(model, 5 * L)
    with torch.no_grad():
        whole = model(ids).logits
        assert (model(ids, logits_to_keep=3).logits - whole[:, -3:]).abs().max() <= 1e-12
        embedded = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
    assert torch.equal(embedded, whole)


@pytest.mark.parametrize("tied", [True, False])
def test_resized_embeddings_stay_tied_or_apart_and_come_back(tmp_path, tied):
    model = make_model(dtype=torch.float32, tie_word_embeddings=tied)
    model.tie_weights()
    ids = random_ids(model, 3 * L)
    with torch.no_grad():
        before = model(ids).logits
        model.resize_token_embeddings(64, mean_resizing=False)
        after = model(ids).logits
    assert after.shape[-1] == model.config.vocab_size == 64
    assert (after[..., :61] - before).abs().max() <= 1e-5
    model.save_pretrained(tmp_path)
    loaded = KVMForCausalLM.from_pretrained(tmp_path)
    for one in (model, loaded):
        assert (one.lm_head.weight is one.model.embed_tokens.weight) == tied
    with torch.no_grad():
        assert torch.equal(loaded(ids + 3).logits, model(ids + 3).logits)


def test_hidden_states_are_returned_when_asked_for():
    model = make_model()
    with torch.no_grad():
        states = model(random_ids(model, 3 * L), output_hidden_states=True).hidden_states
    assert [tuple(state.shape) for state in states] == [(1, 3 * L, 24)] * 3


@pytest.mark.parametrize(
    ("head", "logits"),
    [
        (KVMForSequenceClassification, (1, 3)),
        (KVMForTokenClassification, (1, 20, 3)),
        (KVMForQuestionAnswering, (1, 20)),
    ],
)
def test_generic_heads_run_and_come_back_from_disk(tmp_path, head, logits):
    model = head(KVMConfig(**{**SMALL, "num_labels": 3, "pad_token_id": 0})).eval()
    ids = random_ids(model, 20) % 60 + 1
    with torch.no_grad():
        output = model(ids)
    assert tuple(output[0].shape) == logits
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(head.from_pretrained(tmp_path)(ids)[0], output[0])


def test_auto_classes_know_the_model():
    config = KVMConfig(**SMALL)
    assert type(AutoModel.from_config(config)) is KVMModel
    assert type(AutoModelForCausalLM.from_config(config)) is KVMForCausalLM


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (dict(output_attentions=True), "output_attentions"),
        (dict(inputs_embeds=torch.zeros(1, 4, 24)), "exactly one"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_in_a_sentence(inputs, words):
    model = make_model()
    with pytest.raises(ValueError, match=words):
        model(random_ids(model, 4), **inputs)


def test_an_empty_input_is_refused():
    model = make_model()
    for shape in ((1, 0), (0, 3)):
        with pytest.raises(ValueError, match="empty"):
            model(torch.zeros(shape, dtype=torch.long))
    with pytest.raises(ValueError, match="2D"):
        model(torch.zeros(3, dtype=torch.long))


def test_a_forward_on_the_meta_device_gives_shapes():
    with torch.device("meta"):
        model = KVMForCausalLM(KVMConfig(**SMALL))
        assert model(torch.zeros(1, 5 * L, dtype=torch.long)).logits.shape == (1, 5 * L, 61)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_temperatures_of_zero_do_not_divide_by_zero(dtype):
    model = make_model(dtype=dtype)
    with torch.no_grad():
        model.model.layers[0].self_attn.window_temperature.zero_()
        model.model.layers[1].self_attn.state_temperature.zero_()
        assert model(random_ids(model, 5 * L)).logits.isfinite().all()


def test_gates_that_underflow_do_not_divide_by_zero():
    model = make_model(gate_keys=True, gate_values=True, gate_initial_state=True)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight.fill_(1)
            layer.self_attn.merge_gate.weight.mul_(1e6)
        assert model(random_ids(model, 6 * L)).logits.isfinite().all()


def test_a_layer_without_rope_has_no_channels_to_ignore():
    model = make_model(rope_parameters=HALF, no_rope_layers=[1, 0])
    treatments = [layer.self_attn.treatment(model.model.rotary_emb, None) for layer in model.model.layers]
    assert [treatment.rotary_channels for treatment in treatments] == [4, 0]


def test_a_cache_is_not_forgotten_under_gradient_checkpointing():
    model = make_model().train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="neither filled nor continued"):
        model(random_ids(model, 5), past_key_values=KVMCache(model.config))


def test_accelerate_does_not_move_the_rotary_tables_with_a_layers_inputs():
    model = make_model()
    inputs = {"rotary": model.model.rotary_emb, "position_ids": torch.arange(3)}
    moved = send_to_device(inputs, torch.device("meta"), skip_keys=model._skip_keys_device_placement)
    assert moved["position_ids"].device.type == "meta"
    assert model.model.rotary_emb.inv_freq.device.type == "cpu"


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_heads_take_both_names_of_the_cache(name):
    model = KVMForTokenClassification(KVMConfig(**SMALL)).double().eval()
    cache = KVMCache(model.config)
    ids = random_ids(model, 3 * L)
    with torch.no_grad():
        whole = model(ids).logits
        model(ids[:, : 2 * L], **{name: cache})
        rest = model(ids[:, 2 * L :], **{name: cache}).logits
    assert cache.get_seq_length() == 3 * L
    assert (whole[:, 2 * L :] - rest).abs().max() <= 1e-9


def test_tied_embeddings_stay_tied_after_resizing_and_saving(tmp_path):
    model = make_model(dtype=torch.float32, tie_word_embeddings=True)
    model.tie_weights()
    model.resize_token_embeddings(64)
    model.save_pretrained(tmp_path)
    loaded = KVMForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert loaded.lm_head.weight.shape[0] == 64

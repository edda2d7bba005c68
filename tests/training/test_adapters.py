"""PEFT: adapters on our models' projections, with the parameters that a retrofit adds trained and saved beside them."""

import copy

import peft
import pytest
import torch
from fresh_process import in_fresh_process
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from small_models import random_ids
from small_training import FAMILIES, Losses, arguments_for, largest_difference, make_rows, pad
from transformers import LlamaForCausalLM, Trainer

from kvm_hf import peft_kvm
from maglev_hf import MaglevForCausalLM, MaglevTrainer, peft_maglev

WRAP = {"llama": peft_kvm, "gptalpha": peft_kvm, "maglev": peft_maglev}
OURS = {
    "llama": {"merge_gate.weight", "state_norm.weight", "state_norm.bias", "state_temperature", "window_temperature"},
    "maglev": {
        *(f"memory.{name}.weight" for name in ("k_proj", "v_proj", "k_norm", "local_gate", "memory_gate")),
        *("residual_scale", "embedding_scale"),
    },
}
OURS["gptalpha"] = OURS["llama"]
quiet = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def lora(**fields):
    return LoraConfig(task_type="CAUSAL_LM", **fields)


def make(family, **fields):
    if family == "maglev":  # every token after the other: no search whose end depends on rounding
        fields = dict(rollout="sequential") | fields
    return FAMILIES[family](**fields)


def train(model, family, steps=2, rate=0.05, all_move=True):
    """Some gradient descent on rows beyond the window; every parameter that is trained has moved."""
    rows = pad("right")(make_rows((30, 25)))
    rows["labels"] = rows["input_ids"]
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in trained.items()}
    optimizer = torch.optim.SGD(trained.values(), lr=rate)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        model(**rows).loss.backward()
        optimizer.step()
    for name, parameter in trained.items():
        assert not all_move or not torch.equal(parameter, before[name]), name
    return model.eval()


@torch.no_grad()
def logits_of(model):
    ids = random_ids(model, 30, batch=2)
    return model(input_ids=ids).logits


def apart(one, two) -> float:
    return (one.float() - two.float()).abs().max().item()


@quiet
@pytest.mark.parametrize(
    "settings", [{}, dict(use_dora=True), dict(use_rslora=True, r=4)], ids=["lora", "dora", "rslora"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_adapter_merged_and_saved_models_are_the_same(tmp_path, family, settings):
    """And the adapter's file holds all that was trained."""
    base = make(family).eval()
    model = WRAP[family].get_peft_model(copy.deepcopy(base), lora(**settings))
    train(model, family)
    logits = logits_of(model)
    assert apart(logits, logits_of(base)) > 1e-2  # far more than any tolerance below

    model.save_pretrained(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert sum(tensor.numel() for tensor in saved.values()) == sum(p.numel() for p in trained.values())
    for end in OURS[family]:
        assert any(name.endswith(end) for name in saved), end
    assert {name.split(".")[-3] for name in saved if "lora_A" in name} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert not any("prefiller" in name or "memory" in name for name in saved if "lora" in name)

    # PEFT alone reads it; the same numbers are computed, in float32 to 1e-6 of logits of about 10 over several layers.
    again = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter").eval()
    assert apart(logits_of(again), logits) < 1e-4
    merged = model.merge_and_unload()
    assert type(merged) is type(base)
    assert apart(logits_of(merged), logits) < 1e-4
    merged.save_pretrained(tmp_path / "merged")
    loaded = type(base).from_pretrained(tmp_path / "merged").eval()
    assert torch.equal(logits_of(loaded), logits_of(merged))
    assert {name for name, _ in loaded.named_parameters()} == {name for name, _ in base.named_parameters()}


@quiet
@pytest.mark.parametrize("family", FAMILIES)
def test_merging_in_bfloat16_is_off_by_its_rounding(family):
    """Under autocast the base is float32; here all of it is bfloat16, and a merged weight is rounded once more: as far from
    the adapter's logits as the model's own in float32 are, within a factor of 2. Within the window, that is: beyond it a
    rounded key may join another row."""
    base = make(family).to(torch.bfloat16)
    with pytest.warns(UserWarning, match="do not move at small learning rates"):
        model = WRAP[family].get_peft_model(copy.deepcopy(base), lora())
    train(model, family, rate=0.5, all_move=False)
    window = slice(0, 8)
    logits = logits_of(model)[:, window]
    exact = copy.deepcopy(model).float()
    noise = apart(logits_of(exact)[:, window], logits)
    assert apart(logits_of(model.merge_and_unload())[:, window], logits) < 2 * noise


@quiet
@pytest.mark.parametrize("family", ["llama", "maglev"])
def test_tied_embeddings_are_adapted_together_and_stay_tied(tmp_path, family):
    base = make(family, tie_word_embeddings=True)
    base.tie_weights()
    base.eval()
    targets, pattern = ["q_proj", "embed_tokens"], r"model\.(embed_tokens|.*q_proj)"
    for refused in (
        lora(target_modules=targets),
        lora(target_modules="lm_head"),
        lora(target_modules=pattern, ensure_weight_tying=True),
    ):
        with pytest.raises(ValueError, match="ensure_weight_tying"):
            WRAP[family].get_peft_model(copy.deepcopy(base), refused)
    model = WRAP[family].get_peft_model(copy.deepcopy(base), lora(target_modules=targets, ensure_weight_tying=True))
    train(model, family)
    logits = logits_of(model)
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter").eval()
    assert apart(logits_of(again), logits) < 1e-4
    with pytest.raises(ValueError, match="merge_and_unload"):
        model.merge_adapter()
    merged = model.merge_and_unload()
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    assert apart(logits_of(merged), logits) < 1e-4
    merged.save_pretrained(tmp_path / "merged")
    loaded = type(base).from_pretrained(tmp_path / "merged").eval()
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(logits_of(loaded), logits_of(merged))


@quiet
@pytest.mark.parametrize("family", FAMILIES)
def test_a_disabled_or_unloaded_adapter_leaves_the_model_as_it_was(family):
    base = make(family).eval()
    model = WRAP[family].get_peft_model(copy.deepcopy(base), lora())
    train(model, family)
    trained, before = logits_of(model), logits_of(base)
    with model.disable_adapter():
        assert torch.equal(logits_of(model), before)
    assert torch.equal(logits_of(model), trained)
    unloaded = model.unload()
    assert torch.equal(logits_of(unloaded), before)
    assert largest_difference(dict(unloaded.named_parameters()), dict(base.named_parameters())) == 0


@quiet
@pytest.mark.parametrize("family", FAMILIES)
def test_trainer_resumes_an_adapter_with_all_that_it_trains(tmp_path, family):
    """Same losses as without the interruption, and the same file in the end."""
    rows = make_rows()
    trainer_class = MaglevTrainer if family == "maglev" else Trainer

    def run(folder, steps, **resume):
        model, losses = WRAP[family].get_peft_model(make(family), lora()), Losses()
        arguments = arguments_for(
            tmp_path / folder,
            max_steps=steps,
            save_strategy="steps",
            save_steps=2,
            optim="adamw_torch",
            per_device_train_batch_size=2,
        )
        trainer = trainer_class(model, arguments, train_dataset=rows, data_collator=pad("right"), callbacks=[losses])
        trainer.train(**resume)
        return losses.of_step, load_file(tmp_path / folder / f"checkpoint-{steps}" / "adapter_model.safetensors")

    whole, file = run("whole", 4)
    run("parts", 2)
    rest, again = run("parts", 4, resume_from_checkpoint=True)
    assert sorted(rest) == [3, 4]
    for step in rest:
        assert rest[step]["loss"] == whole[step]["loss"]
    assert largest_difference(file, again) == 0
    assert any("temperature" in name or "memory" in name for name in file)


@quiet
def test_an_adapter_of_training_serves_the_deployed_decoder(tmp_path):
    """The prefiller's part of it is left out, as it is of the weights."""
    base = make("maglev", share_prefiller=False).eval()
    model = train(peft_maglev.get_peft_model(copy.deepcopy(base), lora()), "maglev")
    model.save_pretrained(tmp_path / "adapter")
    base.save_pretrained(tmp_path / "base")
    decoder = MaglevForCausalLM.from_pretrained(tmp_path / "base")
    adapted = PeftModel.from_pretrained(decoder, tmp_path / "adapter").eval()
    assert apart(logits_of(adapted), logits_of(model)) < 1e-4  # the same float32 computation


@quiet
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_finds_our_projections_by_itself_and_other_methods_work(family):
    """What importing our module registers; merged as above."""
    for config in (
        lora(),
        peft.LoHaConfig(task_type="CAUSAL_LM"),
        peft.VeraConfig(task_type="CAUSAL_LM", r=4),
        peft.OFTConfig(task_type="CAUSAL_LM", oft_block_size=0, r=3),
    ):
        model = peft.get_peft_model(make(family).eval(), copy.deepcopy(config))
        adapted = {name.split(".")[-1] for name, module in model.named_modules() if hasattr(module, "base_layer")}
        assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}, type(config)
        model = WRAP[family].get_peft_model(make(family).eval(), config)
        logits = logits_of(train(model, family, rate=0.01, all_move=False))
        assert apart(logits_of(model.merge_and_unload()), logits) < 2e-3, type(config)  # OFT inverts matrices


@quiet
def test_modules_that_the_new_parameters_own_can_also_be_saved_the_way_of_peft(tmp_path):
    base = make("llama").eval()
    config = lora(modules_to_save=["merge_gate", "state_norm"])
    model = train(peft_kvm.get_peft_model(copy.deepcopy(base), config), "llama")
    assert {name.split(".")[-1] for name in model.own_parameters} == {"state_temperature", "window_temperature"}
    logits = logits_of(model)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    assert torch.equal(logits_of(again), logits)
    assert apart(logits_of(model.merge_and_unload()), logits) < 1e-4


@quiet
def test_what_would_be_lost_is_refused(tmp_path):
    def wrap(config, *args, **kwargs):
        return peft_kvm.get_peft_model(make("llama"), config, *args, **kwargs)

    with pytest.raises(ValueError, match="it is a parameter: name it in `parameters`"):
        wrap(lora(modules_to_save=["state_temperature"]))
    with pytest.raises(ValueError, match="there is none"):
        wrap(lora(modules_to_save=["temperature_of_the_state"]))
    with pytest.raises(ValueError, match="no parameters whose names end so"):
        wrap(lora(), parameters=["temperature"])
    with pytest.raises(ValueError, match="adapts or saves already"):
        wrap(lora(), parameters=["q_proj.weight"])
    with pytest.raises(ValueError, match="only one"):
        wrap(lora(), mixed=True)
    model = wrap(lora(), parameters=["state_temperature", "input_layernorm.weight"])
    assert {name.split(".", 3)[-1] for name in model.own_parameters} == {
        "self_attn.state_temperature",
        "input_layernorm.weight",
    }
    with pytest.raises(ValueError, match="a model of its own"):
        model.add_adapter("second", lora())
    with pytest.raises(ValueError, match="safetensors"):
        model.save_pretrained(tmp_path, safe_serialization=False)
    model.get_base_model().model.norm.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"would not save them: .*model\.norm\.weight"):
        model.save_pretrained(tmp_path)


@quiet
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_are_learned_through_embeddings_only(family):
    """Prompt tuning generates what it does without a cache (PEFT 0.21 alone would read the prompt anew at every token of
    transformers 5.24's); prefix tuning, which writes the cache, is refused."""
    model = make(family).eval()
    with pytest.raises(ValueError, match="learns a prompt"):
        WRAP[family].get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    torch.manual_seed(0)
    tuned = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    ids = random_ids(model, 30, batch=2)
    embeds = torch.cat([tuned.get_prompt(2), model.get_input_embeddings()(ids)], dim=1)
    assert torch.equal(tuned(input_ids=ids).logits, model(inputs_embeds=embeds).logits)
    settings = dict(attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0)
    with_cache = tuned.generate(input_ids=ids, max_new_tokens=8, **settings)
    without = ids
    with torch.no_grad():
        for _ in range(8):
            logits = tuned(input_ids=without, attention_mask=torch.ones_like(without), use_cache=False).logits
            without = torch.cat([without, logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(with_cache, without)

    prefix = peft.get_peft_model(
        make(family).eval(), peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    )
    with pytest.raises(ValueError, match="was not made for this model's layers"):
        prefix(input_ids=ids, attention_mask=torch.ones_like(ids))
    with pytest.raises(ValueError, match=r"two names for one thing|was not made for this model's layers"):
        prefix.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, pad_token_id=0)


@quiet
def test_an_adapter_loads_on_a_folder_without_our_package_and_peft_asks_for_targets_there(tmp_path):
    bases, logits = {}, {}
    for family in FAMILIES:
        model = make(family).eval()
        model.save_pretrained(tmp_path / family)
        adapted = train(WRAP[family].get_peft_model(model, lora()), family)
        adapted.save_pretrained(tmp_path / f"{family}-adapter")
        logits[family] = logits_of(adapted)
        bases[family] = random_ids(model, 30, batch=2).tolist()
    (tmp_path / "cache").mkdir()
    found, message = in_fresh_process(
        f"""
        from peft import LoraConfig, PeftModel, get_peft_model
        found = {{}}
        for family, ids in {bases!r}.items():
            base = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r} + "/" + family, trust_remote_code=True)
            model = PeftModel.from_pretrained(base, {str(tmp_path)!r} + f"/{{family}}-adapter").eval()
            with torch.no_grad():
                found[family] = model(torch.tensor(ids)).logits.tolist()
        try:
            get_peft_model(base, LoraConfig(task_type="CAUSAL_LM"))
        except ValueError as error:
            print(json.dumps([found, str(error)]))
        """,
        tmp_path / "cache",
    )
    assert "target_modules" in message
    for family, expected in logits.items():
        assert apart(torch.tensor(found[family]), expected) < 1e-4, family


def test_a_plain_llama_has_none_of_our_parameters():
    """What the helper says of a model that is not ours."""
    from transformers import LlamaConfig

    small = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    model = peft_kvm.get_peft_model(LlamaForCausalLM(small), lora(target_modules=["q_proj"]))
    assert model.own_parameters == []

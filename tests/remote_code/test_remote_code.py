"""A saved folder lives alone: fresh processes that cannot import our packages load it, use it, and save it again."""

from pathlib import Path

import pytest
import torch
from fresh_process import in_fresh_process
from safetensors.torch import load_file
from small_maglev import LLAMA_STYLE
from small_maglev import make_model as make_maglev_model
from small_models import GPTALPHA, MIXED, generate, make_model, random_ids
from transformers import AutoModelForCausalLM

from conversion import MaglevOptions, RetrofitOptions, convert
from kvm_hf import KVMForSequenceClassification
from maglev_hf import MaglevForPreTraining

MAGLEV_FILES = {
    f"{part}_maglev.py"
    for part in ("inputs", "configuration", "modeling", "cache", "layer", "padding", "parallel", "rollout")
}


def make_trained_maglev_model(**fields):
    """Both stacks, as they are saved in training."""
    model = make_maglev_model(model_class=MaglevForPreTraining, **fields)
    model.tie_weights()
    return model


def save(folder, make=make_model, **fields):
    """A small model in `folder / "model"`; the folder, ids, and the tokens that it generates from them."""
    model = make(dtype=torch.float32, **fields)
    model.save_pretrained(folder / "model")
    ids = random_ids(model, 30)
    (folder / "cache").mkdir()
    return folder, ids, generate(model, ids, 20).tolist()


@pytest.fixture
def saved(tmp_path):
    return save(tmp_path, **MIXED)


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (make_model, MIXED),
        (make_model, GPTALPHA),
        (make_trained_maglev_model, dict(share_prefiller=False)),
        (make_trained_maglev_model, LLAMA_STYLE),
    ],
    ids=["llama", "gptalpha", "maglev", "maglev tied and shared"],
)
def test_a_folder_loads_generates_saves_and_loads_again_without_our_packages(tmp_path, make, fields):
    """Of a model in training (Maglev with its prefiller) the part that generates."""
    folder, ids, expected = save(tmp_path, make, **fields)
    script = """
    model = AutoModelForCausalLM.from_pretrained({source!r}, trust_remote_code=True)
    ids = torch.tensor({ids})
    new = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0)
    model.save_pretrained({again!r})
    print(json.dumps({{"tokens": new.tolist(), "class": type(model).__module__}}))
    """
    for source, again, cache in (("model", "again", "cache"), ("again", "third", "cache2")):
        (folder / cache).mkdir(exist_ok=True)
        result = in_fresh_process(
            script.format(source=str(folder / source), again=str(folder / again), ids=ids.tolist()), folder / cache
        )
        assert result["tokens"] == expected
        assert result["class"].startswith("transformers_modules")


def test_the_folder_serves_every_auto_class_that_its_config_names(saved):
    folder, ids, _ = saved
    result = in_fresh_process(
        f"""
        folder = {str(folder / "model")!r}
        config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
        base = AutoModel.from_pretrained(folder, trust_remote_code=True)
        head = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)
        ids = torch.tensor({ids.tolist()})
        print(json.dumps([type(config).__name__, type(base).__name__, type(head).__name__,
                          list(head(ids).logits.shape), sorted(config.auto_map)]))
        """,
        folder / "cache",
    )
    assert result[:4] == ["KVMConfig", "KVMModel", "KVMForSequenceClassification", [1, 2]]
    assert len(result[4]) == 6


def test_a_saved_head_carries_its_code(tmp_path):
    config = make_model().config
    config.pad_token_id = 0
    KVMForSequenceClassification(config).save_pretrained(tmp_path / "head")
    (tmp_path / "cache").mkdir()
    names = {path.name for path in (tmp_path / "head").glob("*.py")}
    parts = (
        "configuration",
        "modeling",
        "attention",
        "cache",
        "layer",
        "padding",
        "parallel",
        "replay",
        "shift",
        "state",
    )
    assert names == {f"{part}_kvm.py" for part in parts}
    loaded = in_fresh_process(
        f"""
        model = AutoModelForSequenceClassification.from_pretrained({str(tmp_path / "head")!r}, trust_remote_code=True)
        print(json.dumps(type(model).__name__))
        """,
        tmp_path / "cache",
    )
    assert loaded == "KVMForSequenceClassification"


def test_a_converted_folder_loads_alone(source, tmp_path):
    convert(source, tmp_path / "target", RetrofitOptions(chunk_size=4, window_chunks=2, sinks=1))
    (tmp_path / "cache").mkdir()
    ids = torch.randint(4, 40, (1, 30), generator=torch.Generator().manual_seed(0))
    result = in_fresh_process(
        f"""
        from transformers import AutoTokenizer
        model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "target")!r}, trust_remote_code=True)
        tokenizer = AutoTokenizer.from_pretrained({str(tmp_path / "target")!r}, trust_remote_code=True)
        new = model.generate(torch.tensor({ids.tolist()}), max_new_tokens=10, do_sample=False)
        print(json.dumps([new.tolist(), type(model).__module__, tokenizer.convert_tokens_to_ids("<tool>")]))
        """,
        tmp_path / "cache",
    )
    local = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert result[0] == local.generate(ids, max_new_tokens=10, do_sample=False).tolist()
    assert result[1].startswith("transformers_modules")
    assert result[2] == 43


@pytest.mark.parametrize("share", [False, True], ids=["separate", "shared"])
def test_a_folder_made_to_train_maglev_loads_alone_as_decoder_and_with_its_prefiller(source, tmp_path, share):
    convert(source, tmp_path / "target", MaglevOptions(window=6, share_prefiller=share))
    (tmp_path / "cache").mkdir()
    ids = torch.randint(4, 40, (1, 30), generator=torch.Generator().manual_seed(0))
    tokens, module, parts, frozen, loss, deployed = in_fresh_process(
        f"""
        from transformers import AutoModelForPreTraining
        folder, ids = {str(tmp_path / "target")!r}, torch.tensor({ids.tolist()})
        settings = dict(attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)
        decoder = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        model = AutoModelForPreTraining.from_pretrained(folder, trust_remote_code=True).train()
        prefiller = [part for name, part in model.named_parameters() if name.startswith("prefiller.")]
        loss = model(ids, labels=ids).loss
        loss.backward()
        model.export_decoder({str(tmp_path / "deployed")!r})
        deployed = AutoModelForCausalLM.from_pretrained({str(tmp_path / "deployed")!r}, trust_remote_code=True)
        print(json.dumps([decoder.generate(ids, **settings).tolist(), type(model).__module__, len(prefiller),
                          not any(part.requires_grad for part in prefiller), bool(loss.isfinite()),
                          deployed.generate(ids, **settings).tolist()]))
        """,
        tmp_path / "cache",
    )
    local = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    expected = local.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False).tolist()
    assert tokens == deployed == expected
    assert module.startswith("transformers_modules")
    assert (parts, frozen, loss) == (0 if share else 3 * 9 + 1, True, True)


def test_a_maglev_folder_serves_every_auto_class_and_exports_its_decoder(tmp_path):
    """Whoever deploys is not told of weights that are not for them; the prefiller is there for whoever trains on."""
    folder, ids, expected = save(tmp_path, make_trained_maglev_model, share_prefiller=False)
    assert {path.name for path in (folder / "model").glob("*.py")} == MAGLEV_FILES
    source, exported, again = (str(folder / name) for name in ("model", "exported", "again"))
    result = in_fresh_process(
        f"""
        import io, logging
        from transformers import AutoModelForPreTraining
        said = io.StringIO()
        logging.getLogger("transformers").addHandler(logging.StreamHandler(said))
        ids = torch.tensor({ids.tolist()})
        settings = dict(attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0)
        load = dict(trust_remote_code=True, output_loading_info=True)
        decoder, report = AutoModelForCausalLM.from_pretrained({source!r}, **load)
        base, _ = AutoModel.from_pretrained({source!r}, **load)
        about_prefiller = [line for line in said.getvalue().splitlines() if "prefiller" in line]
        model, whole = AutoModelForPreTraining.from_pretrained({source!r}, **load)
        model.export_decoder({exported!r})
        model.save_pretrained({again!r})
        problems = [sorted(one[key]) for one in (report, whole) for key in ("missing_keys", "unexpected_keys")]
        print(json.dumps([
            [type(one).__name__ for one in (decoder, base, model)],
            about_prefiller, problems,
            [one.generate(ids, **settings).tolist() for one in (decoder, model)],
            sorted(model.config.auto_map),
        ]))
        """,
        folder / "cache",
    )
    names, about_prefiller, problems, tokens, auto_map = result
    assert names == ["MaglevForCausalLM", "MaglevModel", "MaglevForPreTraining"]
    assert not about_prefiller and problems == [[], [], [], []]
    assert tokens == [expected, expected]
    assert auto_map == ["AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForPreTraining"]

    for place in (exported, again):
        assert {path.name for path in Path(place).glob("*.py")} == MAGLEV_FILES
    weights, held = (load_file(f"{place}/model.safetensors") for place in (exported, again))
    assert {name for name in held if name not in weights} == {name for name in held if name.startswith("prefiller.")}
    assert not any(name.startswith("prefiller.") for name in weights)
    (folder / "cache2").mkdir()
    alone = in_fresh_process(
        f"""
        from transformers import AutoModelForPreTraining
        ids = torch.tensor({ids.tolist()})
        settings = dict(attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0)
        decoder = AutoModelForCausalLM.from_pretrained({exported!r}, trust_remote_code=True)
        model = AutoModelForPreTraining.from_pretrained({again!r}, trust_remote_code=True)
        print(json.dumps([one.generate(ids, **settings).tolist() for one in (decoder, model)]))
        """,
        folder / "cache2",
    )
    assert alone == [expected, expected]


def test_training_through_remote_code_reaches_the_causal_lm_api(saved):
    """PEFT's CAUSAL_LM task and `generate` both need GenerationMixin among the bases."""
    folder, ids, _ = saved
    result = in_fresh_process(
        f"""
        from transformers import GenerationMixin
        model = AutoModelForCausalLM.from_pretrained({str(folder / "model")!r}, trust_remote_code=True).train()
        ids = torch.tensor({ids.tolist()})
        loss = model(ids, labels=ids).loss
        loss.backward()
        print(json.dumps([isinstance(model, GenerationMixin), hasattr(model, "prepare_inputs_for_generation"),
                          bool(loss.isfinite())]))
        """,
        folder / "cache",
    )
    assert result == [True, True, True]

"""`retrofit heal` for Maglev targets: what trains, what the loss is, that the deployed decoder comes nearer to the source."""

import json
import sys

import pytest
import torch
from fresh_process import in_fresh_process
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from small_sources import make_source
from transformers import AutoModelForCausalLM, AutoModelForPreTraining, AutoTokenizer
from typer.testing import CliRunner

from conversion import HealOptions, MaglevOptions, RetrofitError, convert, heal
from conversion.cli import app
from conversion.heal import DISTILL, STATE_FILE, Healing, distill, make_teacher
from conversion.heal_recipes import MaglevRecipe
from conversion.source import open_source
from conversion.texts import read_pieces
from maglev_hf import GrowingSweeps, MaglevForCausalLM

HEAL = sys.modules["conversion.heal"]  # `conversion.heal` is the function
W, LENGTH = 6, 32
OPTIONS = HealOptions(
    length=LENGTH, steps=10, rank=4, lr=1e-2, new_lr=1e-2, sweeps=3, held_out=2, save_every=4, device="cpu"
)
KINDS = pytest.mark.parametrize("target", ["separate", "shared"])
TRAINS = pytest.mark.parametrize("train", ["lora", "full"])


def letters(count):
    return "".join(chr(97 + i) for i in torch.randint(26, (count,), generator=torch.Generator().manual_seed(0)))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A source, a Maglev model of either kind made from it, text. Nobody writes here."""
    folder = tmp_path_factory.mktemp("heal")
    make_source(folder / "source")
    for name, shares in (("separate", False), ("shared", True)):
        convert(folder / "source", folder / name, MaglevOptions(window=W, share_prefiller=shares))
    (folder / "text.txt").write_text(letters(400))
    return folder


@pytest.fixture(autouse=True)
def no_plots(monkeypatch):
    """Plots take longer than the training here; `healed`, which lives longer than this fixture, has one."""
    monkeypatch.setattr(HEAL, "plot", lambda report, path: path.touch())


@pytest.fixture
def arguments(made, tmp_path):
    return [made / "separate", made / "source", [made / "text.txt"], tmp_path / "healed"]


@pytest.fixture(scope="module")
def healed(made, tmp_path_factory):
    """A finished run: its report and its folder."""
    output = tmp_path_factory.mktemp("healed") / "model"
    return heal(made / "separate", made / "source", [made / "text.txt"], output, OPTIONS, command="the command"), output


def loaded_pair(made, target, train="lora"):
    student = AutoModelForPreTraining.from_pretrained(made / target)
    with open_source(made / "source", made / "elsewhere") as source:
        return student, make_teacher(source, student, shares=MaglevRecipe(student.config).keeps_them(train))


def prepared(made, target, **options):
    """A run at the first step with a sweep over the decoder's own memories."""
    student, teacher = loaded_pair(made, target, options.get("train", "lora"))
    pieces = read_pieces(AutoTokenizer.from_pretrained(made / target), [made / "text.txt"], LENGTH, 2)
    run = Healing(student, teacher, pieces, HealOptions(**{**vars(OPTIONS), **options}))
    run._prepare(DISTILL)
    run._set_rates(1.0)
    drawn = [GrowingSweeps(3).draw(step, run.options.steps, run.options.seed) for step in range(run.options.steps)]
    run.step = next(step for step, sweeps in enumerate(drawn) if sweeps)
    return run


def random_batch(length=LENGTH, batch=2):
    return torch.randint(4, 40, (batch, length), generator=torch.Generator().manual_seed(1))


def losses(report):
    return [entry["loss"] for entry in report["log"]]


def divergence(logits, wanted):
    """KL(teacher || student), the mean beyond the window."""
    logits, wanted = (part[:, W:-1].log_softmax(-1) for part in (logits, wanted))
    return (wanted.exp() * (wanted - logits)).sum(-1).mean().item()


def logits_of(model, ids, **how):
    with torch.no_grad():
        return model.eval()(ids, use_cache=False, **how).logits


@pytest.mark.parametrize("target, train", [("separate", "lora"), ("separate", "full"), ("shared", "lora")])
def test_the_deployed_decoder_comes_nearer_to_its_teacher_and_by_its_memory(made, tmp_path, target, train):
    # Held-out pieces are like those trained on, since what a random model does with one text says nothing of another.
    (tmp_path / "same.txt").write_text(letters(LENGTH) * 10)
    options = HealOptions(**{**vars(OPTIONS), "steps": 20, "train": train, "lr": 1e-2 if train == "lora" else 2e-3})
    report = heal(made / target, made / "source", [tmp_path / "same.txt"], tmp_path / "healed", options)
    before, after = report["before"], report["after"]
    assert after["divergence"] < 0.3 * before["divergence"] and after["teacher_loss"] == before["teacher_loss"]

    tokenizer = AutoTokenizer.from_pretrained(made / "source")
    ids = read_pieces(tokenizer, [tmp_path / "same.txt"], LENGTH, 2).held_out
    wanted = logits_of(AutoModelForCausalLM.from_pretrained(made / "source"), ids)
    found = []
    for injection in ("kv", "none"):
        decoder = MaglevForCausalLM.from_pretrained(tmp_path / "healed", memory_injection=injection)
        found.append(divergence(logits_of(decoder, ids), wanted))
    assert found[0] == pytest.approx(after["divergence"], rel=1e-3)  # merged, and another order of sums
    assert found[1] > 2 * found[0]


@KINDS
def test_what_is_measured_is_the_decoder_that_reads_its_own_memories(made, target):
    run = prepared(made, target)
    for name, parameter in run.trained.items():
        if ".memory." in name:  # otherwise it does nothing yet
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    found, ids = run.measure(), run.pieces.held_out
    logits, wanted = logits_of(run.student, ids, rollout="sequential"), logits_of(run.teacher, ids)
    text_loss = torch.nn.functional.cross_entropy(logits[:, W:-1].flatten(0, 1), ids[:, W + 1 :].flatten())
    # memories are searched for to 1e-4
    assert found["divergence"] == pytest.approx(divergence(logits, wanted), rel=1e-3)
    assert found["loss"] == pytest.approx(text_loss.item(), rel=1e-3)
    forced = logits_of(run.student, ids, rollout="teacher_forced")
    assert found["divergence"] != pytest.approx(divergence(forced, wanted), rel=1e-2)


@KINDS
def test_the_teacher_computes_what_the_source_computes_and_shares_its_weights_with_the_student(made, target):
    student, teacher = loaded_pair(made, target)
    ids = random_batch()
    expected = logits_of(AutoModelForCausalLM.from_pretrained(made / "source"), ids)
    # float32, another order of the same operations
    torch.testing.assert_close(logits_of(teacher, ids), expected, atol=1e-4, rtol=1e-4)
    own = MaglevRecipe(student.config).tensors_of_teacher(student)
    for name, parameter in teacher.named_parameters():
        assert parameter.data_ptr() == own[name].data_ptr(), name


def test_a_teacher_has_its_own_weights_where_the_students_are_trained(made):
    student, teacher = loaded_pair(made, "shared", "full")
    trained = {parameter.data_ptr() for parameter in student.parameters()}
    assert not trained & {parameter.data_ptr() for parameter in teacher.parameters()}
    student, teacher = loaded_pair(made, "separate", "full")
    decoder = {parameter.data_ptr() for parameter in student.model.layers.parameters()}
    assert not decoder & {parameter.data_ptr() for parameter in teacher.parameters()}


@TRAINS
@KINDS
def test_at_the_first_step_the_student_is_the_target_and_only_what_should_train_moves(made, target, train):
    ids = random_batch()
    expected = logits_of(AutoModelForPreTraining.from_pretrained(made / target), ids)
    run = prepared(made, target, train=train)
    before = {name: weight.clone() for name, weight in run.student.state_dict().items()}
    told = logits_of(run.teacher, ids)
    assert torch.equal(logits_of(run.student, ids), expected)
    run.student.train()
    for _ in range(3):
        run.optimizer.zero_grad()
        run._accumulate(DISTILL)
        run.optimizer.step()
        run.step += 1
    moved = {name for name, weight in run.student.state_dict().items() if not torch.equal(weight, before[name])}
    decoder = {name for name in before if name.startswith(("model.layers.", "model.norm."))}
    adapter = {name for name in decoder if ".memory." in name or name.endswith((".up", ".down"))}
    assert moved == (decoder if train == "full" else adapter)
    assert torch.equal(logits_of(run.teacher, ids), told)
    assert run.student.config.self_feeding_sweeps == 0


@TRAINS
@KINDS
def test_the_distillation_is_the_divergence_and_the_consistency_of_training(made, monkeypatch, target, train):
    monkeypatch.setattr(HEAL, "POSITIONS", 7)  # neither the length nor the window is a multiple
    run = prepared(made, target, train=train)
    student, ids = run.student, random_batch()
    student.config.self_feeding_sweeps = 2
    for parameter in run.trained.values():
        parameter.data += 0.01
    made_of = student(ids, labels=ids)
    wanted = logits_of(run.teacher, ids).log_softmax(-1)
    apart = (wanted.exp() * (wanted - made_of.logits.log_softmax(-1))).sum(-1).mean()
    text = torch.nn.functional.cross_entropy(made_of.logits[:, W:-1].flatten(0, 1), ids[:, W + 1 :].flatten())
    expected = apart + 0.5 * text + student.config.consistency_weight * made_of.consistency_loss
    expected.backward()
    gradients = {name: weight.grad.clone() for name, weight in run.trained.items()}
    student.zero_grad()
    # float32 sums in another order
    assert distill(student, run.teacher, ids, 0.5, 1.0) == pytest.approx(expected.item(), rel=1e-5)
    for name, weight in run.trained.items():
        torch.testing.assert_close(weight.grad, gradients[name], rtol=1e-3, atol=1e-5)


@KINDS
def test_batches_one_after_the_other_are_one_large_batch(made, target):
    found = []
    for size, accumulate in ((4, 1), (1, 4)):
        run = prepared(made, target, batch_size=size, accumulate=accumulate)
        for parameter in run.trained.values():
            parameter.data += 0.01
        found.append([run._accumulate(DISTILL), {name: weight.grad for name, weight in run.trained.items()}])
    (loss, gradients), (other_loss, others) = found
    assert loss == pytest.approx(other_loss, rel=1e-5)  # float32 sums in another order
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("step", [5, 8])
def test_an_interrupted_run_has_the_losses_of_an_uninterrupted_one(arguments, healed, step):
    def interrupt(done, total, what):
        if done == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        heal(*arguments, OPTIONS, on_step=interrupt)
    assert torch.load(arguments[-1].with_name("healed.incomplete") / STATE_FILE, weights_only=True)["step"] == step
    seen = []
    report = heal(*arguments, OPTIONS, on_step=lambda done, total, what: seen.append(done))
    assert seen[0] == step + 1
    assert losses(report) == losses(healed[0])
    assert report["after"] == healed[0]["after"]
    found, expected = (load_file(folder / "model.safetensors") for folder in (arguments[-1], healed[1]))
    assert all(torch.equal(weight, expected[name]) for name, weight in found.items())


@pytest.mark.parametrize("changed", [dict(gradient_checkpointing=True), dict(dtype="bfloat16")], ids=str)
def test_checkpointing_of_layers_changes_nothing_and_bfloat16_little(arguments, healed, changed):
    report = heal(*arguments, HealOptions(**{**vars(OPTIONS), **changed}))
    # float32: the same operations, once more; bfloat16: 8 bits of mantissa in every activation
    steps, close = (1, 0.1) if "dtype" in changed else (10, 1e-4)
    assert losses(report)[:steps] == pytest.approx(losses(healed[0])[:steps], rel=close)


def test_the_healed_folder_is_like_the_target_and_its_decoder_loads_alone(made, healed, tmp_path):
    report, output = healed
    assert report == json.loads((output / "heal.json").read_text())
    assert report["options"]["transfer_steps"] == 0 and report["window"] == W
    assert (output / "heal.png").stat().st_size > 10_000
    names = {path.name for path in output.iterdir()}
    assert names == {path.name for path in (made / "separate").iterdir()} | {"heal.json", "heal.png"}
    configs = [json.loads((folder / "config.json").read_text()) for folder in (output, made / "separate")]
    assert configs[0] == configs[1]
    weights, before = (load_file(folder / "model.safetensors") for folder in (output, made / "separate"))
    assert set(weights) == set(before)
    moved = {name for name in weights if not torch.equal(weights[name], before[name])}
    assert moved == {name for name in weights if name.startswith("model.layers.") and ".self_attn." in name}

    model = AutoModelForPreTraining.from_pretrained(output)
    assert model.train()(random_batch(), labels=random_batch()).loss.requires_grad  # training can go on
    model.eval().export_decoder(tmp_path / "deployed")
    (tmp_path / "cache").mkdir()
    ids = random_batch(30, 1)
    expected = AutoModelForCausalLM.from_pretrained(output).generate(ids, max_new_tokens=10, do_sample=False).tolist()
    tokens = in_fresh_process(
        f"""
        made = []
        for folder in {[str(output), str(tmp_path / "deployed")]!r}:
            model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
            made.append(model.generate(torch.tensor({ids.tolist()}), max_new_tokens=10, do_sample=False).tolist())
        print(json.dumps(made))
        """,
        tmp_path / "cache",
    )
    assert tokens == [expected, expected]


def test_the_card_says_how_it_was_healed_and_how_to_go_on(healed):
    report, output = healed
    card = ModelCard.load(output / "README.md")
    text = " ".join(card.text.split())
    assert card.data.license == "apache-2.0" and "maglev" in card.data.tags
    for words in (
        "**healed**",
        "10 steps of distillation, 320 tokens in pieces of 32",
        "LoRA of rank 4 on q, k, v and o, merged, and the memory's projections and gates",
        "1 times the distance between memories and the prefiller's targets",
        "up to 3 further passes",
        "as it is deployed",
        f"| loss | {report['before']['loss']:.4f} | {report['after']['loss']:.4f} | {report['after']['teacher_loss']:.4f} |",
        "## Train it further",
        "`export_decoder` writes",
        "conversion.convert(",
        "the command",
    ):
        assert words in text, words
    assert "not trained yet" not in text and "Once trained" not in text and "KVM" not in text and "{" not in text


@pytest.mark.parametrize(
    "fields, words",
    [
        (dict(length=W + 1), f"`--length {W + 1}` does not reach beyond the window of {W}"),
        (dict(transfer_steps=6), "`--transfer-steps 6` is for KVM models"),
        (dict(sweeps=-1), "`--sweeps` must be 0 or more, got -1"),
        (dict(new_lr=0.0), "`--new-lr` must be a rate between 0 and 1"),
    ],
)
def test_options_that_cannot_be_are_named(arguments, fields, words):
    with pytest.raises(RetrofitError, match=words):
        heal(*arguments, HealOptions(**{**vars(OPTIONS), **fields}))


@pytest.mark.parametrize(
    "family, fields, words",
    [
        ("llama", dict(vocab_size=60), "`vocab_size` is 60 in the teacher .*`retrofit to-maglev` was run on"),
        ("mistral", dict(sliding_window=W), "`prefiller_layer_types` is"),
        ("qwen3", {}, "qwen3 model cannot become a Maglev model"),
    ],
)
def test_a_teacher_that_the_target_was_not_made_from_is_refused(arguments, tmp_path, family, fields, words):
    arguments[1] = make_source(tmp_path / "other", family, **fields)
    with pytest.raises(RetrofitError, match=words):
        heal(*arguments, OPTIONS)


def test_a_decoder_without_its_prefiller_is_refused(arguments, tmp_path):
    AutoModelForPreTraining.from_pretrained(arguments[0]).export_decoder(tmp_path / "deployed")
    arguments[0] = tmp_path / "deployed"
    with pytest.raises(RetrofitError, match="has no prefiller to train with"):
        heal(*arguments, OPTIONS)


def test_the_command_heals_with_defaults_of_its_own(made, tmp_path):
    words = ["heal", str(made / "shared"), "--teacher", str(made / "source"), "--text", str(made / "text.txt")]
    words += ["--output", str(tmp_path / "healed"), "--length", str(LENGTH), "--steps", "2"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "divergence from the teacher" in result.output
    options = json.loads((tmp_path / "healed" / "heal.json").read_text())["options"]
    assert [options[name] for name in ("transfer_steps", "sweeps", "new_lr")] == [0, 8, 1e-4]

"""`retrofit heal`: what trains, what stays, that it helps, that it can be interrupted, and what it refuses."""

import json
import math
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from fresh_process import in_fresh_process
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from small_sources import change_config, make_source
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from conversion import HealOptions, RetrofitError, RetrofitOptions, convert, heal
from conversion.cli import app
from conversion.heal import DISTILL, STATE_FILE, TRANSFER, Healing, distill, make_teacher, transfer
from conversion.source import open_source
from conversion.texts import documents, read_pieces
from kvm_hf import KVMForCausalLM

HEAL = sys.modules["conversion.heal"]  # `conversion.heal` is the function
RETROFIT = RetrofitOptions(chunk_size=4, window_chunks=2, sinks=1, growth=2.0)
OPTIONS = HealOptions(
    length=40, transfer_steps=6, steps=20, rank=4, transfer_lr=1e-2, lr=1e-2, held_out=2, save_every=4, device="cpu"
)


def letters(count, seed=0):
    return "".join(chr(97 + i) for i in torch.randint(26, (count,), generator=torch.Generator().manual_seed(seed)))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A source, the KVM model made from it, text. Nobody writes here."""
    folder = tmp_path_factory.mktemp("heal")
    make_source(folder / "source")
    convert(folder / "source", folder / "target", RETROFIT)
    (folder / "text.txt").write_text(letters(900))
    return folder


@pytest.fixture(autouse=True)
def no_plots(monkeypatch):
    """Plots take longer than the training here; `healed`, which lives longer than this fixture, has one."""
    monkeypatch.setattr(HEAL, "plot", lambda report, path: path.touch())


@pytest.fixture
def arguments(made, tmp_path):
    return [made / "target", made / "source", [made / "text.txt"], tmp_path / "healed"]


@pytest.fixture(scope="module")
def healed(made, tmp_path_factory):
    """A finished run: its report and its folder."""
    output = tmp_path_factory.mktemp("healed") / "model"
    return heal(made / "target", made / "source", [made / "text.txt"], output, OPTIONS, command="the command"), output


def loaded_pair(made, train="lora"):
    student = AutoModelForCausalLM.from_pretrained(made / "target")
    with open_source(made / "source", made / "elsewhere") as source:
        return student, make_teacher(source, student, shares=train == "lora")


def random_batch(length=40, batch=2):
    return torch.randint(4, 40, (batch, length), generator=torch.Generator().manual_seed(1))


def losses(report):
    return [entry["loss"] for entry in report["log"]]


def logits_of(model, ids):
    with torch.no_grad():
        return model(ids, use_cache=False).logits


@pytest.mark.parametrize("train", ["lora", "full"])
def test_the_student_comes_nearer_to_its_teacher(arguments, tmp_path, train):
    # Held-out pieces are like those trained on, since what a random model does with one text says nothing of another.
    (tmp_path / "same.txt").write_text(letters(40) * 10)
    arguments[2] = [tmp_path / "same.txt"]
    rates = dict(transfer_lr=1e-2, lr=1e-2) if train == "lora" else dict(transfer_lr=2e-3, lr=2e-3)
    report = heal(*arguments, HealOptions(length=40, transfer_steps=10, steps=20, train=train, device="cpu", **rates))
    assert report["after"]["divergence"] < 0.5 * report["before"]["divergence"]
    assert report["after"]["teacher_loss"] == report["before"]["teacher_loss"]
    for stage, steps in ((TRANSFER, 10), (DISTILL, 20)):
        of_stage = [entry["loss"] for entry in report["log"] if entry["stage"] == stage]
        assert len(of_stage) == steps
        assert of_stage[-1] < 0.6 * of_stage[0], stage


@pytest.mark.parametrize("family", ["llama-bias-tied", "qwen2", "qwen3", "smollm3", "phi3"])
def test_the_teacher_computes_what_the_source_computes_and_shares_its_weights_with_the_student(tmp_path, family):
    make_source(tmp_path / "source", family)
    convert(tmp_path / "source", tmp_path / "target", RETROFIT)
    student, teacher = loaded_pair(tmp_path)
    ids = random_batch()
    expected = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "source"), ids)
    # float32, another order of the same operations
    torch.testing.assert_close(logits_of(teacher, ids), expected, atol=1e-4, rtol=1e-4)
    own = dict(student.named_parameters())
    for name, parameter in teacher.named_parameters():
        assert parameter.data_ptr() == own[name].data_ptr(), name


def test_a_teacher_whose_weights_the_student_no_longer_has_keeps_its_own(made, healed):
    _, output = healed
    student = AutoModelForCausalLM.from_pretrained(output)
    with open_source(made / "source", made / "elsewhere") as source:
        teacher = make_teacher(source, student, shares=True)
    ids = random_batch()
    expected = logits_of(AutoModelForCausalLM.from_pretrained(made / "source"), ids)
    torch.testing.assert_close(logits_of(teacher, ids), expected, atol=1e-4, rtol=1e-4)
    own = dict(student.named_parameters())
    shared = {name for name, weight in teacher.named_parameters() if weight.data_ptr() == own[name].data_ptr()}
    assert all(("self_attn" in name) == (name not in shared) for name in own if "temperature" not in name)


@pytest.mark.parametrize("stage", [TRANSFER, DISTILL])
def test_at_the_first_step_the_student_is_the_target_and_without_its_adapter_it_remains_it(made, stage):
    student, teacher = loaded_pair(made)
    before = {name: weight.clone() for name, weight in student.state_dict().items()}
    ids = random_batch()
    expected = logits_of(student, ids)
    pieces = read_pieces(tokenizer_of(made), [made / "text.txt"], 40, 2)
    run = Healing(student, teacher, pieces, OPTIONS)
    assert torch.equal(logits_of(student, ids), expected)
    run._prepare(stage)
    run._set_rates(1.0)
    for run.step in range(3):
        run.optimizer.zero_grad()
        run._accumulate(stage)
        run.optimizer.step()
    assert not torch.allclose(logits_of(student, ids), expected, atol=1e-3)
    after = {name.replace(".base.", "."): weight for name, weight in student.state_dict().items()}
    moved = {name for name, weight in before.items() if not torch.equal(after[name], weight)}
    assert moved and all(name.endswith("temperature") for name in moved)  # the rest of what trains is the adapter
    for name, parameter in student.named_parameters():
        if name.endswith("temperature"):
            parameter.data.fill_(1.0)
        elif name.endswith(".up"):
            parameter.data.zero_()
    assert torch.equal(logits_of(student, ids), expected)


def test_the_transfer_trains_the_attention_of_converted_layers_and_nothing_else(made):
    student, teacher = loaded_pair(made, "full")
    before = {name: weight.clone() for name, weight in student.state_dict().items()}
    told = {name: weight.clone() for name, weight in teacher.state_dict().items()}
    run = Healing(student, teacher, None, HealOptions(length=40, train="full", device="cpu"))
    run._prepare(TRANSFER)
    run._set_rates(1.0)
    transfer(student, teacher, random_batch(), 1.0)
    run.optimizer.step()
    moved = {name for name, weight in student.state_dict().items() if not torch.equal(before[name], weight)}
    assert moved == {name for name in before if ".self_attn." in name}
    assert all(torch.equal(weight, told[name]) for name, weight in teacher.state_dict().items())


def test_the_transfer_is_the_error_of_each_layer_on_the_teachers_hidden_states(made):
    student, teacher = loaded_pair(made)
    student.requires_grad_(True)
    ids = random_batch()
    seen = []
    hooks = [
        layer.self_attn.register_forward_hook(
            lambda module, args, kwargs, output: seen.append((args, kwargs, output[0])),
            with_kwargs=True,
        )
        for layer in teacher.model.layers
    ]
    logits_of(teacher, ids)
    for hook in hooks:
        hook.remove()
    expected = []
    for layer, (args, kwargs, wanted) in zip(student.model.layers, seen):
        found = layer.self_attn(*args, **kwargs)[0]
        assert torch.allclose(found[:, :8], wanted[:, :8], atol=1e-5)  # within the window nothing differs
        expected.append(((found - wanted).pow(2).mean((1, 2)) / wanted.flatten(1).var(1)).mean())
    torch.stack(expected).mean().backward()
    gradients = {name: weight.grad.clone() for name, weight in student.named_parameters() if weight.grad is not None}
    student.zero_grad()
    # float32 sums in another order
    assert transfer(student, teacher, ids, 1.0) == pytest.approx(torch.stack(expected).mean().item(), rel=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(dict(student.named_parameters())[name].grad, gradient, rtol=1e-4, atol=1e-6)


def test_the_distillation_is_the_divergence_and_the_cross_entropy_beyond_the_window(made, monkeypatch):
    monkeypatch.setattr(HEAL, "POSITIONS", 7)  # neither the length nor the window is a multiple
    student, teacher = loaded_pair(made, "full")
    student.requires_grad_(True)
    ids = random_batch()
    logits, wanted = student(ids, use_cache=False).logits, logits_of(teacher, ids)
    divergence = (wanted.softmax(-1) * (wanted.log_softmax(-1) - logits.log_softmax(-1))).sum(-1).mean()
    text = torch.nn.functional.cross_entropy(logits[:, 8:-1].flatten(0, 1), ids[:, 9:].flatten())
    (divergence + 0.5 * text).backward()
    gradients = {name: weight.grad.clone() for name, weight in student.named_parameters()}
    student.zero_grad()
    # float32 sums in another order
    assert distill(student, teacher, ids, 0.5, 1.0) == pytest.approx((divergence + 0.5 * text).item(), rel=1e-5)
    for name, weight in student.named_parameters():
        torch.testing.assert_close(weight.grad, gradients[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("stage", [TRANSFER, DISTILL])
def test_batches_one_after_the_other_are_one_large_batch(made, stage):
    found = []
    for size, accumulate in ((4, 1), (1, 4)):
        student, teacher = loaded_pair(made)
        pieces = read_pieces(tokenizer_of(made), [made / "text.txt"], 40, 2)
        run = Healing(
            student, teacher, pieces, HealOptions(length=40, batch_size=size, accumulate=accumulate, device="cpu")
        )
        run._prepare(stage)
        for parameter in run.trained.values():
            parameter.data += 0.01
        found.append([run._accumulate(stage), {name: weight.grad for name, weight in run.trained.items()}])
    (loss, gradients), (other_loss, others) = found
    assert loss == pytest.approx(other_loss, rel=1e-5)  # float32 sums in another order
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-3, atol=1e-6)


def test_checkpointing_of_layers_changes_nothing(arguments, healed):
    options = HealOptions(**{**vars(OPTIONS), "gradient_checkpointing": True})
    # float32: the same operations, once more
    assert losses(heal(*arguments, options)) == pytest.approx(losses(healed[0]), rel=1e-5)


def test_bfloat16_is_near(arguments, healed):
    report = heal(*arguments, HealOptions(**{**vars(OPTIONS), "dtype": "bfloat16"}))
    # 8 bits of mantissa in every activation
    assert losses(report)[0] == pytest.approx(losses(healed[0])[0], rel=0.2)


PLACES = {"within a step": (Healing, "_accumulate"), "within an update": (torch.optim.AdamW, "step")}


def interrupt_at(step, where="after a step", patch=None):
    """Interrupts as Ctrl-C does, once `step` steps are done."""

    def on_step(done, total, what):
        if done == step and what != "measuring":
            if where == "after a step":
                raise KeyboardInterrupt
            owner, name = PLACES[where]
            plain = getattr(owner, name)
            patch.setattr(owner, name, lambda *args, **kwargs: (plain(*args, **kwargs), throw(KeyboardInterrupt)))

    return on_step


def throw(exception):
    raise exception


@pytest.mark.parametrize(
    "where, step, first",
    [
        ("after a step", 9, 10),
        ("after a step", 6, 7),  # between the stages
        ("within a step", 3, 4),
        ("within a step", 13, 14),
        ("within an update", 13, 13),  # then only what was saved after 12 is whole
        ("within an update", 6, 5),
    ],
)
def test_an_interrupted_run_has_the_losses_of_an_uninterrupted_one(arguments, healed, monkeypatch, where, step, first):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        heal(*arguments, OPTIONS, on_step=interrupt_at(step, where, patch))
    assert not arguments[-1].exists()
    seen = []
    report = heal(*arguments, OPTIONS, on_step=lambda done, total, what: seen.append(done))
    assert seen[0] == first
    assert losses(report) == losses(healed[0])
    assert report["after"] == healed[0]["after"]
    found, expected = (load_file(folder / "model.safetensors") for folder in (arguments[-1], healed[1]))
    assert all(torch.equal(weight, expected[name]) for name, weight in found.items())


def test_a_run_that_is_killed_goes_on_from_its_last_save(arguments, healed):
    target, source, texts, output = map(str, [*arguments[:2], arguments[2][0], arguments[3]])
    script = (
        "import os, signal, sys; from pathlib import Path; import torch; torch.set_num_threads(1)\n"
        "from conversion import HealOptions, heal\n"
        f"heal({target!r}, {source!r}, [Path({texts!r})], {output!r}, HealOptions(**{vars(OPTIONS)!r}),\n"
        "    on_step=lambda done, total, what: done == 11 and os.kill(os.getpid(), signal.SIGKILL))"
    )
    assert subprocess.run([sys.executable, "-c", script], stderr=subprocess.DEVNULL).returncode == -signal.SIGKILL
    seen = []
    report = heal(*arguments, OPTIONS, on_step=lambda done, total, what: seen.append(done))
    assert seen[0] == 9  # it was saved after 8
    # another process may order float32 sums differently
    assert losses(report) == pytest.approx(losses(healed[0]), rel=1e-5)


def test_ctrl_c_saves_and_says_how_to_go_on(arguments):
    target, source, texts, output = map(str, [*arguments[:2], arguments[2][0], arguments[3]])
    command = [sys.executable, "-c", "from conversion.cli import app; app()", "heal", target, "--teacher", source]
    command += ["--text", texts, "--output", output, "--length", "40", "--steps", "5000", "--save-every", "100000"]
    # Where the tests run in the background, as some shells start them, their children would be deaf to it.
    listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=listen)
    state = arguments[-1].with_name("healed.incomplete") / STATE_FILE
    shown = ""
    while "loss" not in shown and process.poll() is None:  # of the first step
        shown += process.stderr.read(1)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert "Run the same command again" in process.stderr.read()
    assert torch.load(state, weights_only=True)["step"] > 0


def test_another_run_is_not_mixed_with_an_interrupted_one(arguments):
    with pytest.raises(KeyboardInterrupt):
        heal(*arguments, OPTIONS, on_step=interrupt_at(5))
    with pytest.raises(RetrofitError, match=r"step 5 of a run that differs in: lr \(0.01 there\)"):
        heal(*arguments, HealOptions(**{**vars(OPTIONS), "lr": 0.5}))
    heal(*arguments, HealOptions(**{**vars(OPTIONS), "save_every": 1}))


def test_the_healed_folder_is_like_the_target_and_loads_alone(made, healed, tmp_path):
    report, output = healed
    assert report == json.loads((output / "heal.json").read_text())
    assert (output / "heal.png").stat().st_size > 10_000
    names = {path.name for path in output.iterdir()}
    assert names == {path.name for path in (made / "target").iterdir()} | {"heal.json", "heal.png"}
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "LICENSE"):
        assert (output / name).read_bytes() == (made / "target" / name).read_bytes(), name
    configs = [json.loads((folder / "config.json").read_text()) for folder in (output, made / "target")]
    assert configs[0] == configs[1]
    assert not list(output.parent.glob("*.incomplete"))

    (tmp_path / "cache").mkdir()
    ids = random_batch(30, 1)
    tokens, module = in_fresh_process(
        f"""
        model = AutoModelForCausalLM.from_pretrained({str(output)!r}, trust_remote_code=True)
        new = model.generate(torch.tensor({ids.tolist()}), max_new_tokens=10, do_sample=False)
        print(json.dumps([new.tolist(), type(model).__module__]))
        """,
        tmp_path / "cache",
    )
    local = AutoModelForCausalLM.from_pretrained(output)
    assert tokens == local.generate(ids, max_new_tokens=10, do_sample=False).tolist()
    assert module.startswith("transformers_modules")


def test_the_merged_model_is_the_trained_one(made):
    student, teacher = loaded_pair(made)
    run = Healing(student, teacher, read_pieces(tokenizer_of(made), [made / "text.txt"], 40, 2), OPTIONS)
    for parameter in run.trained.values():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    ids = random_batch()
    expected, told = logits_of(student, ids), logits_of(teacher, ids)
    merged = run.merge()
    # float32: a product of two matrices instead of two products
    torch.testing.assert_close(logits_of(merged, ids), expected, atol=1e-3, rtol=1e-3)
    assert torch.equal(logits_of(teacher, ids), told)
    assert set(merged.state_dict()) == set(KVMForCausalLM(merged.config).state_dict())


def test_weights_keep_the_dtype_of_the_target(made, tmp_path):
    convert(made / "source", tmp_path / "target", RetrofitOptions(**{**vars(RETROFIT), "dtype": "bfloat16"}))
    before = load_file(tmp_path / "target" / "model.safetensors")
    options = HealOptions(length=40, transfer_steps=0, steps=2, device="cpu")
    heal(tmp_path / "target", made / "source", [made / "text.txt"], options=options)
    after = load_file(tmp_path / "target-healed" / "model.safetensors")
    assert {weight.dtype for weight in after.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "target-healed" / "config.json").read_text())["dtype"] == "bfloat16"
    assert all(torch.equal(after[name], before[name]) for name in before if "self_attn" not in name)


def test_the_card_says_what_was_healed_on_and_what_it_did(healed):
    report, output = healed
    card = ModelCard.load(output / "README.md")
    text = card.text.replace("\n", " ")
    assert card.data.license == "apache-2.0" and "kvm" in card.data.tags and "datasets" not in card.data.to_dict()
    for words in (
        "**healed**",
        "6 steps of attention transfer and 20 steps of distillation, 1040 tokens in pieces of 40",
        "text.txt (901 tokens)",
        "2 pieces of 40 tokens",
        f"| loss | {report['before']['loss']:.4f} | {report['after']['loss']:.4f} | {report['after']['teacher_loss']:.4f} |",
        "conversion.convert(",
        "the command",
    ):
        assert words in text, words
    assert "nothing was trained" not in text and "computes what the source computes" not in text


def test_jsonl_and_text_are_packed_in_order_with_ends_between(made, tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "b.jsonl").write_text('{"text": "de", "id": 1}\n\n{"text": "fghi"}\n')
    pieces = read_pieces(tokenizer_of(made), [tmp_path / "a.txt", tmp_path / "b.jsonl"], 4, 1)
    tokens = torch.cat([pieces.train, pieces.held_out]).sort(dim=0).values.flatten().tolist()
    expected = [4, 5, 6, 2, 7, 8, 2, 9, 10, 11, 12, 2]  # a is token 4, the end of a text token 2
    assert sorted(tokens) == sorted(expected)
    assert pieces.held_out.tolist() == [[7, 8, 2, 9]]
    assert pieces.tokens == {str(tmp_path / "a.txt"): 4, str(tmp_path / "b.jsonl"): 8}


def test_parquet_is_read_through_datasets(made, tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["abc", "defg"], "other": [1, 2]}).to_parquet(tmp_path / "a.parquet")
    pieces = read_pieces(tokenizer_of(made), [tmp_path / "a.parquet"], 3, 1)
    assert sorted(torch.cat([pieces.train, pieces.held_out]).flatten().tolist()) == [2, 2, 4, 5, 6, 7, 8, 9, 10]


def test_without_datasets_parquet_is_refused_in_a_sentence(made, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RetrofitError, match="pip install datasets"):
        read_pieces(tokenizer_of(made), [tmp_path / "a.parquet"], 3, 1)


def test_every_round_sees_every_piece_once_in_an_order_that_the_seed_decides(made):
    pieces = read_pieces(tokenizer_of(made), [made / "text.txt"], 40, 2)
    count = len(pieces.train)
    rounds = [
        [tuple(pieces.batch(number, 1, seed=3)[0].tolist()) for number in range(first, first + count)]
        for first in (0, count)
    ]
    assert set(rounds[0]) == set(rounds[1]) == set(map(tuple, pieces.train.tolist()))
    assert rounds[0] != rounds[1]
    pairs = torch.cat([pieces.batch(number, 2, seed=3) for number in range(count)])
    assert pairs.tolist() == [list(piece) for piece in rounds[0] + rounds[1]]


@pytest.mark.parametrize(
    "prepare, words",
    [
        (lambda a, t: a[3].mkdir() or (a[3] / "something").touch(), "healed exists and is not an empty folder"),
        (lambda a, t: a[3].with_name("healed.incomplete").mkdir(), "exists and is not ours"),
        (lambda a, t: a.__setitem__(2, [t / "gone.txt"]), "gone.txt` cannot be read"),
        (
            lambda a, t: (t / "b.jsonl").write_text('{"body": "a"}') and a.__setitem__(2, [t / "b.jsonl"]),
            "line 1 of .*field `text`",
        ),
        (
            lambda a, t: (t / "b.txt").write_text("ab" * 20) and a.__setitem__(2, [t / "b.txt"]),
            "41 tokens; 120 are needed",
        ),
        (lambda a, t: a.__setitem__(0, a[1]), "llama model; `heal` takes what `retrofit to-kvm` made"),
        (lambda a, t: a.__setitem__(0, t / "gone"), "gone is not a model folder: there is none"),
        (lambda a, t: a.__setitem__(1, make_source(t / "other", vocab_size=60)), "`vocab_size` is 60 in the teacher"),
        (
            lambda a, t: a.__setitem__(1, make_source(t / "other", "qwen2")),
            "`attention_bias` is True in the teacher \\(qwen2",
        ),
        (lambda a, t: a.__setitem__(1, a[0]), "'kvm' cannot be converted"),
    ],
)
def test_what_cannot_work_is_refused_before_any_training(arguments, tmp_path, monkeypatch, prepare, words):
    monkeypatch.setattr(Healing, "__init__", None)
    prepare(arguments, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RetrofitError, match=words):
        heal(*arguments, OPTIONS)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_checkpoint_of_the_same_shape_that_the_target_was_not_made_from_is_refused(arguments, tmp_path):
    other = make_source(tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(other)
    model.model.embed_tokens.weight.data = weights["model.embed_tokens.weight"].flip(0)
    model.save_pretrained(other)
    arguments[1] = other
    with pytest.raises(RetrofitError, match="embeddings differ by"):
        heal(*arguments, OPTIONS)


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda f: (f / "tokenizer.json").write_text("{"), "target .* has no tokenizer that can be loaded"),
        (lambda f: (f / "model.safetensors").unlink(), "cannot be loaded: .*Convert it anew"),
        (lambda f: (f / "model.safetensors").write_bytes(b"short"), "cannot be loaded: .*Convert it anew"),
        (
            lambda f: change_weights(f, lambda weights: weights.pop("model.layers.0.self_attn.q_proj.weight")),
            "lacks weights: model.layers.0.self_attn.q_proj.weight",
        ),
        (
            lambda f: change_weights(f, lambda weights: weights["model.norm.weight"].fill_(float("nan"))),
            "loss is nan before anything was trained",
        ),
    ],
)
def test_a_damaged_target_is_refused_before_any_training(arguments, tmp_path, monkeypatch, change, words):
    monkeypatch.setattr(Healing, "_prepare", None)
    arguments[0] = shutil.copytree(arguments[0], tmp_path / "damaged")
    change(arguments[0])
    with pytest.raises(RetrofitError, match=words):
        heal(*arguments, OPTIONS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged"]


def test_reports_of_the_target_finished_or_not_stay_with_it(arguments, tmp_path):
    arguments[0] = shutil.copytree(arguments[0], tmp_path / "verified")
    for name in ("verify.json", "verify.partial.json", "verify.png", "notes.txt"):
        (arguments[0] / name).write_text("of the target")
    heal(*arguments, replace(OPTIONS, transfer_steps=0, steps=1))
    assert sorted(path.name for path in arguments[3].glob("[nv]*")) == ["notes.txt"]


def test_a_layer_whose_attention_gives_nothing_wants_nothing(tmp_path, arguments):
    source = make_source(tmp_path / "source")
    change_weights(source, lambda weights: weights["model.layers.1.self_attn.o_proj.weight"].zero_())
    convert(source, tmp_path / "target", RETROFIT)
    report = heal(tmp_path / "target", source, *arguments[2:], OPTIONS)
    assert all(map(math.isfinite, losses(report)))


def test_a_model_that_was_lost_in_the_last_step_is_not_written(arguments, tmp_path, monkeypatch):
    def measure(run, honest=Healing.measure):
        return honest(run) if run.step == 0 else {"divergence": 0.0, "loss": float("nan"), "teacher_loss": 1.0}

    monkeypatch.setattr(Healing, "measure", measure)
    with pytest.raises(RetrofitError, match=r"loss afterwards is nan. Remove .*healed.incomplete, and use smaller"):
        heal(*arguments, OPTIONS)
    assert not (tmp_path / "healed").exists()


@pytest.mark.parametrize("content", [b"", b"mine", {"a": 1}, [1]], ids=str)
def test_a_state_that_is_damaged_or_not_ours_is_refused(arguments, tmp_path, content):
    work = tmp_path / "healed.incomplete"
    work.mkdir()
    state = work / STATE_FILE
    state.write_bytes(content) if isinstance(content, bytes) else torch.save(content, state)
    before = state.read_bytes()
    with pytest.raises(RetrofitError, match=r"heal.pt cannot be read. Remove .*healed.incomplete to start anew"):
        heal(*arguments, OPTIONS)
    assert state.read_bytes() == before


def test_an_output_below_a_file_is_refused(arguments):
    arguments[3] = arguments[2][0] / "healed"
    with pytest.raises(RetrofitError, match=r"cannot be made: .*text.txt is no folder"):
        heal(*arguments, OPTIONS)


def test_a_mark_at_the_beginning_capital_endings_and_halves_of_characters_are_read(tmp_path):
    file = tmp_path / "TEXT.JSONL"
    file.write_text('{"text": "one"}\n{"text": "t\\ud800wo"}\n', encoding="utf-8-sig")
    assert list(documents(file)) == ["one", "t\ufffdwo"]


def test_a_disk_that_is_too_full_is_noticed_before_any_training(arguments, monkeypatch):
    monkeypatch.setattr(Healing, "train", None)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(RetrofitError, match=r"has 0\.00 GB free"):
        heal(*arguments, OPTIONS)


def test_a_loss_that_is_no_number_ends_the_run_and_is_not_saved(arguments, tmp_path):
    def poison(done, total, what):
        if done == 5:
            monkey.setattr(HEAL, "transfer", lambda *args: float("nan"))

    with pytest.MonkeyPatch.context() as monkey, pytest.raises(RetrofitError, match="loss of step 5 is nan"):
        heal(*arguments, OPTIONS, on_step=poison)
    assert torch.load(tmp_path / "healed.incomplete" / STATE_FILE, weights_only=True)["step"] == 4


@pytest.mark.parametrize(
    "fields, words",
    [
        (dict(length=9), "`--length 9` does not reach beyond the window of 8"),
        (dict(length=12), "`--length 12` the state has a row for each token.* such as 32"),
        (dict(length=2000), "more than the teacher's 1024 positions"),
        (dict(sweeps=2), "`--sweeps 2` is for Maglev models"),
        (dict(steps=0), "`--steps` must be 1 or more, got 0"),
        (dict(lr=0.0), "`--lr` must be a rate between 0 and 1"),
        (dict(new_lr=1e38), "`--new-lr` must be a rate between 0 and 1"),
        (dict(seed=2**70), "`--seed` must be below"),
        (dict(cross_entropy=-1.0), "`--cross-entropy` must be 0 or more"),
        (dict(train="half"), "`--train` 'half' is not known; use lora or full"),
        (dict(dtype="float16"), "`--dtype` 'float16' is not known"),
    ],
)
def test_options_that_cannot_be_are_named(arguments, fields, words):
    with pytest.raises(RetrofitError, match=words):
        heal(*arguments, HealOptions(**{**vars(OPTIONS), **fields}))


def test_a_target_without_a_converted_layer_is_refused(arguments, tmp_path):
    plain = tmp_path / "plain"
    convert(arguments[1], plain, RETROFIT)
    change_config(plain, layer_types=["full_attention"] * 3)
    arguments[0] = plain
    with pytest.raises(RetrofitError, match="no `kvm_attention` layer"):
        heal(*arguments, OPTIONS)


def test_the_command_heals_and_prints_before_and_after(arguments):
    words = ["heal", str(arguments[0]), "--teacher", str(arguments[1]), "--text", str(arguments[2][0])]
    words += [
        "--output",
        str(arguments[3]),
        "--length",
        "40",
        "--transfer-steps",
        "1",
        "--steps",
        "2",
        "--train",
        "full",
    ]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "divergence from the teacher" in result.output
    assert json.loads((arguments[3] / "heal.json").read_text())["options"]["train"] == "full"
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 1 and "exists and is not an empty folder" in again.output.replace("\n", " ")


def tokenizer_of(folder):
    return AutoTokenizer.from_pretrained(folder / "target")

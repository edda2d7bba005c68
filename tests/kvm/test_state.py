"""The recurrence against the authors' code: states, outputs, gradients, budgets."""

import json

import pytest
import torch
from safetensors.torch import load_file
from small_models import DATA

from kvm_hf.attention_kvm import CausalMasks, attend
from kvm_hf.cache_kvm import KVMLayer, KVMStep
from kvm_hf.state_kvm import NormalizedKeys, StateRule, _are_lowest, _first_highest, budget, rows_after

STATE_UPDATE = DATA / "state_update"
MODES = json.loads((STATE_UPDATE / "meta.json").read_text())["modes"]


def rule_of(config: dict) -> StateRule:
    """The authors' settings in our names."""
    budgets = {"fixed": "fixed", "power_law": "power_law", "kvm_saturation": "saturation"}
    chunk = config["chunk_len"]
    return StateRule(
        chunk_size=chunk,
        num_window_chunks=config["n_bswa_chunks"],
        num_sink_tokens=config.get("sink_len", 1),
        state_budget=budgets[config["state_budget_mode"]],
        state_size=config["state_min_len"],
        state_growth_factor=config["state_growth_factor"],
        state_growth_exponent=config["state_growth_exponent"],
        state_saturation=config["state_saturation_n"],
        state_round_to=config["state_round_down"],
        state_max_size=chunk * config["n_max_d_chunks"],
        gate_keys=bool(config.get("kvm_use_merge_gate_keys", 1)),
        gate_values=bool(config.get("kvm_use_merge_gate_values", 1)),
        gate_appends=bool(config.get("kvm_apply_merge_gate_to_appends", 1)),
        gate_initial_state=bool(config.get("kvm_apply_merge_gate_to_initial_state", 0)),
        value_radius=bool(config.get("kvm_use_vlens", 1)),
        state_treatment="normalized",
        count_bias=0.0,
    )


class Head(torch.nn.Module):
    """As much of an attention module as `attend` asks for."""

    def __init__(self, dim):
        super().__init__()
        self.scaling, self.num_key_value_groups = dim**-0.5, 1
        self.config = type("Config", (), {"_attn_implementation": "sdpa"})


def run_recurrence(mode: str, sizes: list[int], inputs: dict[str, torch.Tensor]):
    """Feeds the golden inputs in pieces; returns outputs `[B, H, T, D]` and the state after every update."""
    config = MODES[mode]["config"]
    rule = rule_of(config)
    weight, bias = inputs["ln_s_k.weight"], inputs["ln_s_k.bias"]
    treatment = NormalizedKeys(
        lambda keys: torch.nn.functional.layer_norm(keys, weight.shape, weight, bias, 1e-5), config["rope_partial_dim"]
    )
    use_temperature = bool(config["kvm_use_head_temps"])
    window = inputs["front_head_temp"][:, None, None] if use_temperature else 1.0
    scale = inputs["state_head_temp"][:, None, None] / window if use_temperature else 1.0
    layer, outputs, states = KVMLayer(), [], []
    start = 0
    for size in sizes:
        piece = slice(start, start + size)
        positions = torch.arange(start, start + size).expand(2, -1)
        output, _ = layer.update(
            inputs["k"][:, :, piece],
            inputs["v"][:, :, piece],
            KVMStep(
                rule=rule,
                treatment=treatment,
                queries=inputs["q"][:, :, piece] * window,
                gates=inputs["merge_gate"][:, :, piece],
                positions=positions,
                state_scale=lambda: scale,
                takes_mask=True,
                attend=lambda *args: attend(Head(16), *args, dropout=0.0, masks=CausalMasks()),
            ),
        )
        if layer.state is not None and (not states or states[-1] is not layer.state):
            states.append(layer.state)
        outputs.append(output.transpose(1, 2))
        start += size
    return torch.cat(outputs, dim=2), states


def double(tensors):
    return {name: tensor.double() for name, tensor in tensors.items()}


def assert_close(actual, expected, relative=1e-6):
    """Relative to the largest entry; the data is float64 rounded to float32."""
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= relative * expected.abs().max()


@pytest.mark.parametrize("sizes", [[64], [1] * 64, [3, 5, 8, 1, 17, 30]], ids=["whole", "by-token", "ragged"])
@pytest.mark.parametrize("mode", sorted(set(MODES) - {"no_vlens"}))
def test_states_and_outputs_equal_the_authors(mode, sizes):
    golden = double(load_file(STATE_UPDATE / f"{mode}.safetensors"))
    outputs, states = run_recurrence(mode, sizes, double(load_file(STATE_UPDATE / "inputs.safetensors")))
    if "out" in golden:
        assert_close(outputs, golden["out"])
    else:
        assert_close(outputs[:, :, 40:], golden["out_tail"])
    if len(sizes) == 64 and "s_k.0" in golden:
        for index, state in enumerate(states):
            assert_close(state.key_sum, golden[f"s_k.{index}"])
            assert_close(state.value_sum, golden[f"s_v.{index}"])
            assert_close(state.radius, golden[f"s_vlen.{index}"])
    last = "final" if "s_k.final" in golden else max(name.split(".")[1] for name in golden if name.startswith("s_k."))
    assert_close(states[-1].key_sum, golden[f"s_k.{last}"])
    assert_close(states[-1].value_sum, golden[f"s_v.{last}"])
    assert_close(states[-1].radius, golden[f"s_vlen.{last}"])


def test_value_means_divide_by_the_tokens_in_the_row():
    """The authors' counter adds one to every row on every update (their fault); ours counts what joined the row."""
    inputs = double(load_file(STATE_UPDATE / "inputs.safetensors"))
    golden = double(load_file(STATE_UPDATE / "no_vlens.safetensors"))
    _, states = run_recurrence("no_vlens", [64], inputs)
    assert_close(states[-1].key_sum, golden["s_k.final"])  # the sums have no fault
    assert_close(states[-1].value_sum, golden["s_v.final"])
    assert states[-1].count.sum(2).eq(48).all()  # six blocks of eight tokens, each counted once
    assert states[-1].count[:, :, 0].eq(1).all()  # nothing joins a sink


def test_ties_go_to_the_lowest_row_and_the_first_tokens():
    noise = torch.tensor([0.0, 1e-16, -1e-16, 1e-16], dtype=torch.float64)
    assert _first_highest(1 + noise) == 0
    assert _are_lowest((1 + noise)[None, None], [2])[0, 0].nonzero().flatten().tolist() == [0, 1]
    assert _are_lowest(torch.tensor([[[3.0, 1.0, 2.0, 1.0, 2.0]]]), [3])[0, 0].tolist() == [
        False,
        True,
        True,
        True,
        False,
    ]


def test_gradients_equal_the_authors():
    golden = double(load_file(STATE_UPDATE / "power_law.safetensors"))
    inputs = double(load_file(STATE_UPDATE / "inputs.safetensors"))
    for tensor in inputs.values():
        tensor.requires_grad_()
    outputs, _ = run_recurrence("power_law", [64], inputs)
    (0.5 * outputs.pow(2).sum()).backward()
    for name, tensor in inputs.items():
        assert_close(tensor.grad, golden[f"grad/{name}"])


@pytest.mark.parametrize("schedule", json.loads((DATA / "schedules.json").read_text())["schedules"], ids=str)
def test_budgets_equal_the_authors_exactly(schedule):
    rule = rule_of(schedule["config"])
    chunk, rows = rule.chunk_size, [rule.chunk_size]
    for update in range(1, len(schedule["state_len"])):
        context, available = (rule.num_window_chunks + update) * chunk, (update + 1) * chunk
        rows.append(rows[-1] + min(budget(rule, context, available, rows[-1]) - rows[-1], chunk))
    assert rows == schedule["state_len"]
    for update, expected in enumerate(rows):
        opening = (rule.num_window_chunks + update) * chunk  # the token whose arrival brings this update about
        assert rows_after(rule, opening) == (rows[update - 1] if update else 0)
        assert rows_after(rule, opening + 1) == expected

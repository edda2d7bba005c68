"""What a KVM config accepts, keeps and refuses."""

import pytest
from huggingface_hub.errors import StrictDataclassError
from small_models import SMALL

from kvm_hf import KVMConfig

HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(num_attention_heads=4, num_key_value_heads=3), "num_key_value_heads"),
        (dict(num_attention_heads=0), "num_attention_heads"),
        (dict(num_attention_heads=0, head_dim=None), "num_attention_heads"),
        (dict(hidden_size=25, head_dim=None), "hidden_size"),
        (dict(num_hidden_layers=0), "num_hidden_layers"),
        (dict(state_growth_factor=float("nan")), "state_growth_factor"),
        (dict(state_growth_factor=-1.0), "state_growth_factor"),
        (dict(state_growth_exponent=1.5), "state_growth_exponent"),
        (dict(rope_parameters=HALF, count_bias=1.0, gate_values=False), "must be equal"),
        (dict(layer_types=["full_attention"] * 2, rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "constant"),
        (dict(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}), "spiral"),
        (dict(head_dim=7), "even"),
        (dict(chunk_size=0), "chunk_size"),
        (dict(num_window_chunks=0), "num_window_chunks"),
        (dict(chunk_size=256, num_window_chunks=4), "max_position_embeddings"),
        (dict(num_sink_tokens=4), "no row to merge into"),
        (dict(num_sink_tokens=-1), "num_sink_tokens"),
        (dict(state_size=1, num_sink_tokens=2), "smaller than its 2"),
        (dict(state_size=0), "state_size"),
        (dict(state_budget="fixed", state_size=3), "cannot be kept"),
        (dict(state_max_size=3), "cannot be kept"),
        (dict(state_budget="cubic"), "state_budget"),
        (dict(state_budget="saturation"), "state_saturation"),
        (dict(state_round_to=0), "state_round_to"),
        (dict(layer_types=["kvm_attention", "linear_attention"]), "unknown entries"),
        (dict(layer_types=["kvm_attention"]), "num_hidden_layers"),
        (dict(layer_types=["kvm_attention", "sliding_attention"]), "sliding_window"),
        (dict(no_rope_layers=[1]), "no_rope_layers"),
        (dict(state_treatment="normalized"), "partial_rotary_factor"),
        (dict(state_treatment="averaged"), "state_treatment"),
        (dict(state_treatment="positional", gate_keys=True, gate_values=False), "must be equal"),
        (dict(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "constant frequencies"),
        (dict(rope_parameters={"kvm_attention": {"rope_type": "default", "rope_theta": 1e4}}), "one set for all"),
        (dict(chunk_size="many"), "chunk_size"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_work_is_refused_by_name(fields, words):
    with pytest.raises((ValueError, StrictDataclassError), match=words):
        KVMConfig(**{**SMALL, **fields})


def test_defaults_follow_the_rotary_channels():
    """A model that rotates every channel gets the state that can undo the rotation; the paper's otherwise."""
    positional, normalized = KVMConfig(**SMALL), KVMConfig(**SMALL, rope_parameters=HALF)
    assert (positional.state_treatment, positional.count_bias, positional.gate_keys) == ("positional", 1.0, False)
    assert (normalized.state_treatment, normalized.count_bias, normalized.gate_keys) == ("normalized", 0.0, True)
    assert (normalized.gate_values, normalized.gate_appends, normalized.gate_initial_state) == (True, True, False)


def test_published_defaults():
    config = KVMConfig()
    assert (config.chunk_size, config.num_window_chunks, config.num_sink_tokens) == (256, 2, 1)
    assert config.layer_types == ["kvm_attention"] * config.num_hidden_layers


def test_a_saved_config_comes_back_equal(tmp_path):
    config = KVMConfig(**SMALL, rope_parameters=HALF, count_bias=0.5, state_max_size=9)
    config.save_pretrained(tmp_path)
    assert KVMConfig.from_pretrained(tmp_path).to_dict() == config.to_dict() | {
        "auto_map": {"AutoConfig": "configuration_kvm.KVMConfig"}
    }


def test_top_level_rope_settings_of_older_configs_are_understood():
    config = KVMConfig(**SMALL, rope_theta=500.0, partial_rotary_factor=0.5)
    assert config.rope_parameters["rope_theta"] == 500.0
    assert config.rotary_channels == 4

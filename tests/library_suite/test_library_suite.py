"""transformers' own tests of a model class (`ModelTesterMixin`, training, config) on ours.

The suite hardly looks at caches (ours are tested in `tests/kvm` and `tests/maglev`); it looks at everything else that people do with a
model: saving and loading, dtypes, tying and resizing embeddings, labels and losses, batches, training, checkpointing,
attention implementations. Depends on `transformers_suite`, and on the folder that `make suite` fetches.
"""

from contextlib import nullcontext
from unittest import TestCase

import torch
from transformers import set_seed
from transformers_suite import load, registered

from kvm_hf import (
    GPTAlphaConfig,
    GPTAlphaForCausalLM,
    GPTAlphaModel,
    KVMConfig,
    KVMForCausalLM,
    KVMForQuestionAnswering,
    KVMForSequenceClassification,
    KVMForTokenClassification,
    KVMModel,
)
from maglev_hf import MaglevConfig, MaglevForCausalLM, MaglevForPreTraining, MaglevModel

common = load("test_modeling_common")
training = load("test_training_mixin")
configuration = load("test_configuration_common")

CLASSES = {
    "MODEL": KVMModel,
    "MODEL_FOR_CAUSAL_LM": KVMForCausalLM,
    "MODEL_FOR_SEQUENCE_CLASSIFICATION": KVMForSequenceClassification,
    "MODEL_FOR_TOKEN_CLASSIFICATION": KVMForTokenClassification,
    "MODEL_FOR_QUESTION_ANSWERING": KVMForQuestionAnswering,
}

# Tests that cannot apply, each with the reason and with words of the error that it ends in. They run nonetheless, and
# count as skipped if they end in this error: an entry that has become wrong is a failure.
NOT_APPLICABLE = {
    "test_attention_outputs": (
        "The models refuse `output_attentions`: KVM layers attend to rows that stand for many tokens, and the memories of a "
        "Maglev call are found in several passes.",
        "`output_attentions=True` is not available",
    ),
    "test_generation_tester_mixin_inheritance": (
        "The sdist lacks the generation tests that this one demands; ours are in `tests/kvm/test_generation.py` "
        "and `tests/maglev/test_maglev_generation.py`.",
        "the tester must inherit from `GenerationTesterMixin`",
    ),
    "test_model_rope_scaling_from_config_1_dynamic": (
        "Our models refuse dynamic RoPE: its frequencies change with the length, and cached keys are not turned again.",
        "RoPE type 'dynamic' is not supported",
    ),
    "test_model_rope_scaling_frequencies": (
        "It includes dynamic RoPE, and our rotary modules take positions alone; `tests/kvm/test_modeling.py` compares "
        "every type that KVM models know with Llama.",
        "takes 2 positional arguments but 3 were given",
    ),
}


def no_subtest(*args, **kwargs) -> nullcontext:
    """In place of `TestCase.subTest`: the test ends in the first error."""
    return nullcontext()


def ends_in_error(name: str, reason: str, words: str):
    """The suite's test `name`, reported as skipped after it has ended in an error with these words."""
    original = getattr(common.ModelTesterMixin, name)

    def test(self):
        self.subTest = no_subtest  # a subtest would keep the error to itself
        with self.assertRaisesRegex(Exception, words):
            original(self)
        self.skipTest(reason)

    return test


class ModelTester:
    """What the suite asks for a model and its inputs: a small config, and a batch padded on the right."""

    batch_size, seq_length = 4, 13
    hidden_size, num_attention_heads, num_hidden_layers = 32, 4, 2
    is_training = True

    def __init__(self, config_class, causal_lm_class, **fields):
        self.config_class, self.causal_lm_class, self.fields = config_class, causal_lm_class, fields

    def get_config(self) -> KVMConfig | GPTAlphaConfig | MaglevConfig:
        small = dict(
            vocab_size=99,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            max_position_embeddings=64,
            pad_token_id=0,
        )
        return self.config_class(**{**small, **self.fields})

    def prepare_config_and_inputs_for_common(
        self,
    ) -> tuple[KVMConfig | GPTAlphaConfig | MaglevConfig, dict[str, torch.Tensor]]:
        config = self.get_config()
        ids = torch.randint(3, config.vocab_size, (self.batch_size, self.seq_length))
        lengths = torch.tensor([self.seq_length - 2, self.seq_length, 7, 3])
        mask = (torch.arange(self.seq_length) < lengths[:, None]).long()
        return config, {"input_ids": ids.where(mask == 1, config.pad_token_id), "attention_mask": mask}


class LibrarySuite(common.ModelTesterMixin, training.TrainingTesterMixin):
    """The suite on a model whose config has these `fields`."""

    config_class, classes = KVMConfig, CLASSES
    fields = {}
    all_model_classes = (KVMModel, KVMForCausalLM)
    # The suite asks this only of models from 2023 on, which it knows by the copyright line of their config.
    test_can_init_all_missing_weights_before_2023 = True
    # Its defaults (300 steps of 64 tokens, a tenth of the learning rate) take twenty times as long.
    training_overfit_steps, training_overfit_seq_length, training_overfit_learning_rate = 50, 24, 1e-2
    model_tester = None

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.enterClassContext(registered(cls.config_class.model_type, cls.classes))

    def setUp(self):
        set_seed(0)
        common.global_rng.seed(0)
        causal_lm_class = self.classes["MODEL_FOR_CAUSAL_LM"]
        self.model_tester = ModelTester(self.config_class, causal_lm_class, **self.fields)

    def test_config(self):
        configuration.ConfigTester(self, self.config_class, hidden_size=32, num_attention_heads=4).run_common_tests()

    def test_bc_torch_dtype(self):
        self.subTest = no_subtest  # or there are thousands, one for every parameter and dtype
        super().test_bc_torch_dtype()

    # Two tests look at attention weights among other things; asked not to, they look at the others. (Were the whole
    # suite asked not to, it would not compare attention implementations.)

    def test_model_outputs_equivalence(self):
        self.has_attentions = False
        super().test_model_outputs_equivalence()

    def test_retain_grad_hidden_states_attentions(self):
        self.has_attentions = False
        super().test_retain_grad_hidden_states_attentions()


for name, (reason, words) in NOT_APPLICABLE.items():
    setattr(LibrarySuite, name, ends_in_error(name, reason, words))


# Chunks so small that the state is full, and merges, at the lengths of the suite.
SMALL_STATE = {"chunk_size": 2, "num_window_chunks": 2, "state_budget": "fixed", "state_size": 4}
# Weights so large that the state moves the outputs.
LLAMA = SMALL_STATE | {
    "intermediate_size": 37,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    "initializer_range": 0.2,
}


class KVMLayersTest(LibrarySuite, TestCase):
    """All classes, with a state of the positional treatment."""

    fields = LLAMA
    all_model_classes = tuple(CLASSES.values())


# Models of the suite have two layers at most, so the kinds of layers are mixed in pairs.


class KVMAndFullLayersTest(LibrarySuite, TestCase):
    """The normalized treatment, whose gates merge by weight, and every parameter that a Llama may have."""

    fields = LLAMA | {
        "layer_types": ["kvm_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "attention_bias": True,
        "mlp_bias": True,
        "use_qk_norm": True,
    }


class SlidingAndKVMLayersTest(LibrarySuite, TestCase):
    """A state that grows, without sinks, in a layer without RoPE."""

    fields = LLAMA | {
        "layer_types": ["sliding_attention", "kvm_attention"],
        "sliding_window": 3,
        "no_rope_layers": [1, 0],
        "state_budget": "power_law",
        "state_growth_factor": 1.5,
        "state_size": 2,
        "num_sink_tokens": 0,
    }


class GPTAlphaTest(LibrarySuite, TestCase):
    """The paper's backbone, whose branches start at zero: its own initial values."""

    config_class = GPTAlphaConfig
    classes = {"MODEL": GPTAlphaModel, "MODEL_FOR_CAUSAL_LM": GPTAlphaForCausalLM}
    all_model_classes = tuple(classes.values())
    fields = SMALL_STATE | {
        "layer_types": ["kvm_attention", "block_sliding_attention"],
        "block_lambdas": True,
        "skip_connections": True,
    }


PLAIN_ROPE = "The paper's backbone has plain RoPE; other types are refused."
for kind, name in (
    ("linear", "test_model_rope_scaling_from_config_0_linear"),
    ("yarn", "test_model_rope_scaling_from_config_2_yarn"),
):
    setattr(GPTAlphaTest, name, ends_in_error(name, PLAIN_ROPE, f"RoPE type '{kind}' is not supported here"))


# Maglev


class MaglevSuite(LibrarySuite):
    """Windows that are shorter than the suite's sequences."""

    config_class = MaglevConfig
    classes = {"MODEL": MaglevModel, "MODEL_FOR_CAUSAL_LM": MaglevForCausalLM}
    all_model_classes = tuple(classes.values())
    maglev = {
        "intermediate_size": 37,
        "num_key_value_heads": 2,
        "sliding_window": 4,
        "initializer_range": 0.1,
        "rollout_tolerance": 1e-6,  # of batches and single rows, which the suite compares to 1e-5
    }


class MaglevPaperBlockTest(MaglevSuite, TestCase):
    """The paper's block, memories in keys and values."""

    fields = MaglevSuite.maglev


class MaglevLlamaBlockTest(MaglevSuite, TestCase):
    """Everything that a Llama may have in place of the paper's block."""

    fields = MaglevSuite.maglev | {
        "final_logit_softcapping": None,
        "use_qk_norm": False,
        "gated_mlp": True,
        "use_residual_scales": False,
        "norm_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    }


class MaglevCrossAttentionTest(MaglevSuite, TestCase):
    """Attention over memories, in layers of both kinds."""

    fields = MaglevSuite.maglev | {
        "memory_injection": "cross_attention",
        "layer_types": ["full_attention", "sliding_attention"],
    }


class MaglevPreTrainingTest(MaglevSuite, TestCase):
    """Both stacks, which share their blocks: the loss of training."""

    classes = {"MODEL": MaglevModel, "MODEL_FOR_CAUSAL_LM": MaglevForPreTraining}
    all_model_classes = tuple(classes.values())
    fields = MaglevSuite.maglev


class MaglevSeparatePreTrainingTest(MaglevPreTrainingTest):
    """Both stacks with blocks of their own."""

    fields = MaglevSuite.maglev | {"share_prefiller": False}
    # The loss has a distance in it, not its square: its gradient does not become smaller near zero.
    training_grad_norm_reduction_threshold = 0.7

"""Key-Value Means models for Transformers. Importing this package registers them with the Auto classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .cache_kvm import KVMCache
from .configuration_gptalpha import GPTAlphaConfig
from .configuration_kvm import KVMConfig
from .modeling_gptalpha import GPTAlphaForCausalLM, GPTAlphaModel
from .modeling_kvm import (
    KVMForCausalLM,
    KVMForQuestionAnswering,
    KVMForSequenceClassification,
    KVMForTokenClassification,
    KVMModel,
)
from .trainer_kvm import KVMTrainer

AutoConfig.register("kvm", KVMConfig, exist_ok=True)
AutoModel.register(KVMConfig, KVMModel, exist_ok=True)
AutoModelForCausalLM.register(KVMConfig, KVMForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(KVMConfig, KVMForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(KVMConfig, KVMForTokenClassification, exist_ok=True)
AutoModelForQuestionAnswering.register(KVMConfig, KVMForQuestionAnswering, exist_ok=True)
AutoConfig.register("kvm_gptalpha", GPTAlphaConfig, exist_ok=True)
AutoModel.register(GPTAlphaConfig, GPTAlphaModel, exist_ok=True)
AutoModelForCausalLM.register(GPTAlphaConfig, GPTAlphaForCausalLM, exist_ok=True)

__all__ = [
    "GPTAlphaConfig",
    "GPTAlphaForCausalLM",
    "GPTAlphaModel",
    "KVMCache",
    "KVMConfig",
    "KVMForCausalLM",
    "KVMForQuestionAnswering",
    "KVMForSequenceClassification",
    "KVMForTokenClassification",
    "KVMModel",
    "KVMTrainer",
]

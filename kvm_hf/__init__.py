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
from .configuration_kvm import KVMConfig
from .modeling_kvm import (
    KVMForCausalLM,
    KVMForQuestionAnswering,
    KVMForSequenceClassification,
    KVMForTokenClassification,
    KVMModel,
)

AutoConfig.register("kvm", KVMConfig, exist_ok=True)
AutoModel.register(KVMConfig, KVMModel, exist_ok=True)
AutoModelForCausalLM.register(KVMConfig, KVMForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(KVMConfig, KVMForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(KVMConfig, KVMForTokenClassification, exist_ok=True)
AutoModelForQuestionAnswering.register(KVMConfig, KVMForQuestionAnswering, exist_ok=True)

__all__ = [
    "KVMCache",
    "KVMConfig",
    "KVMForCausalLM",
    "KVMForQuestionAnswering",
    "KVMForSequenceClassification",
    "KVMForTokenClassification",
    "KVMModel",
]

"""Maglev models for Transformers. Importing this package registers them with the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForPreTraining

from .cache_maglev import MaglevCache
from .configuration_maglev import MaglevConfig
from .modeling_maglev import MaglevForCausalLM, MaglevForPreTraining, MaglevModel
from .trainer_maglev import GrowingSweeps, MaglevTrainer

AutoConfig.register("maglev", MaglevConfig, exist_ok=True)
AutoModel.register(MaglevConfig, MaglevModel, exist_ok=True)
AutoModelForCausalLM.register(MaglevConfig, MaglevForCausalLM, exist_ok=True)
AutoModelForPreTraining.register(MaglevConfig, MaglevForPreTraining, exist_ok=True)

__all__ = [
    "GrowingSweeps",
    "MaglevCache",
    "MaglevConfig",
    "MaglevForCausalLM",
    "MaglevForPreTraining",
    "MaglevModel",
    "MaglevTrainer",
]

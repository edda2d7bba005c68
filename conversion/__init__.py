"""From checkpoints that people have to KVM models: `retrofit` on the command line, the same functions here."""

from .convert import convert
from .plan import RetrofitOptions, RetrofitPlan, make_plan
from .source import gguf_to_checkpoint
from .verify import VerifyOptions, verify

__all__ = ["RetrofitOptions", "RetrofitPlan", "convert", "gguf_to_checkpoint", "VerifyOptions", "make_plan", "verify"]

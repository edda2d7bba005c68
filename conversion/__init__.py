"""From checkpoints that people have to KVM models: `retrofit` on the command line, the same functions here."""

from .errors import RetrofitError
from .execute import convert
from .plan import RetrofitOptions, RetrofitPlan, make_plan
from .source import gguf_to_checkpoint
from .verification import VerifyOptions, verify

__all__ = [
    "RetrofitError",
    "RetrofitOptions",
    "RetrofitPlan",
    "VerifyOptions",
    "convert",
    "gguf_to_checkpoint",
    "make_plan",
    "verify",
]

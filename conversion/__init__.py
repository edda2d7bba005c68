"""From checkpoints that people have to KVM models: `retrofit` on the command line, the same functions here."""

from .errors import RetrofitError
from .execute import convert
from .paper import PaperPlan, export_paper, import_paper
from .plan import RetrofitOptions, RetrofitPlan, make_plan
from .source import gguf_to_checkpoint
from .verification import VerifyOptions, verify

__all__ = [
    "PaperPlan",
    "RetrofitError",
    "RetrofitOptions",
    "RetrofitPlan",
    "VerifyOptions",
    "convert",
    "export_paper",
    "gguf_to_checkpoint",
    "import_paper",
    "make_plan",
    "verify",
]

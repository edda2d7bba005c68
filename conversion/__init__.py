"""From checkpoints that people have to KVM and Maglev models: `retrofit` on the command line, the same functions here."""

from .errors import RetrofitError
from .execute import convert, make_plan
from .heal import HealOptions, heal
from .maglev import MaglevOptions, MaglevPlan
from .paper import PaperPlan, export_paper, import_paper
from .plan import RetrofitOptions, RetrofitPlan
from .rank import RankOptions, rank_layers
from .source import gguf_to_checkpoint
from .verification import VerifyOptions, verify

__all__ = [
    "HealOptions",
    "MaglevOptions",
    "MaglevPlan",
    "PaperPlan",
    "RankOptions",
    "RetrofitError",
    "RetrofitOptions",
    "RetrofitPlan",
    "VerifyOptions",
    "convert",
    "export_paper",
    "gguf_to_checkpoint",
    "heal",
    "import_paper",
    "make_plan",
    "rank_layers",
    "verify",
]

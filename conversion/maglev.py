"""`retrofit to-maglev`: a Llama-style checkpoint as the beginning of Maglev training.

The decoder is the source with a sliding window in every layer, the prefiller the source as it is. The memory begins with no
effect, by parameters at zero that each get a gradient sooner or later, so that training leads away smoothly.
"""

from dataclasses import dataclass

from transformers import PreTrainedConfig

from maglev_hf import MaglevConfig, MaglevForPreTraining

from .errors import RetrofitError
from .families import kvm_fields
from .plan import Options, Plan, cache_bytes, make_config, numel, ranges

# What the paper's block has and Llama's has not.
LLAMA_BLOCK = {
    "gated_mlp": True,
    "use_qk_norm": False,
    "use_residual_scales": False,
    "norm_embeddings": False,
    "final_logit_softcapping": None,
}


@dataclass(frozen=True)
class MaglevOptions(Options):
    """The choices of `to-maglev`.

    Attributes:
        window: `W`, tokens that a query of the decoder sees, itself included.
        share_prefiller: whether the prefiller uses the decoder's blocks under masks of its own, or is a frozen copy of
            the source.
        consistency_weight: of the distance between memories and targets in the loss; None for the default of
            `MaglevConfig`.
    """

    window: int = 512
    share_prefiller: bool = False
    consistency_weight: float | None = None


class MaglevPlan(Plan):
    """A Maglev model to train: the source with sliding windows, memory parameters, and a prefiller."""

    options: MaglevOptions
    config: MaglevConfig

    model_class = MaglevForPreTraining
    kind = "Maglev model to train"
    # Keys are zero by the weight of their norm: behind a `k_proj` of zero, the norm would make the first step one to keys
    # of full size. The gates are 1 at zero.
    new_values = {
        "memory.v_proj.weight": 0.0,
        "memory.k_norm.weight": 0.0,
        "memory.local_gate.weight": 0.0,
        "memory.memory_gate.weight": 0.0,
    }

    @classmethod
    def target_config(cls, source_config: PreTrainedConfig, options: MaglevOptions) -> MaglevConfig:
        fields = kvm_fields(source_config)
        _check_layers(source_config, fields)
        longest = fields["max_position_embeddings"]
        if not 2 <= options.window <= longest:
            raise RetrofitError(
                f"`--window {options.window}` cannot be; give 2 to {longest}, the source's `max_position_embeddings`."
            )
        kinds, window = fields["layer_types"], fields.get("sliding_window")
        slides = "sliding_attention" in kinds
        if slides and window != options.window:
            raise RetrofitError(
                f"Layers of the source have a sliding window of {window}, not {options.window}, and a Maglev model has one "
                f"window for prefiller and decoder. Use `--window {window}`."
            )
        # Layers of the source that slide must do so in the prefiller; if none does, sharing has the pattern of the paper.
        own_kinds = kinds if slides or not options.share_prefiller else None
        for name in ("use_qk_norm", "no_rope_layers", "layer_types"):
            fields.pop(name, None)
        fields |= LLAMA_BLOCK | {
            "sliding_window": options.window,
            "prefiller_layer_types": own_kinds,
            "share_prefiller": options.share_prefiller,
            "consistency_weight": options.consistency_weight,
            "detach_memory": not options.share_prefiller,
            "detach_target": not options.share_prefiller,
        }
        return make_config(MaglevConfig, fields)

    @classmethod
    def llama_name(cls, name: str) -> str:
        if name.startswith("prefiller."):
            return "model." + name.removeprefix("prefiller.")
        return name.replace("self_attn.memory.k_proj", "self_attn.k_proj")

    def cache_bytes(self, tokens: int) -> int:
        return cache_bytes(self.config, tokens, self.dtype) + self.config.hidden_size * self.dtype.itemsize

    @property
    def prefiller(self) -> str:
        """What it is, in words."""
        what = "the decoder's own weights" if self.config.share_prefiller else "the source once more, frozen"
        kinds = self.config.prefiller_layer_types
        full = [index for index, kind in enumerate(kinds) if kind == "full_attention"]
        if not full:
            return f"{what}, with the window of the decoder: it sees no further, so there is little that it can teach"
        rest = "" if len(full) == len(kinds) else ", the window of the decoder in the others"
        return f"{what}, with full attention in layers {ranges(full)}{rest}"

    @property
    def cache(self) -> str:
        """What it holds, in words."""
        config = self.config
        return (
            f"{config.num_hidden_layers} layers of {config.sliding_window - 1} keys and values, and one memory of "
            f"{config.hidden_size} numbers"
        )

    @property
    def summary(self) -> list[str]:
        memory = [tensor for tensor in self.tensors if ".memory." in tensor.name]
        return [
            f"Decoder: the source's {self.config.num_hidden_layers} layers, all with a sliding window of "
            f"{self.config.sliding_window} tokens",
            f"Prefiller (for training): {self.prefiller}",
            f"New parameters: {numel(memory)} ({', '.join(sorted({part.name.split('.')[-2] for part in memory}))}); "
            "k_proj is a copy of its layer's, the others are zero, so that memory does nothing before training",
            f"Loss: cross-entropy + {self.config.consistency_weight:g} * consistency",
            f"Cache of the decoder: {self.cache}, however long the text",
        ]

    @property
    def card_facts(self) -> dict:
        return {
            "window": self.config.sliding_window,
            "prefiller": self.prefiller,
            "cache": self.cache,
            "weight": f"{self.config.consistency_weight:g}",
        }


def _check_layers(source_config: PreTrainedConfig, fields: dict) -> None:
    """Raises a RetrofitError, by name, for what a KVM model can say of a source and a Maglev model cannot."""
    lacking = []
    if fields.get("use_qk_norm"):
        lacking.append(
            "norms of queries and keys with weights, before RoPE (`use_qk_norm` of Maglev has none, after it)"
        )
    rotates = (fields.get("no_rope_layers") or [])[: fields["num_hidden_layers"]]
    without = [index for index, uses_rope in enumerate(rotates) if not uses_rope]
    if without:
        lacking.append(f"layers without RoPE (`no_rope_layers` names {without})")
    if lacking:
        raise RetrofitError(
            f"This {source_config.model_type} model cannot become a Maglev model exactly. Missing: {'; '.join(lacking)}. "
            "`retrofit to-kvm` takes it."
        )

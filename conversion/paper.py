"""The checkpoints of the Key-Value Means authors become ours, exactly, and ours become theirs.

Theirs have `model_type` `rwkv7backbone` (repository `recursal/KVM-paper`, commit 1932b9c); ours are
`GPTAlphaForCausalLM`. Two things differ beside names (our specification, section 7): their RoPE pairs neighbouring
channels and turns them the other way, which is an order of channels, and it spaces its frequencies to the end of the
range, which is another `rope_theta`. No weight is computed, so what comes back is equal bit for bit.

What differs when the models run: the authors' code rounds the tables of RoPE and the values read from the state to
bfloat16 whatever the model's dtype, and ours does not.
"""

import json
import math
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from kvm_hf import GPTAlphaConfig, GPTAlphaForCausalLM

from .errors import RetrofitError
from .execute import (
    DTYPE_NAMES,
    PLAN_FILE,
    check_space,
    check_target,
    check_work,
    write_code_and_config,
    write_index,
    write_shard,
)
from .families import Origin
from .plan import RetrofitOptions, TargetTensor, into_shards
from .source import Source, TensorInfo, read_headers

MODEL_TYPE, ARCHITECTURE = "rwkv7backbone", "RWKV7BackboneForCausalLM"
SHARD_SIZE = RetrofitOptions().shard_size

# Our name of a module or parameter to theirs; in a layer, what follows `model.layers.{i}.` and `transformer.h.{i}.`.
NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.embed_norm": "transformer.ln_emb",
    "model.norm": "transformer.ln_head",
    "model.skip_weights": "transformer.skip_weights",
    "lm_head": "lm_head",
    # in a layer
    "lambdas": "lambdas",
    "input_layernorm": "ln_attn",
    "self_attn.q_proj": "attn.c_q",
    "self_attn.k_proj": "attn.c_k",
    "self_attn.v_proj": "attn.c_v",
    "self_attn.o_proj": "attn.c_proj",
    "self_attn.value_gate.bias": "attn.v_gate0",
    "self_attn.value_gate.down": "attn.v_gate1",
    "self_attn.value_gate.up": "attn.v_gate2",
    "self_attn.shift_q": "attn.x_q",
    "self_attn.shift_k": "attn.x_k",
    "self_attn.shift_v": "attn.x_v",
    "self_attn.q_norm": "attn.ln_q",
    "self_attn.k_norm": "attn.ln_k",
    "self_attn.state_norm": "attn.ln_s_k",
    "self_attn.merge_gate": "attn.key_weighting",
    "self_attn.window_temperature": "attn.front_head_temp",
    "self_attn.state_temperature": "attn.state_head_temp",
    "post_attention_layernorm": "ln_mlp",
    "mlp.shift": "mlp.x_k",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
# Whose first dimension counts the channels of queries or keys, head by head or of one head.
PER_KEY_CHANNEL = ("q_proj", "k_proj", "shift_q", "shift_k", "q_norm", "k_norm", "state_norm")
# Theirs have the shape [1, 1, n], ours [n].
WITH_LEADING_ONES = ("self_attn.value_gate.bias", "mlp.shift")

MIXERS = {"kvm": "kvm_attention", "gptalpha": "full_attention", "gptalpha_bswa": "block_sliding_attention"}
BUDGETS = {"fixed": "fixed", "power_law": "power_law", "kvm_saturation": "saturation"}
RESIDUALS = {"rwkv": "gated", "none": "none"}
# What has a mode per kind of mixer, and the flag that turns it off for all.
FEATURES = {"value_residual": "use_value_residual", "token_shift": "use_tokenshift_att"}
# Our field to theirs.
SAME_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "ffn_expansion": "ffn_expansion",
    "max_position_embeddings": "max_position_embeddings",
    "pad_token_id": "pad_token_id",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "chunk_size": "chunk_len",
    "num_window_chunks": "n_bswa_chunks",
    "num_sink_tokens": "sink_len",
    "state_growth_factor": "state_growth_factor",
    "state_growth_exponent": "state_growth_exponent",
    "state_saturation": "state_saturation_n",
    "state_round_to": "state_round_down",
}
# The same, `False` and `True` here and 0 and 1 there.
FLAGS = {
    "block_lambdas": "use_block_lambdas",
    "skip_connections": "use_skip_connections",
    "token_shift_mlp": "use_tokenshift_ffn",
    "gate_keys": "kvm_use_merge_gate_keys",
    "gate_values": "kvm_use_merge_gate_values",
    "gate_appends": "kvm_apply_merge_gate_to_appends",
    "gate_initial_state": "kvm_apply_merge_gate_to_initial_state",
    "value_radius": "kvm_use_vlens",
    "region_temperatures": "kvm_use_head_temps",
}
# Their fields that change nothing about what these models compute.
WITHOUT_EFFECT = {
    "param_dtype": "never read",
    "tie_worhidden_sizedings": "never read; the head is never tied",
    "tie_word_embeddings": "the head is never tied",
    "mup_base_dim": "of training only",
    "use_l2wrap": "of training only: a gradient on the logits",
    "use_overflow_v_key_weighting": "of an older mixer",
    "use_state_deltarule": "of an older mixer",
    "use_state_decay": "of an older mixer",
    "use_cache": "of every call",
    "torch_dtype": "follows from the weights",
    "auto_map": "their code is not used",
}
# What the fields of a mixer begin with; those of mixers that a model has none of are not looked at.
PREFIXES = ("kvm", "gptalpha", "swa", "alt", "ovq", "lact", "kda", "gated_deltanet")


class AuthorsConfig(dict):
    """A config of theirs that knows which of its fields were looked at. Nothing is assumed for one that is not there."""

    def __init__(self, fields: dict):
        super().__init__(fields)
        self.used = set()

    def __getitem__(self, name):
        self.used.add(name)
        if name not in self:
            raise RetrofitError(f"The source's config.json lacks `{name}`, on which the result depends. Add it.")
        return super().__getitem__(name)

    def optional(self, name):
        self.used.add(name)
        return self.get(name)

    def check_all_used(self, mixers: set[str]) -> None:
        """Refuses fields that nobody looked at, of which nobody knows what they change."""
        foreign = tuple(f"{prefix}_" for prefix in PREFIXES if prefix not in mixers)
        left = set(self) - self.used - set(WITHOUT_EFFECT) - set(PreTrainedConfig().to_dict())
        left = sorted(name for name in left if not name.startswith(foreign))
        if left:
            raise RetrofitError(
                f"The source's config.json has fields that are not known here: {', '.join(left)}. Remove those that do "
                "not change what the model computes; with the others it would become another model."
            )


def config_from_paper(fields: dict) -> GPTAlphaConfig:
    """Their config as ours. Every field is mapped, is without effect, or is refused.

    Raises:
        RetrofitError: the model is one that ours cannot be, by name; or the authors' code has a fault there.
    """
    theirs = AuthorsConfig(fields)
    if theirs["model_type"] != MODEL_TYPE:
        raise RetrofitError(f"The source has `model_type` {theirs['model_type']!r}; {MODEL_TYPE!r} is imported.")
    class_path = theirs.optional("model_class_path")
    if class_path and str(class_path).rpartition(".")[2] != ARCHITECTURE:
        raise RetrofitError(f"`model_class_path` {class_path!r} is not supported, only {ARCHITECTURE}.")
    main, every = theirs["token_mixer"], theirs["alt_layer_every"] or 0
    _refuse_unknown_mixer("token_mixer", main, theirs["token_mixer_class_path"], MIXERS)
    layers, kind = theirs["num_hidden_layers"], MIXERS[main]
    layer_types = [kind] * layers
    mixers = {main.removesuffix("_bswa")}
    if every > 0:
        _refuse_unknown_mixer(
            "alt_token_mixer", theirs["alt_token_mixer"], theirs["alt_token_mixer_class_path"], ["swa"]
        )
        layer_types = [kind if index % every else "sliding_attention" for index in range(layers)]
        if kind not in layer_types:
            raise RetrofitError(f"`alt_layer_every` {every} leaves no layer of {layers} to `token_mixer` {main!r}.")
        if theirs["alt_share_v0"]:
            raise RetrofitError("`alt_share_v0` is not supported: no model that has it was seen.")
        mixers |= {"swa", "alt"}

    head_dim = theirs.optional("d_head") or theirs["hidden_size"] // theirs["num_attention_heads"]
    key_dim, value_dim = (theirs.optional(name) or head_dim for name in ("d_qk_head", "d_v_head"))
    if key_dim != value_dim:
        raise RetrofitError(
            f"`d_qk_head` is {key_dim} and `d_v_head` {value_dim}: heads whose values have other channels than their keys "
            "are not supported."
        )
    head_dim = key_dim

    rope = _rope_from_paper(theirs, "rope_theta", "rope_partial_dim", head_dim)
    if kind == "kvm_attention" and not 0 < theirs["rope_partial_dim"] < head_dim:
        raise RetrofitError(
            f"`rope_partial_dim` {theirs['rope_partial_dim']} with KVM is not supported: the authors' code then zeroes all "
            f"{head_dim} channels of the state's keys (0 means all of them there), and has nothing left to compare."
        )
    residual, shift = _mode(theirs, "value_residual", mixers), _mode(theirs, "token_shift", mixers)
    if theirs["state_budget_mode"] not in BUDGETS:
        raise RetrofitError(
            f"`state_budget_mode` {theirs['state_budget_mode']!r} is not supported; those known are {', '.join(BUDGETS)}."
        )
    budget, chunk = BUDGETS[theirs["state_budget_mode"]], theirs["chunk_len"]
    ours = {
        **{name: theirs[their_name] for name, their_name in SAME_FIELDS.items()},
        **{name: bool(theirs[their_name]) for name, their_name in FLAGS.items()},
        "head_dim": head_dim,
        "layer_types": layer_types,
        "rope_parameters": rope,
        "value_residual": RESIDUALS[residual],
        "token_shift_attention": shift == "rwkv",
        "residual_scale": theirs["residual_scale"] or 1.0,
        "logit_softcap": theirs["logit_softcap"] or None,
        "state_budget": budget,
        # A state begins with a row per token of a chunk and never shrinks, whatever these two say.
        "state_size": max(theirs["state_min_len"], chunk if budget == "fixed" else theirs["sink_len"], 1),
        "state_max_size": chunk * max(theirs["n_max_d_chunks"], 1),
    }
    if every > 0:
        ours["sliding_rope_parameters"] = _rope_from_paper(theirs, "alt_rope_theta", "alt_rope_partial_dim", head_dim)
        window = theirs["swa_window_size"] or 0
        ours["sliding_window"] = window if window > 0 else chunk
    theirs.check_all_used(mixers)
    try:
        config = GPTAlphaConfig(**ours)
    except Exception as error:  # `strict` wraps the ValueErrors of GPTAlphaConfig in its own classes
        raise RetrofitError(f"The source's config does not make a model here: {error.__cause__ or error}") from error
    _refuse_faulty_skips(config, every)
    return config


def config_for_paper(config: GPTAlphaConfig) -> dict:
    """Our config as theirs.

    Raises:
        RetrofitError: their code has no such model, by name.
    """
    every, kind = _alternation(config.layer_types)
    hidden, heads, rotary = config.hidden_size, config.num_attention_heads, config.rotary_channels_of(kind)
    if config.value_residual not in RESIDUALS.values():
        raise RetrofitError(f"`value_residual` {config.value_residual!r} cannot be exported: no model of it was seen.")
    if config.tie_word_embeddings:
        raise RetrofitError("`tie_word_embeddings` cannot be exported: the authors' models have a head of their own.")
    if kind == "kvm_attention" and not rotary:
        raise RetrofitError(
            "KVM layers without RoPE cannot be exported: the authors' code zeroes all of their keys then."
        )
    if every > 0 and heads * config.head_dim != hidden:
        raise RetrofitError(
            f"`head_dim` {config.head_dim} with sliding layers cannot be exported: there the authors' code needs "
            f"`hidden_size` / `num_attention_heads` = {hidden / heads:g}."
        )
    _refuse_faulty_skips(config, every)
    chunk, most = config.chunk_size, config.state_max_size
    if most is None:
        most = -(-config.max_position_embeddings // chunk) * chunk
    if most % chunk:
        raise RetrofitError(f"`state_max_size` {most} cannot be exported: it has to be a multiple of {chunk} there.")
    of_heads = None if heads * config.head_dim == hidden else config.head_dim
    theirs = {
        "model_type": MODEL_TYPE,
        "architectures": [ARCHITECTURE],
        "model_class_path": f"model.rwkv7_backbone.{ARCHITECTURE}",
        **{their_name: getattr(config, name) for name, their_name in SAME_FIELDS.items()},
        **{their_name: int(getattr(config, name)) for name, their_name in FLAGS.items()},
        "token_mixer": {ours: theirs for theirs, ours in MIXERS.items()}[kind],
        "token_mixer_class_path": None,
        "alt_layer_every": every,
        "d_head": None,
        "d_qk_head": of_heads,
        "d_v_head": of_heads,
        "use_value_residual": int(config.value_residual != "none"),
        "use_tokenshift_att": int(config.token_shift_attention),
        "residual_scale": config.residual_scale,
        "logit_softcap": config.logit_softcap or 0.0,
        "state_budget_mode": {ours: theirs for theirs, ours in BUDGETS.items()}[config.state_budget],
        "state_min_len": config.state_size,
        "n_max_d_chunks": most // chunk,
        **{f"{mixer}_{feature}_mode": "rwkv" for mixer in ("kvm", "gptalpha", "swa") for feature in FEATURES},
        **_rope_for_paper(config, kind, "rope_theta", "rope_partial_dim"),
    }
    if every > 0:
        theirs |= {
            "alt_token_mixer": "swa",
            "alt_token_mixer_class_path": None,
            "alt_share_v0": 0,
            "swa_window_size": config.sliding_window,
            **_rope_for_paper(config, "sliding_attention", "alt_rope_theta", "alt_rope_partial_dim"),
        }
    return theirs


def _refuse_unknown_mixer(name: str, mixer: str, class_path: str | None, known: Iterable[str]) -> None:
    if class_path:
        raise RetrofitError(f"`{name}_class_path` {class_path!r} is not supported: a class of one's own.")
    if mixer not in known:
        raise RetrofitError(f"`{name}` {mixer!r} is not supported; supported is {', '.join(known)}.")


def _refuse_faulty_skips(config: GPTAlphaConfig, every: int) -> None:
    half = config.num_hidden_layers // 2
    if config.skip_connections and every > 0 and half % every:
        raise RetrofitError(
            f"Skip connections with a sliding layer every {every} layers are not supported for {config.num_hidden_layers} "
            f"layers: the authors' code counts the second half from 0 when it chooses RoPE and value residual, which is "
            f"wrong unless {half} is a multiple of {every}."
        )


def _mode(theirs: AuthorsConfig, feature: str, mixers: set[str]) -> str:
    """`"rwkv"` or `"none"`: how all mixers of the model do `feature`."""
    modes = {f"{mixer}_{feature}_mode": theirs[f"{mixer}_{feature}_mode"] for mixer in sorted(mixers - {"alt"})}
    if not theirs[FEATURES[feature]]:
        return "none"
    for mode in ("rwkv", "none"):
        if set(modes.values()) == {mode}:
            return mode
    said = ", ".join(f"`{name}` {mode!r}" for name, mode in modes.items())
    raise RetrofitError(f"{said} is not supported; supported is 'rwkv', or 'none', for all layers alike.")


def _rope_from_paper(theirs: AuthorsConfig, base_name: str, channels_name: str, head_dim: int) -> dict:
    """RoPE of theirs has frequencies `base ** -linspace(0, 1, p)` for `p` pairs, ours `theta ** -(i / p)`."""
    base, channels = theirs[base_name], theirs[channels_name]
    if channels % 2 or not 0 <= channels <= head_dim:
        raise RetrofitError(f"`{channels_name}` {channels} is not supported: an even number up to {head_dim}, please.")
    pairs = channels // 2
    factor = channels / head_dim
    return {
        "rope_type": "default",
        "rope_theta": float(base ** (pairs / (pairs - 1)) if pairs > 1 else base),  # one pair turns by the position
        "partial_rotary_factor": factor if int(factor * head_dim) == channels else math.nextafter(factor, 1.0),
    }


def _rope_for_paper(config: GPTAlphaConfig, kind: str, base_name: str, channels_name: str) -> dict:
    theta, channels = config.rope_of(kind)["rope_theta"], config.rotary_channels_of(kind)
    pairs = channels // 2
    base = theta ** ((pairs - 1) / pairs) if pairs > 1 else theta
    return {base_name: float(f"{base:.12g}"), channels_name: channels}  # without the rounding errors of two powers


def _alternation(layer_types: list[str]) -> tuple[int, str]:
    """Every how many layers there is a sliding one, -1 for none, and the kind of the others."""
    sliding = [index for index, kind in enumerate(layer_types) if kind == "sliding_attention"]
    others = sorted(set(layer_types) - {"sliding_attention"})
    every = -1 if not sliding else sliding[1] if len(sliding) > 1 else len(layer_types)
    if len(others) != 1 or sliding != (list(range(0, len(layer_types), every)) if sliding else []):
        raise RetrofitError(
            f"`layer_types` {layer_types} cannot be exported: the authors' models have one kind of layer, and possibly "
            "sliding ones as layers 0, N, 2N, ..."
        )
    return every, others[0]


@dataclass(frozen=True)
class Parameter:
    """A parameter in both formats.

    Attributes:
        head_dim, rotary_channels: where its first dimension counts channels of queries or keys, else 0.
    """

    name: str
    their_name: str
    shape: tuple[int, ...]
    their_shape: tuple[int, ...]
    head_dim: int = 0
    rotary_channels: int = 0

    def from_paper(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._reordered(tensor.reshape(self.shape), self._order)

    def for_paper(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._reordered(tensor, self._order.argsort()).reshape(self.their_shape)

    @property
    def _order(self) -> torch.Tensor:
        """Their channel for each of ours: the second of every pair, then the first, then those that do not turn."""
        channels = torch.arange(self.head_dim)
        r = self.rotary_channels
        return torch.cat([channels[1:r:2], channels[0:r:2], channels[r:]])

    def _reordered(self, tensor: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        if not self.rotary_channels:
            return tensor
        return tensor.unflatten(0, (-1, self.head_dim))[:, order].flatten(0, 1)


def parameters(config: GPTAlphaConfig) -> list[Parameter]:
    """Every parameter of a model, in our order."""
    with torch.device("meta"):
        model = GPTAlphaForCausalLM(config)
    return [_parameter(config, name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()]


def _parameter(config: GPTAlphaConfig, name: str, shape: tuple[int, ...]) -> Parameter:
    in_layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    prefix, part = (f"transformer.h.{in_layer[1]}.", in_layer[2]) if in_layer else ("", name)
    module = part if part in NAMES else part.rpartition(".")[0]
    their_name = prefix + NAMES[module] + part.removeprefix(module)
    their_shape = (1, 1, *shape) if module in WITH_LEADING_ONES else shape
    if module.rpartition(".")[2] not in PER_KEY_CHANNEL:
        return Parameter(name, their_name, shape, their_shape)
    rotary = config.rotary_channels_of(config.layer_types[int(in_layer[1])])
    return Parameter(name, their_name, shape, their_shape, config.head_dim, rotary)


def unused_by_paper(config: GPTAlphaConfig) -> list[str]:
    """Parameters of theirs that their code does not use: without token shift, a mix of values remains that the value
    residual brings with it. An import leaves it out, an export writes zeros."""
    if config.token_shift_attention or config.value_residual == "none":
        return []
    return [f"transformer.h.{index}.attn.x_v" for index in range(config.num_hidden_layers)]


@dataclass
class OtherFormat(Source):
    """A checkpoint whose tensors are handed out as the other format has them.

    Attributes:
        change: tensor name to what becomes of the tensor.
        loaded: the tensors of a PyTorch file, mapped into memory; None if they are in safetensors files.
    """

    change: dict[str, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    loaded: dict[str, torch.Tensor] | None = None

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> torch.Tensor:
        tensor = super().read(name) if self.loaded is None else self.loaded[name]
        return self.change[name](tensor)[start:stop]


@dataclass
class PaperPlan:
    """What an import or export will do.

    Attributes:
        config: ours, in either direction.
        shards: file name to its tensors, in order.
        notes: what somebody should know about the result, in sentences.
    """

    source: OtherFormat
    config: GPTAlphaConfig
    shards: dict[str, list[TargetTensor]]
    notes: list[str]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for shard in self.shards.values() for tensor in shard)


def import_paper(
    source: str | Path,
    target: str | Path,
    *,
    on_plan: Callable[[PaperPlan], None] = lambda plan: None,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> PaperPlan:
    """Turns a checkpoint folder of the authors into a GPTAlpha-2 folder that loads with `trust_remote_code=True`.

    Tensors keep their dtypes. All work happens in `TARGET.incomplete`, which gets the target's name when everything is
    there; what an interrupted run left of it is thrown away by the next.

    Args:
        source: folder with `config.json` and weights: `model.safetensors`, one file or several with an index, or one
            file of PyTorch (`*.pth`, `*.pt`, `pytorch_model.bin`).
        target: folder that does not exist yet or is empty.
        on_plan: called with the plan before anything is written.
        on_bytes: called with the number of bytes written, again and again.

    Raises:
        RetrofitError: the model is one that ours cannot be; a file is missing or damaged; a tensor is missing, left
            over, or of another shape. Nothing has been written then.
    """
    source, target = Path(source), Path(target).resolve()
    check_target(target)
    file = source / "config.json"
    try:
        config = config_from_paper(_read_json(file))
    except (TypeError, ArithmeticError) as error:
        raise RetrofitError(f"{file} has a value that makes no sense: {error}") from error
    opened = _open(source, config)
    pairs = {parameter.their_name: parameter for parameter in parameters(config)}
    unused = [name for name in unused_by_paper(config) if name in opened.tensors]
    _check_tensors(opened, {name: parameter.their_shape for name, parameter in pairs.items()}, spare=unused)
    opened.change = {name: parameter.from_paper for name, parameter in pairs.items()}
    config.dtype = Counter(opened.tensors[name].dtype for name in pairs).most_common(1)[0][0]
    notes = []
    if unused:
        notes.append(f"Left out: {', '.join(unused)}, which the authors' code does not use without token shift.")
    if "kvm_attention" in config.layer_types and not config.value_radius:
        notes.append(
            "`kvm_use_vlens` 0 means that values are divided by the tokens in their row. The authors' code counts them "
            "wrongly, and ours rightly, so that texts longer than the window give other logits."
        )
    tensors = [
        TargetTensor(parameter.name, parameter.shape, opened.tensors[name].dtype, Origin(name))
        for name, parameter in pairs.items()
    ]
    plan = PaperPlan(opened, config, into_shards(tensors, SHARD_SIZE), notes)
    on_plan(plan)
    _write_folder(plan, target, lambda work: write_code_and_config(GPTAlphaForCausalLM, config, work), on_bytes)
    return plan


def export_paper(
    source: str | Path,
    target: str | Path,
    *,
    on_plan: Callable[[PaperPlan], None] = lambda plan: None,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> PaperPlan:
    """Turns a GPTAlpha-2 folder into a checkpoint folder of the authors; the arguments are as in `import_paper`.

    Fields of their config that have no counterpart here are left to their defaults.

    Raises:
        RetrofitError: their code has no such model; a file or tensor is missing, damaged, left over, or of another
            shape. Nothing has been written then.
    """
    source, target = Path(source), Path(target).resolve()
    check_target(target)
    model_type = _read_json(source / "config.json").get("model_type")
    if model_type != GPTAlphaConfig.model_type:
        raise RetrofitError(f"The source has `model_type` {model_type!r}; {GPTAlphaConfig.model_type!r} is exported.")
    try:
        config = GPTAlphaConfig.from_pretrained(source)
    except Exception as error:  # whatever a config class raises
        raise RetrofitError(f"{source / 'config.json'} cannot be read: {error}") from error
    fields = config_for_paper(config)
    opened = _open(source, config)
    pairs = {parameter.name: parameter for parameter in parameters(config)}
    _check_tensors(opened, {name: parameter.shape for name, parameter in pairs.items()})
    opened.change = {name: parameter.for_paper for name, parameter in pairs.items()}
    tensors = [
        TargetTensor(parameter.their_name, parameter.their_shape, opened.tensors[name].dtype, Origin(name))
        for name, parameter in pairs.items()
    ]
    width, dtype = config.num_attention_heads * config.head_dim, tensors[0].dtype
    unused = unused_by_paper(config)
    tensors += [TargetTensor(name, (width,), dtype, Origin(None, fill=0.0)) for name in unused]
    notes = (
        [f"Zeros are written for {', '.join(unused)}, which the authors' code has but does not use."] if unused else []
    )
    plan = PaperPlan(opened, config, into_shards(tensors, SHARD_SIZE), notes)
    on_plan(plan)
    _write_folder(plan, target, lambda work: _write_json(work / "config.json", fields), on_bytes)
    return plan


def _read_json(file: Path) -> dict:
    if not file.is_file():
        raise RetrofitError(f"There is no {file}; the source must be a checkpoint folder on this machine.")
    try:
        read = json.loads(file.read_text())
    except ValueError as error:
        raise RetrofitError(f"{file} cannot be read: {error}") from error
    if not isinstance(read, dict):
        raise RetrofitError(f"{file} is not a config.")
    return read


def _write_json(file: Path, fields: dict) -> None:
    file.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def _open(folder: Path, config: GPTAlphaConfig) -> OtherFormat:
    """The weights of a folder, safetensors if there are any."""
    if any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")):
        tensors, loaded = read_headers(folder), None
    else:
        files = sorted([*folder.glob("*.pth"), *folder.glob("*.pt"), *folder.glob("pytorch_model.bin")])
        if len(files) != 1:
            found = f"several PyTorch files ({', '.join(file.name for file in files)})" if files else "no weights"
            raise RetrofitError(
                f"{folder} has {found}. Give it model.safetensors (one file, or several with an index), or one file "
                "*.pth, *.pt or pytorch_model.bin."
            )
        loaded = _read_torch_file(files[0])
        tensors = {name: TensorInfo(files[0], tuple(tensor.shape), tensor.dtype) for name, tensor in loaded.items()}
    files = sorted({info.file for info in tensors.values()})
    return OtherFormat(folder, str(folder), config, tensors, files, loaded=loaded)


def _read_torch_file(file: Path) -> dict[str, torch.Tensor]:
    """A state dict, whose tensors are read when they are used."""
    try:
        loaded = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # damaged, of an old format, or with objects in it: PyTorch has a class for each
        raise RetrofitError(f"{file} cannot be read: {error}") from error
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
        for name, tensor in loaded.items()
    ):
        raise RetrofitError(f"{file} does not hold a state dict (names and dense tensors, nothing else).")
    for name, tensor in loaded.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise RetrofitError(f"Tensor {name} in {file} is stored as {tensor.dtype}; dequantize the model first.")
    return loaded


def _check_tensors(source: OtherFormat, wanted: dict[str, tuple[int, ...]], spare: Sequence[str] = ()) -> None:
    """Every tensor is used, once and in full."""
    missing = sorted(set(wanted) - set(source.tensors))
    left = sorted(set(source.tensors) - set(wanted) - set(spare))
    problems = [
        f"{what}: {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
        for what, names in (("missing", missing), ("left over", left))
        if names
    ]
    if problems:
        raise RetrofitError(f"The source's tensors are not those that its config asks for; {'; '.join(problems)}.")
    for name, shape in wanted.items():
        if source.tensors[name].shape != shape:
            raise RetrofitError(
                f"Tensor {name!r} of the source has shape {source.tensors[name].shape}, but its config asks for {shape}."
            )


def _write_folder(plan: PaperPlan, target: Path, write_config: Callable[[Path], None], on_bytes) -> None:
    work = target.with_name(target.name + ".incomplete")
    check_work(work)
    try:
        if work.exists():
            shutil.rmtree(work)  # left by a run that was interrupted
        check_space(work, plan)
        # Appears with its marker in it, so that a folder without one is not ours to remove.
        work.parent.mkdir(parents=True, exist_ok=True)
        beginning = Path(tempfile.mkdtemp(dir=work.parent, prefix=f".{work.name}-"))
        beginning.chmod(0o755)  # temporary folders are private
        (beginning / PLAN_FILE).touch()
        os.rename(beginning, work)

        for name, tensors in plan.shards.items():
            write_shard(plan, work / name, tensors, on_bytes)
        if len(plan.shards) > 1:
            write_index(plan, work)
        readme = plan.source.folder / "README.md"
        for path in [*plan.source.kept_files, *([readme] if readme.is_file() else [])]:
            kept = work / path.relative_to(plan.source.folder)
            kept.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, kept)
        write_config(work)
        if target.exists():
            target.rmdir()
        os.rename(work, target)
        (target / PLAN_FILE).unlink()  # only now: until it has its name the folder must be known as ours
    except OSError as error:
        raise RetrofitError(f"Writing {work} failed: {error}. Mend that and run the same command again.") from error

"""Reading a source checkpoint: a local folder, a hub id, or a GGUF file. Tensors are read one at a time."""

import json
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from .errors import RetrofitError, one_line
from .families import kvm_fields, refuse_unknown

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")
# Files about the model rather than of it, which the target writes anew.
REPLACED_FILES = ("config.json", "README.md", ".gitattributes")
DOWNLOAD_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "README.md"]
SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a shard, as its header describes it."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Source:
    """A checkpoint folder: config, headers of its tensors, and the files to hand on.

    Attributes:
        label: what the user called it, for the card and for messages.
        weight_files: what the weights came from.
    """

    folder: Path
    label: str
    config: PreTrainedConfig
    tensors: dict[str, TensorInfo]
    weight_files: list[Path]

    @property
    def kept_files(self) -> list[Path]:
        return files_around(self.folder)

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> torch.Tensor:
        """One tensor, or rows of it. The file is opened for this tensor only, so that nothing else stays mapped."""
        with safe_open(self.tensors[name].file, framework="pt") as shard:
            if start is None:
                return shard.get_tensor(name).clone()
            return shard.get_slice(name)[start:stop].clone()


def files_around(folder: Path) -> list[Path]:
    """Tokenizer, chat template, generation config, licence: everything in a model folder but weights, code and config."""
    paths = sorted(folder.iterdir())
    templates = folder / "additional_chat_templates"
    paths += sorted(templates.iterdir()) if templates.is_dir() else []
    return [
        path
        for path in paths
        if path.is_file() and not path.name.endswith((*WEIGHT_SUFFIXES, ".py")) and path.name not in REPLACED_FILES
    ]


@contextmanager
def open_source(source: str | Path, workspace: Path, check: Callable[[PreTrainedConfig], object] = kvm_fields):
    """Yields the `Source` behind a folder, hub id or GGUF file. A GGUF file is rebuilt beside `workspace` meanwhile.

    Args:
        check: called with the config before any weight is downloaded or read; raises what it will not have.

    Raises:
        RetrofitError: the source is not there, has no safetensors weights, or a shard is missing or damaged.
    """
    path = Path(source)
    if path.suffix == ".gguf" and path.is_file():
        check(_read_gguf_config(path))
        workspace.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=workspace.parent, prefix=f".{path.stem}-") as scratch:
            rebuilt = gguf_to_checkpoint(path, Path(scratch) / "checkpoint")
            yield Source(rebuilt, path.name, _read_config(rebuilt), read_headers(rebuilt), [path])
        return
    folder = path if path.is_dir() else _download(str(source), ["config.json"])
    config = _read_config(folder)
    check(config)
    if not path.is_dir():
        folder = _download(str(source), DOWNLOAD_PATTERNS)
    tensors = read_headers(folder)
    yield Source(folder, str(source), config, tensors, sorted({info.file for info in tensors.values()}))


def gguf_to_checkpoint(gguf: str | Path, folder: str | Path, dtype: torch.dtype = torch.float32) -> Path:
    """Writes a GGUF file that transformers can read as an ordinary checkpoint folder, tokenizer included.

    transformers loads such a file but refuses to save the model; the weights are put into a fresh model of the same
    class, which saves.

    Raises:
        RetrofitError: transformers cannot read the file, or `folder` is not empty.
    """
    gguf, folder = Path(gguf), Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise RetrofitError(f"{folder} exists and is not empty. Choose another folder, or remove it first.")
    try:
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except Exception as error:  # whatever transformers and gguf raise for a damaged or unknown file
        raise RetrofitError(f"transformers cannot read the GGUF file {gguf}: {error}") from error
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    with torch.device("meta"):
        model = type(loaded)(type(loaded.config)(**settings))
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    model.config.dtype = dtype
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.chmod(0o755)  # temporary folders are private
    unfinished.replace(folder)
    return folder


def _download(hub_id: str, patterns: list[str]) -> Path:
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except HFValidationError as error:
        raise RetrofitError(f"{hub_id!r} is neither a folder, a GGUF file nor a hub id.") from error
    except Exception as error:  # network, authentication, missing repository: the hub client has many
        raise RetrofitError(
            f"{hub_id!r} is not a local folder or GGUF file, and could not be fetched from the hub (without a network, give "
            f"a folder or a GGUF file): {one_line(error)}"
        ) from error


def _read_config(folder: Path) -> PreTrainedConfig:
    """The config of a checkpoint folder of a family that can be converted."""
    file = folder / "config.json"
    if not file.is_file():
        raise RetrofitError(f"{folder} has no config.json; the source must be a checkpoint folder of transformers.")
    try:
        model_type = json.loads(file.read_text()).get("model_type")
    except (ValueError, AttributeError) as error:
        raise RetrofitError(f"{file} cannot be read: {error}") from error
    refuse_unknown(model_type)  # before transformers looks at it, which may not know the family at all
    try:
        return AutoConfig.from_pretrained(folder)
    except Exception as error:  # whatever a config class raises
        raise RetrofitError(f"{file} cannot be read: {error}") from error


def _read_gguf_config(path: Path) -> PreTrainedConfig:
    """The config in a GGUF file, without its quantization, which is undone on the way."""
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # whatever transformers and gguf raise for a damaged or unknown file
        raise RetrofitError(f"The GGUF file {path} cannot be read: {error}") from error
    refuse_unknown(config.model_type)
    config.quantization_config = None
    return config


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor's place, shape and dtype. Opening a shard checks that it is whole."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            listed = json.loads(index.read_text())["weight_map"]
            files = sorted({folder / name for name in listed.values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RetrofitError(f"{index} is damaged ({error!r}). Fetch it again.") from error
    else:
        listed = None
        files = [folder / "model.safetensors"]
    tensors = {}
    for file in files:
        if not file.is_file():
            raise RetrofitError(
                f"{file} is missing. The source needs its weights as safetensors: complete the download, or load the "
                "model and save it again with `save_pretrained`."
            )
        try:
            with safe_open(file, framework="pt") as shard:
                for name in shard.keys():
                    view = shard.get_slice(name)
                    dtype = view.get_dtype()
                    if dtype not in SAFETENSORS_DTYPES:
                        raise RetrofitError(
                            f"Tensor {name} in {file} is stored as {dtype}; dequantize the model first."
                        )
                    tensors[name] = TensorInfo(file, tuple(view.get_shape()), SAFETENSORS_DTYPES[dtype])
        except SafetensorError as error:
            raise RetrofitError(f"{file} is damaged or cut short ({error}). Fetch it again.") from error
    absent = sorted(set(listed or ()) - set(tensors))
    if absent:
        raise RetrofitError(f"The index of {folder} lists tensors that no shard holds: {', '.join(absent[:5])}.")
    return tensors

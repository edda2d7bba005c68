"""Text as training data: documents out of files or datasets of the hub, tokens in a row, cut into pieces of one length."""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from .errors import RetrofitError, one_line
from .hub import is_hub_id

FORMATS = (
    "plain text (any other ending), .jsonl with a field `text`, .parquet with a column `text`, a hub id (`owner/name`, "
    "`owner/name:configuration`) of a dataset with a column `text` in its split `train`"
)


@dataclass(frozen=True)
class Pieces:
    """Text to train on and text to measure with.

    Attributes:
        train, held_out: `[pieces, length]` token ids; the held-out pieces are spread evenly over the files.
        tokens: per file.
    """

    train: torch.Tensor
    held_out: torch.Tensor
    tokens: dict[str, int]

    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.train.numpy().tobytes())
        digest.update(self.held_out.numpy().tobytes())
        return digest.hexdigest()

    def batch(self, number: int, size: int, seed: int) -> torch.Tensor:
        """`[size, length]`: batch `number` of an endless sequence that shuffles all pieces anew in every round."""
        rows, count = [], len(self.train)
        for place in range(number * size, (number + 1) * size):
            generator = torch.Generator().manual_seed(seed * 1_000_003 + place // count)
            rows.append(self.train[torch.randperm(count, generator=generator)[place % count]])
        return torch.stack(rows)


def read_pieces(tokenizer, texts: list[str | Path], length: int, held_out: int, enough: float = math.inf) -> Pieces:
    """Reads texts and packs them: documents one after the other, the end-of-text token between them, cut into pieces.
    Every piece begins with what the tokenizer puts in front of a text, if anything.

    Args:
        texts: files, which are read whole, or datasets of the hub.
        enough: pieces to take from the beginning of each of these datasets, which may be larger than the disk.

    Raises:
        RetrofitError: a file cannot be read, or there is not enough text.
    """
    prefix = _prefix(tokenizer)
    stream, tokens = [], {}
    room = length - len(prefix)
    for text in texts:
        before, most = len(stream), enough * room if dataset_of(text) else math.inf
        for document in documents(text):
            stream += tokenizer(document, add_special_tokens=False, verbose=False).input_ids
            if tokenizer.eos_token_id is not None:
                stream.append(tokenizer.eos_token_id)
            if len(stream) - before >= most:
                break
        tokens[str(text)] = tokens.get(str(text), 0) + len(stream) - before
    count = len(stream) // room
    if count <= held_out:
        raise RetrofitError(
            f"`--text` has {len(stream)} tokens; {(held_out + 1) * room} are needed for one piece of `--length {length}` to "
            f"train on and {held_out} held out. Give more text, or a shorter length."
        )
    packed = torch.tensor(stream[: count * room]).view(count, room)
    packed = torch.cat([torch.tensor(prefix, dtype=torch.long).expand(count, -1), packed], dim=1)
    kept = torch.zeros(count, dtype=torch.bool)
    for index in range(held_out):
        kept[(2 * index + 1) * count // (2 * held_out)] = True
    return Pieces(packed[~kept], packed[kept], tokens)


def dataset_of(text: str | Path) -> tuple[str, str | None] | None:
    """The hub id and the configuration that `owner/name` or `owner/name:configuration` mean; None for a file."""
    name, _, configuration = str(text).partition(":")
    return (name, configuration or None) if not Path(text).exists() and is_hub_id(name) else None


def documents(text: str | Path) -> Iterator[str]:
    """The texts in a file or in the training split of a dataset of the hub.

    Raises:
        RetrofitError: it cannot be read, or has no texts where they should be.
    """
    if dataset := dataset_of(text):
        yield from _rows(f"`--text {text}` is not a file, and as a dataset of the hub it", *dataset)
        return
    file = Path(text)
    if file.suffix.lower() == ".parquet":
        yield from _rows(f"`--text {file}`", "parquet", data_files=str(file))
        return
    try:
        with open(file, encoding="utf-8-sig") as lines:
            if file.suffix.lower() != ".jsonl":
                yield lines.read()
                return
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _text_of(line, f"line {number} of {file}")
    except (OSError, UnicodeDecodeError) as error:
        raise RetrofitError(f"`--text {file}` cannot be read: {error}. Formats, in UTF-8: {FORMATS}.") from error


def _text_of(line: str, where: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError) as error:
        raise RetrofitError(f"`--text`: {where} is not an object with a field `text`.") from error
    if not isinstance(text, str):
        raise RetrofitError(f"`--text`: the field `text` in {where} is not a string.")
    # Half of a character, as in text that was cut to a number of UTF-16 units, cannot be tokenized.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _rows(subject: str, *dataset, **settings) -> Iterator[str]:
    """What `load_dataset` reads, a row at a time.

    Args:
        subject: of the sentence that an error is.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise RetrofitError(
            f"{subject} is read through `datasets`, which is not installed. Run `pip install datasets`, or give a file of "
            "plain text or jsonl."
        ) from error
    try:
        rows = load_dataset(*dataset, split="train", streaming=True, **settings).select_columns("text")
        for number, row in enumerate(rows, 1):
            if not isinstance(row["text"], str):
                raise TypeError(f"`text` of row {number} is not a string")
            yield row["text"]
    except Exception as error:  # datasets, pyarrow and the hub's client have many
        raise RetrofitError(f"{subject} cannot be read: {one_line(error)}. Formats: {FORMATS}.") from error


def _prefix(tokenizer) -> list[int]:
    """What the tokenizer puts in front of every text."""
    bare, full = (tokenizer("a", add_special_tokens=special).input_ids for special in (False, True))
    for cut in range(len(full) - len(bare) + 1):
        if full[cut : cut + len(bare)] == bare:
            return full[:cut]
    return []

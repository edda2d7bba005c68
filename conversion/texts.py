"""Local text as training data: documents out of files, tokens in a row, cut into pieces of one length."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from .errors import RetrofitError

FORMATS = "plain text (any other ending), .jsonl with a field `text`, .parquet with a column `text`"


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


def read_pieces(tokenizer, files: list[Path], length: int, held_out: int) -> Pieces:
    """Reads all files and packs them: documents one after the other, the end-of-text token between them, cut into pieces.
    Every piece begins with what the tokenizer puts in front of a text, if anything.

    Raises:
        RetrofitError: a file cannot be read, or there is not enough text.
    """
    prefix = _prefix(tokenizer)
    stream, tokens = [], {}
    for file in files:
        before = len(stream)
        for document in documents(Path(file)):
            stream += tokenizer(document, add_special_tokens=False, verbose=False).input_ids
            if tokenizer.eos_token_id is not None:
                stream.append(tokenizer.eos_token_id)
        tokens[str(file)] = len(stream) - before
    room = length - len(prefix)
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


def documents(file: Path) -> Iterator[str]:
    """The texts in a file.

    Raises:
        RetrofitError: it cannot be read, or has no texts where they should be.
    """
    if file.suffix == ".parquet":
        yield from _parquet(file)
        return
    try:
        with open(file, encoding="utf-8") as lines:
            if file.suffix != ".jsonl":
                yield lines.read()
                return
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _text_of(line, f"line {number} of {file}")
    except (OSError, UnicodeDecodeError) as error:
        raise RetrofitError(f"`--text {file}` cannot be read: {error}. Formats: {FORMATS}.") from error


def _text_of(line: str, where: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError) as error:
        raise RetrofitError(f"`--text`: {where} is not an object with a field `text`.") from error
    if not isinstance(text, str):
        raise RetrofitError(f"`--text`: the field `text` in {where} is not a string.")
    return text


def _parquet(file: Path) -> Iterator[str]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise RetrofitError(
            f"`--text {file}`: parquet files are read through `datasets`, which is not installed. Run `pip install "
            "datasets`, or give plain text or jsonl."
        ) from error
    try:
        rows = load_dataset("parquet", data_files=str(file), split="train", streaming=True).select_columns("text")
        yield from (row["text"] for row in rows)
    except Exception as error:  # datasets and pyarrow have many
        raise RetrofitError(f"`--text {file}` cannot be read: {error}. Formats: {FORMATS}.") from error


def _prefix(tokenizer) -> list[int]:
    """What the tokenizer puts in front of every text."""
    bare, full = (tokenizer("a", add_special_tokens=special).input_ids for special in (False, True))
    for cut in range(len(full) - len(bare) + 1):
        if full[cut : cut + len(bare)] == bare:
            return full[:cut]
    return []

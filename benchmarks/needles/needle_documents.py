"""Documents for the needle tasks beside this file: filler, and in it a value that is asked for at the end.

The tasks follow RULER (arXiv 2404.06654, section 3.1) in kind; all words are ours but for those of Genesis. lm-eval calls
`make_dataset` with a task's `dataset_kwargs`, the model's arguments and `--metadata`, and `score` with each answer.
"""

import random
import uuid
from bisect import bisect_right
from itertools import cycle, islice
from pathlib import Path

from datasets import Dataset
from lm_eval.models.utils import resolve_max_length
from transformers import AutoConfig, AutoTokenizer

ANSWER_TOKENS = 48  # room for the answer, `max_gen_toks` of the tasks: a UUID is 36 characters
GENESIS = Path(__file__).parents[2] / "conversion" / "data" / "genesis.txt"
NOISE = (
    "The road goes on past the mill. The wind is mild today. Leaves lie on the path. A dog sleeps by the door. "
    "Nothing else happens here."
)
COLORS = [
    "amber",
    "azure",
    "copper",
    "crimson",
    "golden",
    "indigo",
    "ivory",
    "olive",
    "scarlet",
    "silver",
    "violet",
    "white",
]
THINGS = [
    "anchor",
    "basket",
    "candle",
    "falcon",
    "garden",
    "harbor",
    "ladder",
    "lantern",
    "meadow",
    "pencil",
    "rocket",
    "saddle",
    "teapot",
    "violin",
]

OPENING = "A secret {kind} is hidden in this text. Remember it: you will be asked for it at the end.\n\n"
NEEDLE = "The secret {kind} of the {key} is {value}."
QUESTION = "\n\nWhat is the secret {kind} of the {key} in this text?\n"
ANSWER = "The secret {kind} of the {key} is"


def make_dataset(
    filler: str,
    kind: str,
    other_keys: int,
    max_seq_lengths: list[int] = (1024,),
    depths: list[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    samples: int = 2,
    seed: int = 0,
    **model_args,
) -> dict[str, Dataset]:
    """`samples` documents for each of `max_seq_lengths` and `depths`.

    Args:
        filler: `noise`, sentences that repeat, or `text`, Genesis from a sentence drawn for each document.
        kind: `number`, of seven digits, or `uuid`.
        other_keys: needles with other keys, at depths that are drawn.
        max_seq_lengths: tokens of prompt and answer together.
        depths: where in the filler the needle lies, 0 for its beginning and 1 for its end.
        model_args: what lm-eval was told of the model, of which `pretrained` and `tokenizer` are read.

    Raises:
        ValueError: no tokenizer is named, a depth is not from 0 to 1, or a length does not fit.
    """
    tokenizer = check_lengths(max_seq_lengths, **model_args)
    if not all(0 <= depth <= 1 for depth in depths):
        raise ValueError(f"`depths` {list(depths)}: give parts of the text, from 0 (its beginning) to 1 (its end).")
    sentences = GENESIS.read_text(encoding="utf-8") if filler == "text" else NOISE
    documents = []
    for length in max_seq_lengths:
        for depth in depths:
            for sample in range(samples):
                # The task is part of the seed: no two ask for the same value.
                rng = random.Random(f"{seed} {filler} {kind} {other_keys} {length} {float(depth)} {sample}")
                document = make_document(tokenizer, sentences.split(), kind, other_keys, length, depth, rng)
                documents.append(document | {"length": length, "depth": depth, "sample": sample})
    return {"test": Dataset.from_list(documents)}


def check_lengths(
    lengths: list[int],
    pretrained: str | None = None,
    tokenizer: str | None = None,
    trust_remote_code: bool = False,
    max_length: int | None = None,
    **_,
):
    """The tokenizer that lengths are counted with.

    Raises:
        ValueError: none is named, or a length is beyond what lm-eval feeds to the model: it would cut off the beginning.
    """
    if not (tokenizer or pretrained):
        raise ValueError("Needles count tokens: name the model's tokenizer, as in `--metadata tokenizer=FOLDER`.")
    counter = AutoTokenizer.from_pretrained(tokenizer or pretrained, trust_remote_code=trust_remote_code)
    if pretrained:
        config = AutoConfig.from_pretrained(pretrained, trust_remote_code=trust_remote_code)
        most = max_length or resolve_max_length(config, counter)
        if max(lengths) > most:
            raise ValueError(f"Length {max(lengths)}: {pretrained} takes {most} tokens. Ask for no longer texts.")
    return counter


def make_document(
    tokenizer, filler: list[str], kind: str, other_keys: int, length: int, depth: float, rng: random.Random
) -> dict:
    """Prompt, key and value, with as many of the words in `filler` as fit into `length`, the answer included.

    Raises:
        ValueError: not one word fits.
    """
    colors, things = rng.sample(COLORS, other_keys + 1), rng.sample(THINGS, other_keys + 1)
    key, *others = (f"{color} {thing}" for color, thing in zip(colors, things))
    value, *other_values = _draw_values(kind, other_keys + 1, rng)
    needles = [(depth, NEEDLE.format(kind=kind, key=key, value=value))]
    needles += [(rng.random(), NEEDLE.format(kind=kind, key=k, value=v)) for k, v in zip(others, other_values)]
    start = rng.choice(_sentence_ends(filler)[:-1])
    words = list(islice(cycle(filler), start, start + length))
    opening, question = OPENING.format(kind=kind), QUESTION.format(kind=kind, key=key)
    answer = ANSWER.format(kind=kind, key=key)

    def prompt(count: int) -> str:
        return opening + _hide(needles, words[:count]) + question

    def tokens(count: int) -> int:
        return len(tokenizer(prompt(count) + answer, verbose=False).input_ids)

    # Adding words adds tokens, so the largest number that fits is found by halves.
    count = bisect_right(range(1, length + 1), length - ANSWER_TOKENS, key=tokens)
    if count == 0:
        raise ValueError(
            f"Length {length}: opening, question and room for the answer take {tokens(1) + ANSWER_TOKENS} tokens. "
            "Ask for longer texts."
        )
    return {
        "input": prompt(count),
        "gen_prefix": answer,
        "key": key,
        "value": value,
        "prompt_tokens": tokens(count),
    }


def score(document: dict, answers: list[str]) -> dict[str, float]:
    """Whether the first answer has the value in it, letter by letter."""
    return {"found": float(document["value"] in answers[0])}


def _draw_values(kind: str, count: int, rng: random.Random) -> list[str]:
    if kind == "number":
        return [str(number) for number in rng.sample(range(1_000_000, 10_000_000), count)]
    return [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(count)]


def _sentence_ends(words: list[str]) -> list[int]:
    """How many words there are up to the end of each sentence, and 0 for their beginning."""
    return [0] + [index + 1 for index, word in enumerate(words) if word.endswith((".", "?", "!"))]


def _hide(needles: list[tuple[float, str]], words: list[str]) -> str:
    """`words` with each needle between the two sentences that are nearest to its depth."""
    ends, parts = _sentence_ends(words), list(words)
    places = [(min(ends, key=lambda end: abs(end - depth * len(words))), needle) for depth, needle in needles]
    for place, needle in sorted(places, reverse=True):
        parts.insert(place, needle)
    return " ".join(parts)

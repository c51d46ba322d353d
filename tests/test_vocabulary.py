"""Words and lengths of sentences in the documents and in messages, with exceptions that may only shrink.

`python -m tests.test_vocabulary` lowers the exceptions (tests/vocabulary.json) to what is found,
`--from-scratch` writes them anew, and `--show WORD` prints where a word or a kind of sentence is.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
EXCEPTIONS = ROOT / "tests" / "vocabulary.json"
MEDIAN, LONGEST, LONGEST_MESSAGE, MOST_SENTENCES = 16, 35, 40, 2
"""Words of a sentence in a document, words and sentences of a message."""


class Word(NamedTuple):
    """What is not written, and what is written instead."""

    pattern: str
    instead: str
    allowed: str = ""
    """A pattern of phrases in which it keeps its usual meaning."""
    files: tuple[str, ...] = ()
    """In which it keeps its usual meaning throughout."""
    messages_only: bool = False


_TABLES = r"(?:matrix|matrices|table|tables|embedding|embeddings|weight|frame|file|page|CSV)"
_OF = (
    rf"(?: of (?:an? |the |its |each |one |this |that |all )?(?:\w+ )?{_TABLES}\b| and columns?\b)"
)
_GRAPHS = ("docs/cuda_graphs.md", "docs/compile.md", "fastclip/engine/graphs.py",
           "fastclip/engine/capture.py", "fastclip/engine/step.py")  # fmt: skip
_ISE = (
    "normal|material|penal|recogn|initial|optim|general|summar|minim|maxim|random|quant|serial|synchron|"
    "special|custom|util|organ|parallel|vector|token|regular|standard|visual|real|character|memor"
)
_OUR = "behaviour|neighbour|colour|favour|honour|centre|cancelled|cancelling|labelled|labelling|licence"
WORDS = {
    "row": Word(
        r"\brows?\b", "sample", rf"\brows?{_OF}|\btable rows?\b",
        ("fastclip/ops/embedding.py", "fastclip/rules/embedding.py", "fastclip/ops/triton/embedding.py"),
    ),
    "look": Word(
        r"\b(?:an?|the|first|one|each|every|later|this|no|next|new|such) looks?\b|\blooked at\b|"
        r"\blooks (?:run|at|are|cost|see)\b", "dry run",
    ),
    "held against": Word(r"\bh(?:eld|olds?|olding) (?:\w+ ){0,3}against\b", "compared with"),
    "told": Word(r"\btold\b", "identified, recorded, detected"),
    "whose": Word(
        r"\b(?:by|of|know|knows|tell|say|says|ask|asks) whose\b|"
        r"\bwhose (?:it|they|each|every|these|those|rows?|entries)\b", "which sample it belongs to",
    ),
    "owner": Word(r"\bowners?\b", "which sample it belongs to"),
    "apart": Word(r"\bapart\b", "independent, separately", r"\bapart from\b"),
    "draw": Word(
        r"\b(?:an?|the|this|its|their|each|every|empty|Poisson|same|next|first|whole|no|one) draw\b|"
        r"\b(?:the|these|empty|Poisson|their|its|whole|two|of|weighted|truncated) draws\b|\bdraw's\b",
        "sampled batch",
    ),
    "refuse": Word(r"\brefus(?:e|es|ed|al|als|ing)\b", "raises an error"),
    "the way out": Word(r"\bways? out\b", "suggested fix"),
    "one a row": Word(
        r"\b(?:one|two|labels?|loss|losses|norms?|thresholds?|lengths?) an? "
        r"(?:row|sample|layer|patient|pair|pixel)\b", "per sample, per layer",
    ),
    "in the place of": Word(
        r"\bin (?:the|its|their) place of\b|\bt(?:akes?|ook|aking) the place\b", "instead of, replaces"
    ),
    "beside": Word(r"\bbeside\b", "alongside, in addition to, next to"),
    "spread": Word(r"\bspread(?:s|ing)?\b", "sharded"),
    "go on": Word(r"\b(?:go|goes|going|went|gone) on\b", "continue, resume"),
    "fold": Word(r"(?<![-\w])(?-i:fold(?:s|ed|ing)?)\b", "flattened"),
    "Where X,": Word(r"(?:^|(?<=[.!?] )|(?<=\n))(?-i:Where) [^.?!\n]{1,150}?, ", "If, When"),
    "but for": Word(r"\bbut for\b", "except"),
    "speaks of": Word(r"\bspeaks? (?:of|for)\b", "covers"),
    "ordinary": Word(r"\bordinar(?:y|ily)\b", "non-private, standard"),
    "serves": Word(r"\bserve[sd]\b", "is used"),
    "price": Word(r"\bpric(?:e|es|ed|ing)\b", "cost"),
    "keeper": Word(r"\b(?:book-?)?keepers?\b", "gradient state"),
    "tap": Word(r"\btap(?:s|ped)?\b", "output hook"),
    "replay": Word(
        r"\breplay(?:s|ed|ing)?\b", "per-sample recomputation",
        r"\bgraphs?\b[^.]{0,80}\breplay\w*|\breplay\w*[^.]{0,80}\bgraphs?\b", _GRAPHS,
    ),
    "slack": Word(r"\bslack\b", "rounding margin"),
    "accident": Word(r"\baccidents?\b", "coincidence"),
    "aside": Word(r"\baside\b", "shared input, preserved", r"\baside from\b"),
    "special": Word(r"\bspecial (?:rows?|samples?|values?|ones)\b", "edge samples"),
    "as it was": Word(r"\bstays? itself\b|\bas (?:it|they) (?:was|were)\b", "is unchanged"),
    "whoever": Word(r"\bwhoever\b|\bthat which\b", "you, the model, the engine"),
    "British spelling": Word(
        rf"\b(?:{_ISE})is(?:e|es|ed|er|ers|ing|ation|ations)\b|\b(?:{_OUR})\w*|\banalys(?:e|ed|es|ing)\b|"
        r"\bmodell(?:ed|ing)\b|\blearnt\b|\bwhilst\b", "US spelling", r"\bspecialises?\b(?!.)",
    ),
    "is no": Word(
        r"(?<!there )\b(?:is|are) no (?!longer)", "is not", messages_only=True
    ),
    "so that": Word(r"\bso that\b|\bwhich would\b|, since\b", "a new sentence", messages_only=True),
    "semicolon": Word(r";", "a new sentence", messages_only=True),
}  # fmt: skip
LONG, LONG_MESSAGE, THREE = (
    f"sentence over {LONGEST} words",
    f"message over {LONGEST_MESSAGE} words",
    f"message over {MOST_SENTENCES} sentences",
)


class Hit(NamedTuple):
    """One thing that is not to be."""

    kind: str
    file: str
    text: str


# -------------------------------------------------------------------------------------------------
# Documents: their prose, without code, names in backticks and targets of links.


def pages() -> list[Path]:
    """README, its neighbors, and docs/."""
    top = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
    return [*(ROOT / name for name in top), *sorted((ROOT / "docs").rglob("*.md"))]


def prose(markdown: str) -> list[str]:
    """Blocks of text, [kind of the first character kept]: "#" headings, "|" rows of tables, others.

    A list's item is a block of its own; lines of a paragraph are joined.
    """
    text = re.sub(r"<!--.*?-->", "", markdown, flags=re.S)
    text = re.sub(r"^( *)(```|~~~).*?^ *\2[ \t]*$", "\n", text, flags=re.S | re.M)
    text = re.sub(r"\A---\n.*?^---$", "", text, flags=re.S | re.M)
    text = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "CODE", text, flags=re.S)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"!?\[([^\]]*)\]\[[^\]]*\]|^\[[^\]]+\]:.*$", r"\1", text, flags=re.M)
    text = re.sub(r"<?https?://[^\s>)]+>?|</?\w[^>\n]*>|\{[#:.][^}]*\}", "", text)
    text = re.sub(r"\$[^$\n]+\$", "CODE", text)
    blocks: list[str] = []
    new = True
    for line in text.splitlines():
        bare = re.sub(r"^[> ]+", "", line).strip()
        bullet = re.match(r"(?:[-*+]|\d+[.)])\s+", bare)
        if not bare or re.fullmatch(r"[|:\- =*_]+", bare):
            new = True
        elif bare.startswith(("#", "|", "!!!", "???")):
            blocks.append(bare)
            new = True
        elif new or bullet:
            blocks.append(bare[bullet.end() :] if bullet else bare)
            new = False
        else:
            blocks[-1] += " " + bare
    return [re.sub(r"[*_]{1,3}(?=\w)|(?<=[\w.,;:!?)])[*_]{1,3}", "", block) for block in blocks]


_SHORT = re.compile(r"\b(?:e\.g|i\.e|etc|vs|cf|al|Fig|fig|Eq|eq|No|Sec|sec|pp|p|approx|resp)\.")


def sentences(block: str) -> list[str]:
    """Of a block; a colon or a semicolon ends none."""
    text = _SHORT.sub(lambda found: found[0].replace(".", ""), block)
    return [s for s in re.split(r"(?<=[.!?])[)\"']?\s+(?=[\"'(]?[A-Z0-9`\[])", text) if s.strip()]


def length(sentence: str) -> int:
    """Words: what is between spaces and has a letter or a digit."""
    return sum(1 for word in sentence.split() if re.search(r"\w", word))


# -------------------------------------------------------------------------------------------------
# Messages: texts of raise statements, of fastclip.errors.say and warnings.warn, and constants.


def texts(source: str) -> Iterator[str]:
    """Messages of a module; values in f-strings are X."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield from _joined(node.exc)
        elif isinstance(node, ast.Call) and _name(node.func) in ("say", "warn"):
            yield from _joined(node)


def constants(source: str) -> Iterator[str]:
    """Texts that a module keeps under a name in capitals: parts of messages."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and all(
            isinstance(target, ast.Name) and target.id.isupper() for target in node.targets
        ):
            text = _text(node.value)
            if len(text.split()) > 3:
                yield text


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _joined(node: ast.expr) -> Iterator[str]:
    """The text of each argument of a call."""
    arguments = (
        [*node.args, *(k.value for k in node.keywords)] if isinstance(node, ast.Call) else []
    )
    for argument in arguments:
        text = _text(argument)
        if " " in text.strip():
            yield text


def _text(node: ast.AST) -> str:
    """The strings in an expression, one behind the other; of a choice both ends."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.FormattedValue):
        inner = _text(node.value)
        return inner if " " in inner.strip() else "X"
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.BinOp):
        return _text(node.left) + (_text(node.right) if isinstance(node.op, ast.Add) else "")
    if isinstance(node, ast.IfExp):
        return max(_text(node.body), _text(node.orelse), key=len)
    return ""


# -------------------------------------------------------------------------------------------------
# What is found, and what may be.


def words_in(text: str, file: str, message: bool) -> Iterator[Hit]:
    """Words of the list in a text."""
    for name, word in WORDS.items():
        if file in word.files or (word.messages_only and not message):
            continue
        kept = re.sub(word.allowed, " ", text, flags=re.I) if word.allowed else text
        for found in re.finditer(word.pattern, kept, re.I | re.M):
            around = kept[max(0, found.start() - 40) : found.end() + 40].replace("\n", " ")
            yield Hit(name, file, around)


@cache
def found() -> tuple[tuple[Hit, ...], float]:
    """All that is found, and the median length of sentences in README and docs."""
    hits: list[Hit] = []
    lengths = []
    for page in pages():
        file = page.relative_to(ROOT).as_posix()
        for block in prose(page.read_text()):
            hits += words_in(block, file, message=False)
            if block.startswith(("#", "|", "!!!", "???")):
                continue
            for sentence in sentences(block):
                if file == "README.md" or file.startswith("docs/"):
                    lengths.append(length(sentence))
                if length(sentence) > LONGEST:
                    hits.append(Hit(LONG, file, sentence))
    for path in sorted((ROOT / "fastclip").rglob("*.py")):
        file, source = path.relative_to(ROOT).as_posix(), path.read_text()
        for text in constants(source):
            hits += words_in(text, file, message=True)
        for text in texts(source):
            hits += words_in(text, file, message=True)
            if length(text) > LONGEST_MESSAGE:
                hits.append(Hit(LONG_MESSAGE, file, text))
            if len(sentences(re.sub(r"\bSee \S+$", "", text).strip())) > MOST_SENTENCES:
                hits.append(Hit(THREE, file, text))
    return tuple(hits), median(lengths)


def counted() -> dict[str, dict[str, int]]:
    """By kind and file."""
    counts = Counter((hit.kind, hit.file) for hit in found()[0])
    table: dict[str, dict[str, int]] = {}
    for (kind, file), count in sorted(counts.items()):
        table.setdefault(kind, {})[file] = count
    return table


def listed() -> dict:
    """The exceptions: "median", and for each kind the files with how often they may have it."""
    return json.loads(EXCEPTIONS.read_text())


def too_many(table: dict[str, dict[str, int]], allowed: dict) -> list[str]:
    """What is found more often than it may be."""
    return [
        f"{file}: {count} of {kind!r}, {allowed.get(kind, {}).get(file, 0)} listed"
        + (f"; write: {WORDS[kind].instead}" if kind in WORDS else "")
        for kind, files in table.items()
        for file, count in files.items()
        if count > allowed.get(kind, {}).get(file, 0)
    ]


COMMAND = "python -m tests.test_vocabulary"


def test_no_file_has_more_than_is_listed() -> None:
    more = too_many(counted(), listed())
    assert not more, "\n".join([*more, f"`{COMMAND} --show KIND` prints them"])


def test_the_list_shrinks() -> None:
    """A file that no longer has a word is not listed for it."""
    table, kinds = counted(), {k: v for k, v in listed().items() if k != "median"}
    gone = [
        f"{kind}: {file}"
        for kind, v in kinds.items()
        for file in v
        if file not in table.get(kind, {})
    ]
    assert not gone, "\n".join([*gone, f"run {COMMAND}"])


def test_sentences_are_short() -> None:
    assert found()[1] <= max(MEDIAN, listed()["median"])


def test_prose_is_found() -> None:
    page = (
        "# A row\n\nSee `rows` and [a look](rows.md#rows).\nIt is\nlong.\n\n```python\nrow = 1\n```\n"
        "| row | b |\n|---|---|\n- one item. Another.\n- two\n  lines\n"
    )
    assert prose(page) == [
        "# A row", "See CODE and a look. It is long.", "| row | b |", "one item. Another.", "two lines",
    ]  # fmt: skip
    assert sentences("Off by 1.5 (e.g. here). It is. CODE is, too?") == [
        "Off by 1.5 (eg here).", "It is.", "CODE is, too?",
    ]  # fmt: skip


def test_messages_are_found() -> None:
    source = (
        'LIMIT = "a text of four words"\n"""a docstring"""\n'
        "def f(x):\n"
        '    say(f"one {x} and " "two", UserWarning)\n'
        '    raise Error(f"{x} is refused" + (" here" if x else " there now"))\n'
    )
    assert sorted(texts(source)) == ["X is refused there now", "one X and two"]
    assert [*constants(source)] == ["a text of four words"]


def kinds(text: str) -> list[str]:
    """Of a message."""
    return [hit.kind for hit in words_in(text, "x.py", message=True)]


def test_words_are_found_and_their_other_meanings_are_not() -> None:
    assert kinds("a row of the batch") == ["row"]
    assert (
        kinds("rows of a weight matrix, and the rows of the table, 61-fold, apart from noise") == []
    )
    assert kinds("it is refused, and the way out: it cannot be told apart") == [
        "told", "apart", "refuse", "the way out",
    ]  # fmt: skip
    assert kinds("Where nothing is, we go on") == ["go on", "Where X,"]
    assert kinds("the sampler draws numbers; an empty draw") == ["draw", "semicolon"]
    assert kinds("normalised neighbours, otherwise precise noise") == ["British spelling"] * 2


def main(arguments: list[str] | None = None) -> None:
    """Rewrite the exceptions, or print where one is."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--from-scratch", action="store_true", help="list whatever is found")
    parser.add_argument("--show", metavar="KIND", help="a kind, a file or a folder")
    options = parser.parse_args(arguments)
    table, middle = counted(), found()[1]
    if options.show:
        for hit in found()[0]:
            if options.show == hit.kind or hit.file.startswith(options.show):
                print(f"{hit.file}: {hit.kind}: {hit.text}")
        return
    new: dict = {"median": max(MEDIAN, middle), **table}
    if not options.from_scratch:
        old = listed()
        print(*too_many(table, old), sep="\n")
        new = {"median": max(MEDIAN, min(middle, old["median"]))}
        for kind, files in table.items():
            kept = {f: min(n, old[kind][f]) for f, n in files.items() if f in old.get(kind, {})}
            new |= {kind: kept} if kept else {}
    EXCEPTIONS.write_text(json.dumps(new, indent=1) + "\n")
    print(f"median {middle:g} words; {sum(sum(v.values()) for v in table.values())} exceptions")


if __name__ == "__main__":
    main()

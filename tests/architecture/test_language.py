"""Text is plain English: no phrase that CONTRIBUTING.md rules out, and no long sentence where users read."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.public import docstrings

ROOT = Path(__file__).resolve().parents[2]

FOLDERS = ("python", "csrc", "docs", "benchmarks", "examples", "tests", "tools")
SUFFIXES = (".py", ".pyi", ".h", ".cpp", ".inc", ".md", ".sh", ".toml")
TEXTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SUFFIXES),
]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MOST_WORDS = 25

GAP = r"""(?:\s*["']?\s*\n\s*(?:///?|\#|f?["'])?\s*|[ ]+|_)"""
"""What stands between two words of a phrase: spaces, a name's underscore, or a line break with comment marks or quotes
around it."""

CLAUSE_BEGINS = r"""(?:[.,;:(]\s+|//+\s*|\#\s*|\"\"\"|^\s*\n\s*|\b(?:is|are)\s)"""


def forbidden() -> re.Pattern[str]:
    """Returns a pattern of the phrases that rule 4 of CONTRIBUTING.md lists. There is no other list."""
    rule = re.search(
        r"^4\. Do not write (.*)\. Do not begin a clause with (.*)\.$",
        (ROOT / "CONTRIBUTING.md").read_text(),
        re.MULTILINE,
    )
    assert rule is not None
    anywhere, at_begin = ("|".join(GAP.join(p.split()) for p in re.findall('"(.*?)"', part)) for part in rule.groups())
    pattern = rf"(?<![^\W_])(?:{anywhere})(?![^\W_])|{CLAUSE_BEGINS}(?:{at_begin})\b"
    return re.compile(pattern, re.IGNORECASE | re.MULTILINE)


FORBIDDEN = forbidden()


def lines_with_a_phrase(text: str) -> list[int]:
    """Leaves out a phrase that stands alone in quotes: it is named, not used."""
    found = []
    for match in FORBIDDEN.finditer(text):
        before, after = text[: match.start()].rstrip(" ")[-1:], text[match.end() :].lstrip(" ")[:1]
        if before not in ('"', "'") or after != before:
            found.append(text.count("\n", 0, match.end()) + 1)
    return found


def test_no_text_uses_a_phrase_of_a_private_dialect():
    found = [f"{path.relative_to(ROOT)}:{line}" for path in TEXTS for line in lines_with_a_phrase(path.read_text())]
    assert not found, "CONTRIBUTING.md, How text is written, rule 4"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("{} waits", [1]),
        ("// {0}\nint x;  // x, {0}", [1, 2]),
        ('raise Error(f"it is {}")', [1]),
        ('named: "{}"', []),
        ("def a_name_with_{}_in_it():", [1]),
    ],
)
def test_a_phrase_would_be_seen(text, lines):
    phrase = "who" + "ever"
    assert lines_with_a_phrase(text.format(phrase, phrase)) == lines


@pytest.mark.parametrize("gap", [" ", "_", "\n", "\n    // ", "\n# ", ' "\n        f"'])
def test_a_phrase_of_two_words_would_be_seen(gap):
    assert lines_with_a_phrase(f"two, one of{gap}which waits")


def test_a_clause_of_what_would_be_seen():
    clause = "of " + "what blocks save"
    assert lines_with_a_phrase(f"int bytes;  // {clause}") == [1]
    assert not lines_with_a_phrase(f"// Returns half {clause}")


# ---- sentences ------------------------------------------------------------------------------------------------------


def blocks_of_page(text: str) -> Iterator[str]:
    """Yields the paragraphs and list items of a page. Code, tables, headings and pictures do not count."""
    block: list[str] = []
    for line in [*re.sub(r"^( *)```.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL).splitlines(), ""]:
        is_prose = line.strip() and not re.match(r"\s*(\||#|!\[|<| {4})", line)
        if block and (not is_prose or re.match(r"\s*([-*]|\d+\.) ", line)):
            yield " ".join(block)
            block = []
        if is_prose:
            block.append(re.sub(r"^\s*([-*]|\d+\.) ", "", line).strip())


def blocks_of_docstring(text: str) -> Iterator[str]:
    """Yields the paragraphs, list items and entries of sections. The code of an example does not count."""
    block: list[str] = []
    is_code = False
    for line in [*inspect.cleandoc(text).splitlines(), "end:"]:
        section = re.fullmatch(r"[A-Z][a-z]+:|end:", line)
        begins = not line.strip() or section or re.match(r"\s*- |    \S[^.`]*?: ", line)
        if block and begins:
            yield " ".join(block)
            block = []
        is_code = line == "Example:" if section else is_code
        if line.strip() and not section and not is_code:
            block.append(line.strip().removeprefix("- "))


def sentences(block: str) -> list[str]:
    """Cuts a block at full stops, question marks and exclamation marks that a space follows. Code is one word."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", block))
    return re.split(r"(?<=[.!?])[)\"'*]*\s+", plain)


def too_long(blocks: Iterator[str]) -> list[str]:
    found = [each for block in blocks for each in sentences(block)]
    return [each for each in found if len([word for word in each.split() if re.search(r"\w", word)]) > MOST_WORDS]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_no_sentence_of_a_page_is_long(page):
    assert not too_long(blocks_of_page(page.read_text()))


@pytest.mark.parametrize("name", docstrings())
def test_no_sentence_of_a_public_docstring_is_long(name):
    assert not too_long(blocks_of_docstring(docstrings()[name]))

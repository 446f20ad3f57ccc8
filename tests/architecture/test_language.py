"""Text is plain English: no phrase that CONTRIBUTING.md rules out, no long sentence in pages and in noria's code."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.texts import PAGES, ROOT, TEXTS

MOST_WORDS = 25

CODE = [
    path
    for path in TEXTS
    if path.relative_to(ROOT).parts[0] in ("Makefile", "csrc", "examples", "python", "setup.py", "tools")
]
PYTHON = [path for path in CODE if path.suffix in (".py", ".pyi")]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


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


# ---- words ----------------------------------------------------------------------------------------------------------

MOST_OWN_WORDS = 30


def words_of_tables(text: str) -> list[str]:
    """Returns the words that a page's tables of words explain. A row may have several, with commas between them."""
    tables = re.findall(r"^\| words? \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [word for table in tables for row in table.splitlines() for word in row.split("|")[1].strip().split(", ")]


def test_noria_has_few_words_of_its_own_and_tells_them_in_one_place():
    tables = {name_of(page): words for page in PAGES if (words := words_of_tables(page.read_text()))}
    assert list(tables) == ["CONTRIBUTING.md"]
    words = tables["CONTRIBUTING.md"]
    assert 20 < len(words) == len(set(words)) <= MOST_OWN_WORDS


def test_words_of_the_table_are_in_use():
    text = "\n".join(path.read_text() for path in CODE).lower()
    words = words_of_tables((ROOT / "CONTRIBUTING.md").read_text())
    assert [word for word in words if not re.search(rf"\b{GAP.join(word.split())}", text)] == []


def test_a_second_table_of_words_would_be_seen():
    assert words_of_tables("A\n\n| word | meaning |\n|---|---|\n| one, two words | x |\n| three | y |\n") == [
        "one",
        "two words",
        "three",
    ]


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


def docstrings_in(text: str) -> Iterator[str]:
    """Yields docstrings, private ones too, and the strings below fields and constants."""
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else ():
            if (
                isinstance(each, ast.Expr)
                and isinstance(each.value, ast.Constant)
                and isinstance(each.value.value, str)
            ):
                yield each.value.value


def blocks_of_comments(text: str, mark: str) -> Iterator[str]:
    """Yields the paragraphs and list items of comments. A table or an example, which is indented, does not count."""
    block: list[str] = []
    column = 0
    for line in [*text.splitlines(), ""]:
        found = re.match(rf"(.*?)(?<!\S)(?:{mark})(?:\s(.*)|$)", line)
        code, words = (found[1], found[2] or "") if found else (line, "")
        begins = code.strip() or len(code) != column or re.match(r"([-*]|\d+\.) ", words)
        is_indented = words.startswith("  ") and not code.strip() and not (block and re.match(r"[-*\d]", block[0]))
        if block and (begins or is_indented or not words.strip()):
            yield " ".join(block)
            block = []
        column = len(code)
        if words.strip() and not is_indented:
            block.append(words.strip())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_sentence_of_a_page_is_long(page):
    assert not too_long(blocks_of_page(page.read_text()))


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_no_sentence_of_a_docstring_is_long(path):
    found = [each for doc in docstrings_in(path.read_text()) for each in too_long(blocks_of_docstring(doc))]
    assert not found


@pytest.mark.parametrize("path", CODE, ids=name_of)
def test_no_sentence_of_a_comment_is_long(path):
    mark = "///?<?" if path.suffix in (".cpp", ".h", ".inc") else "#"
    assert not too_long(blocks_of_comments(path.read_text(), mark))


LONG = "One sentence " + "goes on and on, " * 6 + "until it ends."


@pytest.mark.parametrize(
    "text",
    [
        f"// {LONG}",
        f"  /// Short.\n  /// {LONG}",
        f"int x;  // {LONG}",
        f"int x;  // {LONG[:40]}\n        // {LONG[40:]}",
        f"// Two:\n// - short;\n// - {LONG[:40]}\n//   {LONG[40:]}",
        f"# {LONG}",
        f"x = 1  # {LONG}",
    ],
)
def test_a_long_comment_would_be_seen(text):
    assert len(too_long(blocks_of_comments(text, "#" if "#" in text else "///?<?"))) == 1


def test_what_stands_in_several_comments_is_no_sentence():
    half = LONG[:50]
    assert not too_long(blocks_of_comments(f"int x;  // {half}\nint y;  // {half}\n\n// {half}\n//\n// {half}", "//"))
    assert not too_long(blocks_of_comments(f"int x;  // {half}\n// {half}", "//"))
    assert not too_long(blocks_of_comments(f"// A table:\n//   {half}\n//   {half}\n//   {half}", "//"))


@pytest.mark.parametrize(
    "text", ['class _A:\n    """{}"""', 'def _f():\n    """{}"""', 'x = 1\n"""{}"""', '"""A.\n\n{}"""']
)
def test_a_long_docstring_would_be_seen(text):
    (doc,) = docstrings_in(text.format(LONG))
    assert len(too_long(blocks_of_docstring(doc))) == 1


def test_there_are_texts_to_look_at():
    assert len(TEXTS) > 500 and len(CODE) > 250 and len(PAGES) > 15

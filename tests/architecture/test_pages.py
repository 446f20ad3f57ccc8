"""Pages name source files and members that exist."""

from __future__ import annotations

import re

import pytest

from tests.architecture.texts import PAGES, ROOT

HEADERS = {path: path.read_text() for path in (ROOT / "csrc").rglob("*.h")}


def named(pattern: str) -> list[tuple[str, str]]:
    """Returns what the pattern's group matches inside backticks, with its page's path."""
    found = []
    for page in PAGES:
        for code in re.findall(r"`([^`\n]+)`", page.read_text()):
            found += [(str(page.relative_to(ROOT)), match[1]) for match in re.finditer(pattern, code)]
    return found


def has_member(name: str) -> bool:
    owner, member = name.split("::")
    return any(
        re.search(rf"^(class|struct) (NORIA\w+\(.*\) )?{owner}\b", text, re.M) and re.search(rf"\b{member}\(", text)
        for text in HEADERS.values()
    )


@pytest.mark.parametrize("page, name", named(r"^([A-Z]\w+::\w+)$"))
def test_a_member_that_a_page_names_exists(page, name):
    assert has_member(name), f"{page} names {name}"


@pytest.mark.parametrize("page, path", named(r"^((?:csrc|python|tests|benchmarks|tools|examples)/[\w./-]+)$"))
def test_a_file_that_a_page_names_exists(page, path):
    assert (ROOT / path).exists() or ((ROOT / page).parent / path).exists(), f"{page} names {path}"


def test_pages_name_some():
    assert len(named(r"^([A-Z]\w+::\w+)$")) > 5
    assert not has_member("Engine::play_until")

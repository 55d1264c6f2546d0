"""The README is short, its links lead somewhere, and every pass has its page."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import graphpasses.passes
from graphpasses.passes.runner import GraphPass

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_links_of_the_readme_lead_to_files() -> None:
    links = LINK.findall((ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_pass_has_its_page() -> None:
    passes = [getattr(graphpasses.passes, name) for name in graphpasses.passes.__all__]
    names = {each.name for each in passes if inspect.isclass(each) and issubclass(each, GraphPass)}
    pages = {page.stem for page in (ROOT / "docs" / "passes").glob("*.md")} - {"index"}
    assert pages == names

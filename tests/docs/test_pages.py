"""The README is short, its links lead somewhere, and every pass has its page."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import graphpasses.passes
from graphpasses.passes.runner import GraphPass

ROOT = Path(__file__).parents[2]
FILE = re.compile(r"`((?:graphpasses|tests|experiments|docs)/[\w/.*-]+\.(?:py|md))`")
MADE_BY_THE_WALK = {
    "graphpasses/passes/fsdp/remove_detach.py",
    "tests/passes/fsdp/test_remove_detach.py",
    "docs/passes/remove-detach.md",
}
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_links_lead_to_files() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("experiments/*/README.md")]  # mkdocs checks those of docs/
    links = [(page.parent, link) for page in pages for link in LINK.findall(page.read_text())]
    assert links
    assert [link for folder, link in links if not (folder / link).exists()] == []


def test_named_files_exist() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]
    named = {name for page in pages for name in FILE.findall(page.read_text())}
    assert len(named) > len(graphpasses.passes.__all__)
    assert {name for name in named if not list(ROOT.glob(name))} <= MADE_BY_THE_WALK


def test_every_pass_has_its_page() -> None:
    passes = [getattr(graphpasses.passes, name) for name in graphpasses.passes.__all__]
    names = {each.name for each in passes if inspect.isclass(each) and issubclass(each, GraphPass)}
    pages = {page.stem for page in (ROOT / "docs" / "passes").glob("*.md")} - {"index"}
    assert pages == names

"""Rules of the house that no other tool checks. Layers and import circles are import-linter's: see pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_LINES = 400


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_no_file_is_long() -> None:
    files = [path for folder in ("graphpasses", "experiments", "tests") for path in (ROOT / folder).rglob("*.py")]
    long = {str(path.relative_to(ROOT)): num_lines(path) for path in files if num_lines(path) > MAX_LINES}
    assert not long, f"split files of more than {MAX_LINES} lines: {long}"


def test_docstring_examples_run() -> None:
    skipped = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "graphpasses").rglob("*.py")
        if re.search(r"doctest:.*\+SKIP", path.read_text(encoding="utf-8"))
    }
    assert skipped == set()

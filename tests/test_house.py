"""Rules of the house that no other tool checks. Layers and import circles are import-linter's: see pyproject.toml."""

from __future__ import annotations

import ast
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


def test_every_tensor_that_is_made_names_its_device() -> None:
    # Or torch.set_default_device would move what graphpasses computes for itself.
    makers = {
        "arange",
        "empty",
        "eye",
        "full",
        "linspace",
        "ones",
        "rand",
        "randint",
        "randn",
        "randperm",
        "tensor",
        "zeros",
    }
    silent = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in (ROOT / "graphpasses").rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in makers
        if isinstance(call.func.value, ast.Name) and call.func.value.id == "torch"
        if not {"device", None} & {keyword.arg for keyword in call.keywords}
    ]
    assert silent == []

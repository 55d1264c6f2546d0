"""Rules of the house that no other tool checks. Layers and import circles are import-linter's: see pyproject.toml."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_LINES = 400


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_no_file_is_long() -> None:
    files = [
        path for folder in ("graphpasses", "experiments", "tests") for path in (ROOT / folder).rglob("*.py")
    ]
    long = {str(path.relative_to(ROOT)): num_lines(path) for path in files if num_lines(path) > MAX_LINES}
    assert long.keys() <= NOT_YET_SPLIT, f"split files of more than {MAX_LINES} lines: {long}"


# These are being split; the set is empty soon.
NOT_YET_SPLIT = {
    "graphpasses/graph/train_graph.py",
    "graphpasses/passes/embedding/columns.py",
    "tests/embedding/torchrec/test_tracing_scope.py",
    "tests/embedding/test_model_parallel.py",
    "tests/passes/embedding/test_lower_embedding_bags.py",
    "tests/passes/fsdp/test_deduplicate_shared.py",
}

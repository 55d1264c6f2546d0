"""The support matrix: each cell once, the page that is made of them, and the file that lets a run go on."""

from __future__ import annotations

from pathlib import Path

from experiments.harness.outcome import Outcome, Outcomes
from experiments.torchrec_support.cells import Cell, cells
from experiments.torchrec_support.table import make_page, read_cells

PAGE = Path("docs/torchrec_support.md")


def test_cells_have_names_of_their_own() -> None:
    names = [cell.name for cell in cells()]
    assert len(names) == len(set(names)) > 250


def test_page() -> None:
    a, b, c = (
        Cell("batches", "as all", "row_wise"),
        Cell("batches", "int32 ids"),
        Cell("batches", "as all", "grid"),
    )
    outcomes = {a: Outcome("bits", "4 graphs"), b: Outcome("refused", "why"), c: Outcome("fails", "why")}
    page = make_page(outcomes, {"test_rw #0": Outcome("passed"), "test_cw #0": Outcome("refused", "why not")})
    _, _, tables = page.partition("what follows is compiled.\n")
    matrix, _, upstream = tables.partition("## TorchRec's own tests\n")
    assert matrix == (
        "\nOf 3 cells: 1 bits, 1 refused, 1 fails.\n\n"
        "## Batches\n\n"
        "| batches | row_wise | result | grid |\n"
        "|---|---|---|---|\n"
        "| as all | bits, 4 graphs |  | fails [1] |\n"
        "| int32 ids |  | refused [1] |  |\n\n"
    )
    assert upstream.partition("launches none.\n")[2] == (
        "\nOf 2 examples: 1 passed, 1 refused.\n\n"
        "| test | result |\n|---|---|\n"
        "| test_rw #0 | passed |\n| test_cw #0 | refused [2] |\n\n"
        "## Messages\n\n1. `why`\n2. `why not`\n"
    )
    assert {(cell.group, cell.row, cell.column) for cell in outcomes} <= set(read_cells(page))


def test_the_page_has_the_cells_of_the_code_and_none_that_is_bad() -> None:
    page = PAGE.read_text()
    matrix = page.partition("## TorchRec's own tests")[0].partition("## ")[2]
    assert read_cells(matrix) == _in_tables(list(cells()))
    assert not any(f"| {kind}" in matrix for kind in ("differs", "fails", "no control", "not run"))


def _in_tables(every: list[Cell]) -> list[tuple[str, str, str]]:
    """Returns where cells stand, in the order of a page."""
    return read_cells(make_page(dict.fromkeys(every, Outcome("bits")), {}).partition("## ")[2])


def test_a_run_goes_on(tmp_path: Path) -> None:
    outcomes = Outcomes(tmp_path / "outcomes.jsonl")
    assert outcomes.read() == {}
    outcomes.add("a", Outcome("fails", "why"))
    outcomes.add("a", Outcome("bits"))
    assert outcomes.read() == {"a": Outcome("bits")}
    assert [Outcome("bits").is_bad, Outcome("refused").is_bad, Outcome("no control").is_bad] == [
        False,
        False,
        True,
    ]

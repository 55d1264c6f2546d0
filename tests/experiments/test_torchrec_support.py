"""The support matrix: each cell once, and the page that is made of them."""

from __future__ import annotations

from experiments.torchrec_support.cells import Cell, cells
from experiments.torchrec_support.outcome import Outcome
from experiments.torchrec_support.table import make_page


def test_cells_have_names_of_their_own() -> None:
    names = [cell.name for cell in cells()]
    assert len(names) == len(set(names)) > 100


def test_page() -> None:
    a, b, c = (
        Cell("batches", "as all", "row_wise"),
        Cell("batches", "int32 ids"),
        Cell("batches", "as all", "grid"),
    )
    page = make_page(
        {a: Outcome("bits", "4 graphs"), b: Outcome("refused", "why"), c: Outcome("fails", "why")}
    )
    assert page == (
        "| batches | row_wise | result | grid |\n"
        "|---|---|---|---|\n"
        "| as all | bits, 4 graphs |  | fails [1] |\n"
        "| int32 ids |  | refused [1] |  |\n\n"
        "1. `why`\n"
    )

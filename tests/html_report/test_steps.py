"""Strips of steps, and losses."""

from __future__ import annotations

from dataclasses import replace

from graphpasses.html_report.steps import draw_losses, draw_strip
from graphpasses.parity.compare import StepDifference, step_differences
from graphpasses.parity.run_file import Loss, Run
from tests.html_report.conftest import WriteRun


def test_a_cell_per_step(write_run: WriteRun) -> None:
    differs = {2: ["layers.0.up.bias"], 3: ["layers.0.up.bias", "layers.1.up.bias"]}
    cells = draw_strip(step_differences(write_run("a"), write_run("b", differs=differs)))
    assert [(cell.state, cell.text) for cell in cells] == [
        ("equal", "step 0: equal"),
        ("equal", "step 1: equal"),
        ("differs", "step 2: 1 gradients and 1 weights differ"),
        ("differs", "step 3: 2 gradients and 2 weights differ"),
    ]


def test_many_steps_share_cells_and_one_that_differs_shows() -> None:
    steps = [StepDifference(step, False, (), ("w",) if step == 1234 else ()) for step in range(10_000)]
    cells = draw_strip(steps)
    assert len(cells) == 400
    assert [cell.text for cell in cells if cell.state == "differs"] == [
        "steps 1225 to 1249: up to 0 gradients and 1 weights differ"
    ]
    assert cells[-1].text == "steps 9975 to 9999: equal"


def test_the_loss_alone() -> None:
    (cell,) = draw_strip([StepDifference(7, True, (), ())])
    assert (cell.state, cell.text) == ("differs", "step 7: 0 gradients and 0 weights differ, and the loss")


def test_losses(write_run: WriteRun) -> None:
    run = write_run("a", num_steps=3)
    chart = draw_losses([("A", run)])
    assert chart is not None
    assert (chart.lowest, chart.highest, chart.first, chart.last) == (2.0, 4.0, 0, 2)
    assert chart.lines[0].stretches == ("0.0,0.0 500.0,100.0 1000.0,200.0",)
    assert chart.lines[0].first_lost is None


def with_losses(run: Run, *losses: Loss) -> Run:
    steps = zip(run.steps, losses, strict=True)
    return replace(run, steps=tuple(replace(step, loss=loss) for step, loss in steps))


def test_losses_that_are_not_finite_break_the_line(write_run: WriteRun) -> None:
    losses = [Loss("float32", ("0",) * 2, values) for values in (("4.0", "4.0"), ("inf", "-inf"), ("3.0", "3.0"))]
    chart = draw_losses([("A", with_losses(write_run("a", num_steps=3), *losses))])
    assert chart is not None
    assert chart.lines[0].stretches == ("0.0,0.0", "1000.0,200.0")
    assert chart.lines[0].first_lost == 1


def test_losses_that_cannot_be_drawn(write_run: WriteRun) -> None:
    run = write_run("a", num_steps=3)
    assert draw_losses([("A", replace(run, steps=run.steps[:1]))]) is None
    assert draw_losses([("A", replace(run, steps=()))]) is None
    assert draw_losses([("A", with_losses(run, *[Loss("complex64", ("0",), ("(1+2j)",))] * 3))]) is None
    huge = draw_losses([("A", with_losses(run, *[Loss("float64", ("0",) * 3, ("1e308",) * 3)] * 3))])
    assert huge is not None
    assert huge.lines[0].first_lost is None


def test_the_most_of_several_steps() -> None:
    steps = [StepDifference(0, None, None, ("a",)), StepDifference(1, True, ("a", "b"), ())] * 300
    assert draw_strip(steps)[0].text == "steps 0 to 1: up to 2 gradients and 1 weights differ, and the loss"

"""Orders of addition as values: which are one sum, and under which names."""

from __future__ import annotations

from graphpasses.simulate.orders import Sums, namings, same_sum
from graphpasses.simulate.trees import show_order


def test_additions_commute_and_do_not_associate() -> None:
    sums = Sums()
    numbers = [sums.number(order, "sum", int) for order in ((0, 1, 2), (1, 0, 2), (2, 1, 0))]
    assert numbers[0] == numbers[1] != numbers[2]


def test_one_sum() -> None:
    assert same_sum((0, 1, 2), (1, 0, 2), "sum")
    assert not same_sum((0, 1, 2), (1, 0, 2), "avg")


def test_names_under_which_an_order_is_another() -> None:
    assert [names[5] for names in namings((0, 1, 2), (3, 4, 5), "sum")] == [2, 2]
    assert [*namings((0, 1, 2, 3), (0, 1, (2, 3)), "sum")] == []


def test_orders_as_text() -> None:
    assert show_order((1, 0, (3, 2))) == "1 0 (3 2)"
    assert show_order((1, 0, 2), names=(10, 20, 30), limit=2) == "20 10 …"

"""Maps of elements: views of them, and their one form."""

from __future__ import annotations

import torch

from graphpasses.proof.core.values import Piece, Values, whole
from graphpasses.proof.movement import gathered
from graphpasses.proof.pieces import joined, viewed


def test_views_cut_repeat_and_reorder() -> None:
    views = [((2, 1), (3, 1), 0), ((2, 2), (3, 1), 1), ((3, 2), (1, 3), 0)]
    assert viewed(whole(7, 6), (2, 3), views) == [
        (Piece(0, ((2, 1, 3),), 7, 0),),
        (Piece(0, ((2, 2, 3), (2, 1, 1)), 7, 1),),
        (Piece(0, ((3, 2, 1), (2, 1, 3)), 7, 0),),
    ]
    assert viewed(whole(7, 6), (2, 3), [((2, 2), (2, 1), 0)]) is None


def test_pieces_that_continue_each_other_are_one() -> None:
    assert joined([Piece(4, ((2, 1, 1),), 7, 4), Piece(0, ((4, 1, 1),), 7, 0)]) == whole(7, 6)


def test_transposed_tensor_is_cut_across_its_rows() -> None:
    (turned,) = viewed(whole(7, 6), (2, 3), [((3, 2), (1, 3), 0)]) or ()
    assert viewed(turned, (6,), [((4,), (1,), 1)]) == [
        (Piece(0, (), 7, 3), Piece(1, ((2, 1, 3),), 7, 1), Piece(3, (), 7, 2)),
    ]


def test_what_is_sent_is_whole_if_it_has_each_element_once() -> None:
    values = Values()
    source = values.source("x", 8)

    def remote(*starts: int) -> object:
        pieces = joined(Piece(4 * index, ((4, 1, 1),), source, start) for index, start in enumerate(starts))
        sent = values.moved(torch.float32, (8,), pieces)
        (piece,) = getattr(gathered(values, sent, 2, "group", (16,)), "pieces", ())
        return values.key(piece.source).parameters

    assert remote(0, 4) == ("group",)
    assert remote(0, 1) == ("group", 0, ((2, 1), (4, 1)))

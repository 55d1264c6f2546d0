"""What ranks agree on when they compile, so that each decides alike about what they do together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn

from graphpasses._torch.group_ranks import group_ranks, group_store
from graphpasses._torch.tracing import outside_tracing
from graphpasses.errors import AgreementError

__all__ = ["agree", "is_alone"]

T = TypeVar("T")

# Answers live as long as the model. A rank may compile it again when the others do not (its batches became dynamic):
# it must then decide as it did together with them, and must not wait for them.
_ANSWERS: WeakKeyDictionary[nn.Module, dict[object, list[Any]]] = WeakKeyDictionary()


def is_alone(group: dist.ProcessGroup) -> bool:
    """Whether no other process belongs to ``group``: it has one rank, or ranks that exist in name only."""
    return group.size() == 1 or dist.get_backend(group) == "fake"


def agree(signature: Sequence[str], facts: T, *, model: nn.Module, group: dist.ProcessGroup) -> list[T]:
    """Returns what each rank of ``group`` knows, once they all met the same question.

    All ranks must call it in the same order for the same models; it communicates when the rank has not asked this
    before.

    Args:
        signature: the question: what every rank must see alike, line by line.
        facts: what this rank knows; anything that can be pickled.
        model: the model that is compiled, whose question it is.
        group: the ranks that must decide alike.

    Returns:
        The facts of each rank, in group order; ``[facts]`` alone where the group has no other process.

    Raises:
        AgreementError: the signatures of two ranks differ, on every rank of the group; or a rank asks nothing within
            the timeout of ``init_process_group``, on those that wait for it.

    Example:
        >>> agree(["all_to_all_single"], {"rank": dist.get_rank()}, model=model, group=dist.group.WORLD)
        ... # doctest: +SKIP
        [{'rank': 0}, {'rank': 1}]
    """
    if is_alone(group):
        return [facts]
    answers = _ANSWERS.setdefault(model, {})
    question = (group.group_name, tuple(signature))
    if question not in answers:
        answers[question] = _exchange(tuple(signature), facts, group)
    return answers[question]


def _exchange(signature: tuple[str, ...], facts: T, group: dist.ProcessGroup) -> list[T]:
    everyone: list[Any] = [None] * group.size()
    _meet(signature, group)
    with outside_tracing():
        dist.all_gather_object(everyone, (signature, facts), group=group)
    ranks = group_ranks(group)
    first = everyone[0][0]
    for rank, (other, _) in zip(ranks, everyone, strict=True):
        for index, (a, b) in enumerate(zip_longest(first, other, fillvalue="nothing more")):
            if a != b:
                raise AgreementError(
                    f"ranks {ranks[0]} and {rank} compile different collectives: number {index} is {a} on rank "
                    f"{ranks[0]}, {b} on rank {rank}; every rank must run the same modules in the same order"
                )
    return [known for _, known in everyone]


def _meet(signature: Sequence[str], group: dist.ProcessGroup) -> None:
    """Returns once every rank of ``group`` asks its next question.

    They meet at the store: a collective that another rank does not launch waits, or meets another one there.
    """
    store, ranks, rank = group_store(group), group_ranks(group), dist.get_rank()
    number = store.add(f"graphpasses/agree/{rank}", 1)
    keys = {other: f"graphpasses/agree/{number}/{other}" for other in ranks}
    store.set(keys[rank], "")
    try:
        store.wait(list(keys.values()))
    except RuntimeError as error:
        missing = [other for other, key in keys.items() if not store.check([key])]
        if not missing:
            return  # the last one came just now
        store.delete_key(keys[rank])
        store.add(f"graphpasses/agree/{rank}", -1)
        raise AgreementError(
            f"rank {rank} compiles a graph whose collectives it shares with ranks {missing}, but these compiled none "
            f"within {store.timeout} ({'; '.join(signature[:2])}); every rank must compile the same graphs in the "
            "same order: TORCH_LOGS=recompiles shows why a rank compiles again"
        ) from error

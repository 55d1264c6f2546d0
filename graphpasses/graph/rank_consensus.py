"""What the ranks of a captured step decide together, and what each hears of another that failed."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.tensor import DTensor

from graphpasses._torch.dtensor import local_part
from graphpasses._torch.fake_mode import is_fake
from graphpasses._torch.group_ranks import gathered, group_store, mesh_group_names, named_group, ranks_are_processes
from graphpasses.errors import AgreementError
from graphpasses.graph.certificate import Certificate, Launch, find_unlike_launch
from graphpasses.graph.nodes import collective_group

T = TypeVar("T")
Launches = Mapping[str, Sequence[Launch]]
"""By what has them."""


class RankConsensus:
    """Asks the ranks with which a step communicates; each must ask at the same time.

    ``groups`` are the names of its process groups, along the axes of a mesh in turn; ``device`` is the model's.
    """

    def __init__(self, groups: Iterable[str], device: torch.device) -> None:
        self._groups = tuple(dict.fromkeys(groups))
        self._device = device

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of the groups that are asked."""
        return () if _ASKS_NOBODY.get() else self._groups

    @classmethod
    def of_graph(cls, graph: fx.Graph, device: torch.device) -> RankConsensus:
        """Returns the consensus of the ranks with which a graph communicates, on the model's device."""
        return cls((str(g) for g in map(collective_group, graph.nodes) if g is not None), device)

    @classmethod
    def of_model(cls, model: nn.Module) -> RankConsensus:
        """Returns the consensus of the ranks that hold shards of a model's parameters; of fake ones none is asked."""
        parameters = list(nn.Module.parameters(model))
        meshes = dict.fromkeys(each.device_mesh for each in parameters if isinstance(each, DTensor))
        if any(is_fake(local_part(each)) or each.is_meta for each in parameters):
            meshes = {}
        groups = (str(name) for mesh in meshes for name in mesh_group_names(mesh))
        return cls(groups, next(iter(parameters), torch.empty(0, device="cpu")).device)

    def all_ranks(self, flags: list[bool]) -> list[bool]:
        """Returns which flags are True on all ranks; each rank has as many."""
        if not self.groups:
            return flags
        return [bool(flag) for flag in self._least([*map(int, flags)])]

    def _least(self, numbers: list[int]) -> list[int]:
        """Returns of each number the least of all ranks."""
        least = torch.tensor(numbers, device=self._device)
        for group in self.groups:
            dist.all_reduce(least, dist.ReduceOp.MIN, group=named_group(group))
        return [int(number) for number in least.tolist()]

    def of_first(self, value: T) -> T:
        """Returns, on all ranks, the value of the first of them."""
        for group in map(named_group, self.groups):
            value = gathered(value, group)[0]
        return value

    def check_launches(self, launches: Launches) -> None:
        """Raises on all ranks if they launch different collectives, and so would wait for ever."""
        self._check_alike(launches, _unlike_launches, "launch different collectives")

    def check_proved_launches(self, certificate: Certificate | None) -> None:
        """Likewise by what is proved of the step on each rank; None is not known, and then it compares nothing."""
        if self.groups and self.all_ranks([certificate is not None])[0] and certificate is not None:
            self.check_launches({"the step": certificate.launches, **certificate.rounding})

    def check_given(self, **given: object) -> None:
        """Raises on all ranks if what they were given for a step, by name, is not the same on all."""
        for name, value in given.items():
            what = f"capture one step with different {name}"
            self._check_alike(repr(value), partial(_unlike, what), f"were given different {name}")

    def check_waiting(self, waiting: str) -> None:
        """Raises on all ranks if the gradients that wait to be reduced, or are to wait, are others on some."""
        what = "run one step with different gradients that wait"
        self._check_alike(waiting, partial(_unlike, what), what)

    def _check_alike(
        self, fact: T, difference: Callable[[tuple[int, T], tuple[int, T]], str | None], elsewhere: str
    ) -> None:
        """Raises on all ranks if facts of two differ: what ``difference`` says, or where that says nothing
        ``elsewhere``.
        """
        if not self.groups:
            return
        digest = zlib.crc32(repr((elsewhere, fact)).encode())
        least, negative = self._least([digest, -digest])
        if least == -negative:
            return
        found = None
        for group in map(named_group, self.groups):  # all: others wait there
            ranks = dist.get_process_group_ranks(group)
            (first, (one, its)), *others = zip(ranks, gathered((elsewhere, fact), group), strict=True)
            for rank, (other, theirs) in others:
                if one != other:
                    found = found or (
                        f"ranks {first} and {rank} are at different places: rank {first} asks whether some {one}, "
                        f"rank {rank} whether they {other}. Capture steps, and call them, in one order on all ranks, "
                        "with one check="
                    )
                else:
                    found = found or difference((first, its), (rank, theirs))
        if not self.all_ranks([found is None])[0]:
            raise AgreementError(found or f"other ranks {elsewhere}; their messages say which")

    @contextmanager
    def raised_together(self, error: Exception, *, communicates: bool = True) -> Iterator[Callable[[], None]]:
        """Raises on all ranks if the block does on one, before it calls what it is given; ``error`` is for the
        others.

        In a block that ``communicates`` these may wait for the one that raised. Then they raise what it did, once
        what they wait for fails; it launches nothing before all are through, since that would meet what they sent.
        """
        has_met = False

        def meet() -> None:
            nonlocal has_met
            has_met = True
            try:
                if communicates:
                    self._arrive(waits=False)
                is_everywhere = self.all_ranks([True])[0]
            except RuntimeError as closed:  # one that failed waited for this rank no longer
                if cause := FailedRanks(self.groups).heard(closed):
                    raise AgreementError(cause) from closed
                raise
            if not is_everywhere:
                raise error

        try:
            yield meet
        except Exception as raised:
            if not has_met and communicates:
                self._meet_failed(raised)
            elif not has_met:
                self.all_ranks([False])
            raise
        if not has_met:
            meet()

    def _meet_failed(self, raised: Exception) -> None:
        """Tells the others that this rank raised; where they no longer meet, raises what another raised before."""
        failed = FailedRanks(self.groups)
        cause = failed.heard(raised)
        if cause is None:
            failed.tell(raised)
        with suppress(RuntimeError):
            if self._arrive(waits=True):
                self.all_ranks([False])
                failed.forget()
                return
        if cause is not None:
            raise AgreementError(cause) from raised

    def count_call(self) -> None:
        """Counts a call of a step that communicates so: all ranks call their steps in one order."""
        _NUM_CALLS.update(self.groups)

    def all_come(self, error: Exception | None, to: str = "call", patience: timedelta | None = None) -> bool:
        """Whether all ranks come here in this call, while they have patience; each has an ``error`` that it raises
        otherwise, if it does. ``to`` says what for: some come for one thing, and some for another.

        Those that do not come go on, and may wait for this one: they hear of the error. One that comes in its next
        call has sent what the others have not, and comes too late.
        """
        failed = FailedRanks(self.groups)
        if error is not None:
            failed.tell(error)
        for name in self.groups:
            if not ranks_are_processes(group := named_group(name)):
                continue
            store, key = group_store(group), f"{_COMING} to {to} {_NUM_CALLS[name]}"
            before = store.add(key, 1) - 1
            is_here = f"{key}, all {before // group.size()}"  # they may come twice before the next call
            if (before + 1) % group.size() == 0:
                store.set(is_here, "")
            # Who goes on alone has others wait meanwhile.
            until = min(patience or _LONG_PATIENCE, store.timeout if error is not None else store.timeout / 4)
            end = monotonic() + until.total_seconds()
            while not _is_set(store, is_here):
                if store.check([_HEARD]) or monotonic() >= end:
                    if (store.add(key, -1) + 1) % group.size():
                        return False
                    store.add(key, 1)  # the last came in this moment, and knows that all are here
        failed.forget()
        return True

    def check_all_compare(self) -> None:
        """Raises on a rank that compares its step with eager where others do not: both would wait for ever."""
        if not self.groups:
            return
        alone = AgreementError(
            f"step.check was called on rank {dist.get_rank()}, and not on all: the step and eager communicate. Call "
            "it on all ranks, also where one alone prints what it says"
        )
        if not self.all_come(alone, "check after call"):
            raise alone

    def _arrive(self, *, waits: bool) -> bool:
        """Says that this rank comes to a meeting; if it waits, returns whether all do while it has patience."""
        for group in filter(ranks_are_processes, map(named_group, self.groups)):
            store = group_store(group)
            number = store.add(f"{_MEETING} of rank {dist.get_rank()}", 1)
            if store.add(f"{_MEETING} {number}: ranks", 1) == group.size():
                store.set(f"{_MEETING} {number}", "")
            if waits:
                try:
                    store.wait([f"{_MEETING} {number}"], min(_PATIENCE, store.timeout))
                except RuntimeError:
                    return False
        return True


_ASKS_NOBODY = ContextVar("asks nobody", default=False)


@contextmanager
def nobody_asked() -> Iterator[None]:
    """Lets a rank decide alone in the block what the others do not come for."""
    token = _ASKS_NOBODY.set(True)
    try:
        yield
    finally:
        _ASKS_NOBODY.reset(token)


def _is_set(store: Any, key: str) -> bool:
    """Whether a key is set, or will be in a moment."""
    try:
        store.wait([key], _MOMENT)
    except RuntimeError:
        return False
    return True


def _unlike(what: str, one: tuple[int, str], other: tuple[int, str]) -> str | None:
    (first, text), (rank, another) = one, other
    if text == another:
        return None
    return f"ranks {first} and {rank} {what}: {text} and {another}. Give all ranks the same"


def _unlike_launches(one: tuple[int, Launches], other: tuple[int, Launches]) -> str | None:
    (first, launches), (rank, others) = one, other
    places = ((name, find_unlike_launch(launches[name], others[name])) for name in launches if name in others)
    name, place = next((each for each in places if each[1] is not None), ("", None))
    if place is None:
        return None
    its = [each[name][place] if place < len(each[name]) else None for each in (launches, others)]
    mine, theirs = (str(each or "nothing") for each in its)
    if mine == theirs:
        mine_ranks, its_ranks = ({*each.ranks} if each is not None else set() for each in its)
        is_other = mine_ranks != its_ranks and not mine_ranks.isdisjoint(its_ranks)
        instead = f", of ranks {sorted(its_ranks)} instead of {sorted(mine_ranks)}"
        theirs += instead if is_other else ", with elements in other places"
    return (
        f"ranks {first} and {rank} would wait for each other, or mix what they send: as collective {place} of "
        f"{name}, rank {first} launches {mine}, rank {rank} {theirs}. Let loss_fn run the same modules and "
        "collectives in one order on all ranks (some alone may communicate after the step), and run the same passes; "
        "a pass must not decide by what only its rank knows"
    )


_KEY = "graphpasses: what stopped a rank in a step"
_HEARD = "graphpasses: another rank has heard what stopped one"
_MEETING = "graphpasses: meeting"
_COMING = "graphpasses: coming"
_MOMENT = timedelta(seconds=0.5)
_NUM_CALLS: Counter[str] = Counter()  # of steps, by the name of a group in which they communicate
_LONG_PATIENCE = timedelta(minutes=5)  # of one that has sent nothing: others may write a checkpoint before
ALONE_AFTER = timedelta(seconds=5)
"""How long a rank waits for others that may come, before it goes on alone."""
_PATIENCE = timedelta(seconds=60)  # of a rank that failed with others that may wait for it until their timeout


class FailedRanks:
    """Leaves what a rank fails with in its groups' stores, where others look once a collective fails."""

    def __init__(self, groups: Sequence[str]) -> None:
        self._groups = groups
        self._has_told = False

    @contextmanager
    def told(self) -> Iterator[None]:
        """Tells the others if the block raises; of a collective that another rank left, raises why it did."""
        try:
            yield
        except AgreementError:  # the others raise, too
            raise
        except Exception as error:
            cause = self.heard(error)
            if cause is not None:
                raise AgreementError(cause) from error
            self.tell(error)
            raise
        self.forget()

    def tell(self, error: Exception) -> None:
        """Leaves for the others what this rank raised."""
        for group in self._groups:
            text = f"rank {dist.get_rank()} stopped: {type(error).__name__}: {error}"
            with suppress(RuntimeError):  # a store that is gone, or fake: the error itself is raised
                group_store(named_group(group)).set(_KEY, text)
                self._has_told = True

    def heard(self, error: Exception) -> str | None:
        """Returns what another rank told first, unless it is the same, or this one did not fail in a collective."""
        for group in self._groups if isinstance(error, RuntimeError) else ():
            try:
                store = group_store(named_group(group))
                text = store.get(_KEY).decode() if store.check([_KEY]) else ""
            except RuntimeError:  # the rank that kept the store is gone
                continue
            is_own = text.startswith(f"rank {dist.get_rank()} ")
            if text and not is_own and not text.endswith(f": {error}"):
                store.set(_HEARD, "")
                return f"{text}. This rank waited for it: {error}"
        return None

    def forget(self) -> None:
        """Takes back what this rank left."""
        for group in self._groups if self._has_told else ():
            for key in (_KEY, _HEARD):
                group_store(named_group(group)).delete_key(key)
        self._has_told = False

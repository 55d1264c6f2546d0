"""What stopped another rank: a rank that waits in a collective for one that failed says why that one did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch.distributed as dist

from graphpasses._torch.group_ranks import group_store, named_group
from graphpasses.errors import AgreementError

_KEY = "graphpasses: what stopped a rank in a step"


class FailedRanks:
    """Leaves what a rank fails with in the stores of its groups, where the others look once a collective fails.

    Nobody waits for it, and nothing is asked while all goes well.

    Args:
        groups: the names of the groups with which the step communicates.

    Example:
        >>> with FailedRanks(()).told():  # it communicates with no rank
        ...     pass
    """

    def __init__(self, groups: Sequence[str]) -> None:
        self._groups = groups
        self._has_told = False

    @contextmanager
    def told(self) -> Iterator[None]:
        """Tells the others if the block raises.

        Raises:
            AgreementError: in the place of the error of a collective that another rank left.
        """
        try:
            yield
        except AgreementError:  # the others raise, too
            raise
        except Exception as error:
            cause = self._heard(error) if isinstance(error, RuntimeError) else None
            if cause is not None:
                raise AgreementError(f"{cause}. This rank waited for it: {error}") from error
            self._tell(error)
            raise
        if self._has_told:
            self._forget()

    def _tell(self, error: Exception) -> None:
        for group in self._groups:
            text = f"rank {dist.get_rank()} stopped: {type(error).__name__}: {error}"
            with suppress(RuntimeError):  # a store that is gone, or fake: the error itself is raised
                group_store(named_group(group)).set(_KEY, text)
                self._has_told = True

    def _heard(self, error: Exception) -> str | None:
        """Returns what another rank told first, unless it is the same."""
        for group in self._groups:
            try:
                store = group_store(named_group(group))
                text = store.get(_KEY).decode() if store.check([_KEY]) else ""
            except RuntimeError:  # the rank that kept the store is gone
                continue
            is_own = text.startswith(f"rank {dist.get_rank()} ")
            if text and not is_own and not text.endswith(f": {error}"):
                return str(text)
        return None

    def _forget(self) -> None:
        for group in self._groups:
            group_store(named_group(group)).delete_key(_KEY)
        self._has_told = False

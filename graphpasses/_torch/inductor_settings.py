"""Settings of Inductor that stay as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch._inductor import config

_DIVISION = "eager_numerics.division_rounding"


@contextmanager
def divisions_kept() -> Iterator[dict[str, bool]]:
    """Yields the setting by which Triton rounds quotients, and lets it be the same again afterwards."""
    kept = {_DIVISION: config.eager_numerics.division_rounding}
    with config.patch(kept):
        yield kept

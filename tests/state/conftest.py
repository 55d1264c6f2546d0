"""What the tests of what a step holds constant share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def scale_restored(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts back a module's global ``SCALE``, which its tests change."""
    if hasattr(request.module, "SCALE"):
        monkeypatch.setattr(request.module, "SCALE", request.module.SCALE)

"""What Dynamo makes for its logs is made where they are on."""

from __future__ import annotations

import logging

import pytest
from torch._dynamo import guards, symbolic_convert

from graphpasses._torch.dynamo import nothing_made_for_logs


@pytest.mark.parametrize("name", ["output_graph.__trace_call", "guards.__guards"])
@pytest.mark.parametrize("is_on", [False, True])
def test_nothing_is_made_for_logs_that_are_off(name: str, is_on: bool) -> None:
    logger = logging.getLogger(f"torch._dynamo.{name}")
    level = logger.level
    before = symbolic_convert.get_funcname, guards.profile_guard_manager
    logger.setLevel(logging.DEBUG if is_on else logging.WARNING)
    try:
        with nothing_made_for_logs():
            inside = symbolic_convert.get_funcname, guards.profile_guard_manager
    finally:
        logger.setLevel(level)
    assert [a is b for a, b in zip(before, inside, strict=True)] == [is_on, is_on]
    assert (symbolic_convert.get_funcname, guards.profile_guard_manager) == before

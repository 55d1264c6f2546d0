"""What a proof takes for granted: named axioms, and the operators of which they speak."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphpasses.proof.core.values import Result

Rule = Callable[..., Result]

AXIOMS: dict[str, str] = {}
"""What a proof takes for granted, by name; each is tested on random data."""

RULES: dict[Any, tuple[str, Rule]] = {}
"""The axiom of each operator that has one, and what it does to values; called with Values, the result's fake value
or values, and the operator's arguments."""


def axiom(name: str, statement: str, *targets: Any) -> Callable[[Rule], Rule]:
    """Registers what a rule says of operators; the rule returns None where it cannot tell."""
    AXIOMS[name] = statement

    def register(rule: Rule) -> Rule:
        RULES.update((target, (name, rule)) for target in targets)
        return rule

    return register

"""Describes a step's collectives in the same words on every rank."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from graphpasses._torch.schemas import named_arguments
from graphpasses.graph import ALL_TO_ALL, argument
from graphpasses.graph.certificate import Launch
from graphpasses.proof.core.values import Value, Values
from graphpasses.proof.evaluated import Collective, Evaluated
from graphpasses.proof.terms import Term


def launches_of(values: Values, before: Evaluated, after: Evaluated) -> tuple[Launch, ...]:
    """Returns the launches of a rewritten step, each with what it sends.

    What is sent is described by the inputs, or by the launches of the step as it was captured, that have the same
    elements: sizes and padding, which differ between ranks, are not.
    """
    owners: dict[int, list[int]] = {}
    for index, launch in enumerate(before.collectives):
        for sent in launch.sent:
            for source in _sources(values, sent):
                owners.setdefault(source, []).append(index)
    groups = list(dict.fromkeys(launch.group for launch in after.collectives))
    return tuple(
        Launch(_call(launch.node), groups.index(launch.group), tuple(_contents(values, owners, launch)))
        for launch in after.collectives
    )


def _call(node: fx.Node) -> str:
    sent = argument(node).meta.get("val")
    if node.target == ALL_TO_ALL or not isinstance(sent, torch.Tensor):  # each rank has splits of its own
        return f"{node.target} of {getattr(sent, 'dtype', None)}"
    given = [*named_arguments(node).values()][1:-1]  # between what is sent and the group
    plain = ", ".join(str(each) for each in given if isinstance(each, (str, int)))
    return f"{node.target}({plain}) of {sent.numel()} {sent.dtype}"


def _contents(values: Values, owners: dict[int, list[int]], launch: Collective) -> dict[str, None]:
    contents: dict[str, None] = {}
    for sent in launch.sent:
        for source in _sources(values, sent):
            key = values.key(source)
            if key[0] == "padding":
                contents[str(key[1]).removesuffix(" (_local_tensor)")] = None
            elif key[0] == "result" and key[1][0] == "input":
                contents[str(key[1][1]).removesuffix(" (_local_tensor)")] = None
            elif source in owners:
                contents["launch " + "/".join(map(str, dict.fromkeys(owners[source])))] = None
    return contents


def _sources(values: Values, value: Value) -> Iterator[int]:
    """Yields the sources of a value, without what is done to each element; sums by their summands."""
    if value.rows is not None:
        value = values[value.rows[1]]
    pending = [value.source] if value.pieces is None else [piece.source for piece in value.pieces]
    while pending:
        source = pending.pop(0)
        if source is None:
            continue
        key = values.key(source)
        if isinstance(key, Term) and key.kind == "tensor":
            yield from _sources(values, values[key.parameters[0]])
        elif isinstance(key, Term):
            pending = [*key.operands, *pending]
        elif key[0] == "row":
            pending = [key[1], *pending]
        elif key[0] != "constant":
            yield source

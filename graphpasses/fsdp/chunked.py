"""Buckets of a step that runs a module in chunks, each with a backward of its own."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from graphpasses.errors import PlanError
from graphpasses.fsdp.layout import Layout
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.identity import IdentityMap


def chunked_buckets(plan: BucketPlan, layout: Layout, model: nn.Module, fqn: str) -> tuple[BucketPlan, Layout]:
    """Takes the parameters of a module that runs in chunks out of their buckets; returns plan and layout.

    A chunked loss calls backward on each chunk, and turns gradient synchronisation on for the last one: FSDP2 then
    reduces the module's parameters by themselves, their gradients added in the reduction's dtype, and the rest of
    their group later, with a tied parameter's other gradients. Source: FSDP2's ``_fsdp_param_group.py``,
    ``post_backward``, and ``_fsdp_param.py``, ``to_accumulated_grad_if_needed``; torchtitan's ``ChunkedLossWrapper``.

    Raises:
        PlanError: a parameter of the module is in no entry, or has its first name elsewhere than another of its
            names in the module has.
    """
    identity = IdentityMap.of(model)
    names = {identity.canonical(name): name for name, _ in model.get_submodule(fqn).named_parameters(prefix=fqn)}
    stay = {
        aliases[0]
        for aliases in identity.parameters
        if aliases[0] in names and not all(alias.startswith(f"{fqn}.") for alias in aliases)
    }
    if first := stay & set(names.values()):
        raise PlanError(
            f"{min(first)!r} is the first name of a tied parameter, and its module runs in chunks; register that "
            "module behind the one it is tied to"
        )
    entries, found = [], set[str]()
    for entry in plan.entries:
        known = {name: identity.canonical(name) for name in entry.fqns if entry.kind == "parameters"}
        inside = [canonical for canonical in known.values() if canonical in names]
        leaves = {canonical for canonical in inside if canonical not in stay}
        found.update(inside)
        if inside:
            chunked = tuple(names[canonical] for canonical in inside)
            entries.append(replace(entry, fqns=chunked, name=f"{fqn}, in chunks", accumulates=True))
        if rest := tuple(name for name in entry.fqns if known.get(name) not in leaves):
            entries.append(replace(entry, fqns=rest))
    if missing := names.keys() - found:
        raise PlanError(f"no plan entry by parameters has {min(missing)!r} of module {fqn!r}, which runs in chunks")
    return replace(plan, entries=tuple(entries)), layout.apart(names, stay)

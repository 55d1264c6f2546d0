"""The byte order of a bucket: the order in which eager FSDP2 packs the parameters of one ``fully_shard`` call.

An element's byte offset in its bucket decides its NCCL ring, hence the order of addition, hence its bits. Which bytes
each parameter takes follows from this order and its shape: see ``make_bucket_layout`` in ``layout.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn


def managed_parameters(model: nn.Module, calls: Sequence[Sequence[str]]) -> list[list[str]]:
    """Returns which parameters each ``fully_shard`` call manages, in byte order.

    FSDP2's rule for one call: from each module in argument order a depth-first post-order over ``children()``,
    shared modules once, without modules that another call takes; then each module's own parameters; a parameter
    stands where it is first seen. A module's own parameters thus come after those of its children, unlike in
    ``named_parameters()``.
    Source: FSDP2's ``_fsdp_init.py``, ``_get_managed_modules`` and ``_get_managed_states``; ``_get_root_modules``.

    ``calls`` has per call the FQNs of its modules, in argument order; ``""`` is the root. A tied parameter is
    listed under each of its names; the first decides.
    """
    roots = [_root_modules([model.get_submodule(fqn) for fqn in call]) for call in calls]
    taken = frozenset(module for modules in roots for module in modules)
    fqns = {module: fqn for fqn, module in model.named_modules()}
    return [
        [
            name
            for module in _managed_modules(modules, taken)
            for name, _ in module.named_parameters(prefix=fqns[module], recurse=False)
        ]
        for modules in roots
    ]


def _root_modules(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns a call's modules but those inside others of it."""
    nested = {child for module in modules for child in module.modules() if child is not module}
    return [module for module in dict.fromkeys(modules) if module not in nested]


def _managed_modules(roots: Sequence[nn.Module], taken: frozenset[nn.Module]) -> Iterator[nn.Module]:
    visited = set[nn.Module]()

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        visited.add(module)
        for child in module.children():
            if child not in visited and child not in taken:
                yield from visit(child)
        yield module

    for root in roots:
        yield from visit(root)

"""What a compiled forward reads of inputs that it writes, such as a running statistic, is kept for its backward.

AOTAutograd writes inputs after all else. Its partitioner does not know that: to save memory it keeps the input, and
computes again in backward what forward had computed of it, then of what was written (torch 2.13, ``aot_eager`` and
Inductor: other gradients, without a word).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd import descriptors
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy

from graphpasses._torch import pytree


def keep_reads_of_written(module: fx.GraphModule) -> None:
    """Marks in a joint graph, which is to be split, what forward computes of inputs that it writes."""
    pending = [*_written(module.graph)]
    seen = set(pending)
    while pending:
        node = pending.pop()
        for user in node.users.keys() - seen:
            if user.op == "call_function" and _memory(user) & _memory(node):  # a view, of what will be written
                seen.add(user)
                pending.append(user)
            else:
                user.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _written(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yields the placeholders that a joint graph writes, or for which it returns what is to be written."""
    described = graph.output_node().meta.get("desc") or ()
    changed = [each.mutated_input for each in described if isinstance(each, descriptors.InputMutationAOTOutput)]
    for node in graph.find_nodes(op="placeholder"):
        copies = (user for user in node.users if user.target is torch.ops.aten.copy_.default)
        if node.meta.get("desc") in changed or any(copy.args[0] is node for copy in copies):
            yield node


def _memory(node: fx.Node) -> set[StorageWeakRef]:
    tensors = (each for each in pytree.tree_leaves(node.meta.get("val")) if isinstance(each, Tensor))
    return {StorageWeakRef(each.untyped_storage()) for each in tensors}  # type: ignore[no-untyped-call]

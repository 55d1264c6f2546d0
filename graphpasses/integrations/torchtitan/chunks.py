"""What torchtitan's chunks of overlapped experts need so that ours go around them, and bits are a chunked FSDP2's."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torchtitan.experiments.graph_trainer.configs import EpOverlapChunkDim, EpOverlapConfig, GraphTrainerCompileConfig
from torchtitan.experiments.graph_trainer.ep_eager_chunk import maybe_apply_ep_overlap_eager_chunking
from torchtitan.experiments.graph_trainer.ep_pass_utils import collect_chunked_regions

from graphpasses.graph import argument, fake_value

aten = torch.ops.aten

# Its "body" is what torchtitan's scheduler moves, its "materialization" what joins chunks.
_ROLE = "chunked_region_role"


def chunked_trainer(config: Any, module_fqn: str = "layers.*", chunk_dim: EpOverlapChunkDim = "batch") -> Any:
    """Builds torchtitan's eager trainer with modules that run on two chunks, as with graph_trainer's ``ep_overlap``.

    Its bits are those of ``--compile.ep_overlap.enabled --compile.pass_pipeline graphpasses``, with either strategy:
    both chunks' gradients of a parameter are added as they are computed, and reduced once. Activation checkpoints,
    which change no bits, are off: they would change the modules' FQNs. ``module_fqn`` is ``"layers.*"`` for the
    transformer's blocks that have experts, or ``"layers.*.moe"`` for these alone; ``chunk_dim`` is ``"batch"``, or
    with the latter also ``"seq"``; its size must be even. On the command line::

        torchrun … -m graphpasses.commands.train_torchtitan --chunks layers.*.moe seq --module deepseek_v3 --config …
    """
    config.activation_checkpoint = None
    trainer = config.build()
    overlap = EpOverlapConfig(enabled=True, strategy="eager", module_fqn=module_fqn, chunk_dim=chunk_dim)
    (model,) = trainer.model_parts
    maybe_apply_ep_overlap_eager_chunking(model, GraphTrainerCompileConfig(enable=True, ep_overlap=overlap))
    return trainer


def add_chunks_before_casts_pass(gm: fx.GraphModule, example_inputs: object = None) -> fx.GraphModule:
    """Adds both chunks' gradients of a parameter in the dtype in which they are computed, and casts the sum.

    So autograd does for FSDP2. torchtitan's graph chunking, its ``ep_overlap_chunk_pass``, keeps the order of a
    chunked SimpleFSDP, which casts each chunk's gradient for its reduction.
    """
    for node in gm.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        casts = node.args
        is_joint = node.meta.get(_ROLE) == "materialization" and not node.kwargs
        if not is_joint or len({*map(_cast_of, casts)} - {None}) != 1:
            continue
        with gm.graph.inserting_before(node):
            total = gm.graph.call_function(aten.add.Tensor, tuple(map(argument, casts)))
            total.meta = {**node.meta, "val": fake_value(total)}
            cast = gm.graph.call_function(casts[0].target, (total,), casts[0].kwargs)
            cast.meta = dict(node.meta)
        node.replace_all_uses_with(cast)
        gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def _cast_of(node: object) -> tuple[object, ...] | None:
    """Returns how a value is cast, and from which dtype; None where it is no cast."""
    if not isinstance(node, fx.Node) or node.target != aten._to_copy.default:
        return None
    return argument(node).meta["val"].dtype, *sorted(node.kwargs.items(), key=lambda item: item[0])


def release_shared_nodes(module: fx.GraphModule, parameters: Collection[fx.Node]) -> None:
    """Takes chunks' marks from nodes that belong to both chunks of a region.

    These are what is made of ``parameters`` (and buffers) alone, which one chunk's forward gathers for both, and what
    follows from both chunks, as the sum of their gradients. The scheduler would put either into one chunk's phases,
    where the other's may come first. It runs after the last pass that joins nodes of chunks.
    """
    regions = [each.bodies_by_chunk for each in collect_chunked_regions(module, module_pattern="*")]
    owners: dict[fx.Node, tuple[int, int]] = {}  # the bit of a node's chunk, and those of its region
    for index, bodies in enumerate(regions):
        for chunk, body in bodies.items():
            owners.update(dict.fromkeys(body.nodes, (1 << 2 * index + chunk, 3 << 2 * index)))
    reached: dict[fx.Node, int] = {}
    is_stored = set(parameters)
    for node in module.graph.nodes:
        sources = node.all_input_nodes
        reached[node] = 0
        for source in sources:
            reached[node] |= reached[source]
        if sources and is_stored.issuperset(sources):
            is_stored.add(node)
        if node not in owners:
            continue
        chunk, region = owners[node]
        if node in is_stored or (reached[node] | chunk) & region == region:
            del node.meta[_ROLE]
        else:
            reached[node] |= chunk

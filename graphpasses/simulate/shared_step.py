"""One captured step for all ranks of a simulated cluster."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor

from graphpasses._torch.group_ranks import mesh_group_names
from graphpasses.errors import ClusterError
from graphpasses.graph import CapturedStep, get_state, is_collective


def step_for_rank(step: CapturedStep, model: nn.Module) -> CapturedStep:
    """Returns a step that another rank captured, for this rank's model.

    To trace and rewrite one step takes as long as hundreds of them; ranks with shards of equal shapes need it once.
    The rank that captures for all cannot run an eager step without them: it captures with ``check=False``. Other
    ranks, which built their models as it did, get a step of the same graph with the collectives of their groups.

    Raises:
        ClusterError: a parameter's shard has another shape here, as where the ranks do not divide its size; such
            ranks capture their own.

    Example:
        >>> from graphpasses.simulate import Topology, run_cluster, share
        >>> def loss_on_this_rank():
        ...     model, steps = nn.Linear(4, 4), share(list)
        ...     batch = torch.full((2, 4), float(dist.get_rank()))
        ...     loss_fn = lambda m, x: (m(x) * 0 + x).sum()
        ...     if not steps:
        ...         steps.append(graphpasses.capture_train_step(loss_fn, model, batch, check=False))
        ...     return step_for_rank(steps[0], model)(batch).item()
        >>> run_cluster(loss_on_this_rank, Topology(2, gpus_per_node=2))
        [0.0, 8.0]
    """
    names: dict[str, str] = {}
    for fqn, *_ in step.identity.parameters:
        theirs, ours = (get_state(each, fqn) for each in (step.model, model))
        if not isinstance(theirs, DTensor) or not isinstance(ours, DTensor):
            continue
        shapes = [tuple(tensor.to_local().shape) for tensor in (theirs, ours)]
        if shapes[0] != shapes[1]:
            raise ClusterError(
                f"the step was captured where this rank's shard of {fqn!r} has shape {shapes[0]}; it has shape "
                f"{shapes[1]} here. Capture one step for each of the shapes that ranks have"
            )
        names.update(zip(*map(mesh_group_names, (theirs.device_mesh, ours.device_mesh)), strict=True))
    if all(name == own for name, own in names.items()):
        return step.for_model(model)
    copy = step.copy().for_model(model)
    for node in copy.graph.nodes:
        if is_collective(node):
            node.args = tuple(names.get(arg, arg) if isinstance(arg, str) else arg for arg in node.args)
    copy.module.recompile()
    return copy

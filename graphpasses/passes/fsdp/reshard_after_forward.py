"""Free unsharded parameters after forward and gather them again in backward, as ``reshard_after_forward``."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from graphpasses._torch.gloo import ALL_GATHER
from graphpasses.analysis.backward import is_backward
from graphpasses.analysis.effects import written_memory
from graphpasses.analysis.parameter_collectives import UNSHARD_OPS, find_gathers, movable
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.graph import Stage, TrainGraph
from graphpasses.graph.nodes import reach, storages
from graphpasses.passes.runner import GraphPass, Numerics


def _plan(graph: TrainGraph, resharded: frozenset[str]) -> list[tuple[list[fx.Node], list[fx.Node]]]:
    """Returns, per forward all-gather of resharded parameters that backward reads, what to repeat, and for whom."""
    plans, written = [], written_memory(graph.graph)
    for gather in movable(graph, find_gathers(graph)):
        if is_backward(gather.all_gather) or not gather.fqns <= resharded:
            continue
        unsharded = _unsharded_values(gather.all_gather)
        readers = {user for node in unsharded for user in node.users if is_backward(user)}
        if readers and written.isdisjoint(storages(*unsharded)):
            plans.append((sorted({*gather.chain, *_needed(unsharded, readers)}), sorted(readers)))
    return plans


def _unsharded_values(all_gather: fx.Node) -> set[fx.Node]:
    """Returns the forward values that are a copy or a view of what ``all_gather`` gathered."""
    values = {all_gather}
    pending = [all_gather]
    while pending:
        for user in pending.pop().users:
            if user in values or is_backward(user) or not values.issuperset(user.all_input_nodes):
                continue
            if user.target == ALL_GATHER:  # of tensor parallelism, which keeps what it gathers
                continue
            if user.target in UNSHARD_OPS or getattr(user.target, "is_view", False):
                values.add(user)
                pending.append(user)
    return values


def _needed(values: set[fx.Node], readers: set[fx.Node]) -> set[fx.Node]:
    """Returns the values that readers are computed from."""
    return reach(readers, lambda node: values.intersection(node.all_input_nodes)) - readers


def _apply(graph: TrainGraph, nodes: list[fx.Node], readers: list[fx.Node]) -> None:
    again: dict[fx.Node, fx.Node] = {}
    with graph.graph.inserting_before(readers[0]):
        for node in nodes:
            again[node] = graph.emit_copy(node, again)
            again[node].meta["autograd_backward"] = True
    for reader in readers:
        for source in reader.all_input_nodes:
            if source in again:
                reader.replace_input_with(source, again[source])


@dataclass(frozen=True)
class ReshardAfterForward(GraphPass):
    """Gathers the parameters of resharded buckets again before backward first reads them.

    As FSDP2 does, which frees them after forward: that saves memory and costs one more all-gather::

          weight = parameter('layer.weight')  # f32[2, 4]
          x = batch('x')  # f32[3, 4]
          gathered = all_gather(weight, 2, group0)  # f32[4, 4]
          whole = wait(gathered)  # f32[4, 4]
          y = aten.mm(x, whole)  # f32[3, 4]
          loss = aten.sum(y)  # f32[]
          # backward
        - grad = aten.mm(y, whole)  # f32[3, 4]
        + gathered_1 = all_gather(weight, 2, group0)  # f32[4, 4]
        + waited = wait(gathered_1)  # f32[4, 4]
        + grad = aten.mm(y, waited)  # f32[3, 4]
          return loss, grad  # loss, x_grad

    Parameters that backward does not read, such as an embedding's, are not gathered again (FSDP2 does, since it
    cannot know); nor are those that the step writes. Source: FSDP2's ``_fsdp_param_group.py``, ``post_forward`` and
    ``pre_backward``.

    Args:
        plan: which buckets are resharded (``reshard_after_forward`` of their entries); None: as the ``fully_shard``
            calls on the captured model say.

    Example:
        >>> with fake_process_group(2):
        ...     model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
        ...     model = graphpasses.simple_fsdp(model, dist.init_device_mesh("cpu", (2,)))
        ...     step = graphpasses.capture_train_step(lambda model, x: model(x).sum(), model, torch.ones(2, 4))
        ...     plan = BucketPlan.from_modules([["0", "1"]])
        ...     resharded = graphpasses.Pipeline((ReshardAfterForward(plan),)).run(step)
        >>> [graph.collectives()["all_gather_into_tensor"] for graph in (step, resharded)]
        [2, 3]
    """

    name = "reshard-after-forward"
    numerics = Numerics.BITWISE
    stages = frozenset({Stage.STEP})
    runs_after = frozenset({"bucket-fsdp-collectives"})

    plan: BucketPlan | None = None

    def rewrite(self, graph: TrainGraph) -> int:
        """Rewrites ``graph`` in place; returns the number of all-gathers added."""
        plan = self.plan or BucketPlan.from_fully_shard(graph.model)
        resharded = frozenset(
            fqn for bucket in plan.resolve(graph.model) if bucket.reshard_after_forward for fqn in bucket.fqns
        )
        regathers = _plan(graph, resharded)
        for nodes, readers in regathers:
            _apply(graph, nodes, readers)
        return len(regathers)

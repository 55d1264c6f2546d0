"""Tensors of sizes, each made by one operator."""

from __future__ import annotations

from dataclasses import dataclass

from graphpasses.analysis.value_numbering import Received, SizeNumbering
from graphpasses.graph import ALL_TO_ALL, Stage, TrainGraph, argument
from graphpasses.ops.size_tensor import SIZE_TENSOR
from graphpasses.passes.runner import GraphPass, Numerics


@dataclass(frozen=True)
class FuseSizeTensors(GraphPass):
    """Makes with one operator each tensor of sizes that is sent.

    What the pass changes::

        - input_0 = batch('input 0')  # f32[s75, s96]
        - sym_size = aten.sym_size.int(input_0, 0)  # s75
        - scalar_tensor = aten.scalar_tensor(sym_size, dtype=i64)  # i64[]
        - sym_size_1 = aten.sym_size.int(input_0, 1)  # s96
        - scalar_tensor_1 = aten.scalar_tensor(sym_size_1, dtype=i64)  # i64[]
        - stack = aten.stack([scalar_tensor, scalar_tensor_1])  # i64[2]
        - stack_1 = aten.stack([stack, stack], 1)  # i64[2, 2]
        - view = aten.view(stack_1, [4])  # i64[4]
        - exchanged = all_to_all(view, [2, 2], [2, 2], group0)  # i64[4]
        + input_0 = batch('input 0')  # f32[5, 6]
        + sym_size = aten.sym_size.int(input_0, 0)  # 5
        + sym_size_1 = aten.sym_size.int(input_0, 1)  # 6
        + size_tensor = graphpasses.size_tensor([sym_size, sym_size, sym_size_1, sym_size_1], i64, cpu)  # i64[4]
        + exchanged = all_to_all(size_tensor, [2, 2], [2, 2], group0)  # i64[4]
          waited = wait(exchanged)  # i64[4]
          return waited  # output 0

    TorchRec makes a handful of small tensors of the splits and batch sizes of each module and sharding type.

    Example:
        >>> from graphpasses.graph import ALL_TO_ALL, WAIT
        >>> def loss_fn(model, x):
        ...     sizes = torch.stack([torch.scalar_tensor(size, dtype=torch.int64) for size in x.shape])
        ...     return model(x * WAIT(ALL_TO_ALL(sizes, [1, 1], [1, 1], dist.group.WORLD.group_name))).sum()
        >>> with fake_process_group(2):
        ...     step = graphpasses.capture_train_step(loss_fn, nn.Linear(2, 1), torch.ones(3, 2))
        ...     step = graphpasses.Pipeline((FuseSizeTensors(),)).run(step)
        >>> [node.args[0] for node in step.graph.nodes if node.target == SIZE_TENSOR]
        [[3, 2]]
    """

    name = "fuse-size-tensors"
    numerics = Numerics.BITWISE
    stages = frozenset({Stage.STEP, Stage.JOINT})
    runs_after = frozenset({"bucket-all-to-all"})

    def rewrite(self, graph: TrainGraph) -> int:
        """Rewrites ``graph`` in place; returns the number of tensors replaced."""
        sizes = SizeNumbering(graph.module)
        num_made = 0
        for launch in graph.graph.find_nodes(op="call_function", target=ALL_TO_ALL):
            tensor = argument(launch)
            if tensor not in sizes or tensor.target == SIZE_TENSOR:
                continue
            numbers = sizes.numbers(tensor)
            if any(isinstance(number, Received) for number in numbers):
                continue
            value = tensor.meta["val"]
            with graph.graph.inserting_before(launch):
                made = graph.emit(SIZE_TENSOR, (numbers, value.dtype, value.device), like=tensor)
            launch.replace_input_with(tensor, made)
            num_made += 1
        return num_made

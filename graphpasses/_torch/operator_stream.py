"""Reports every operator that a block calls, while it runs: in eager, FSDP2's too, and in code made of graphs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._C._distributed_c10d import Work
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.multiprocessing.reductions import StorageWeakRef

from graphpasses._torch import operator_facts as facts
from graphpasses._torch.dtensor import local_part
from graphpasses._torch.fake_mode import is_fake
from graphpasses._torch.fsdp2 import fsdp_groups, replicate_group, shard_group
from graphpasses._torch.fsdp2_accumulation import unreduced_gradient
from graphpasses._torch.group_ranks import group_ranks
from graphpasses._torch.operator_facts import FUNCTIONAL, NOT_THE_USERS, kind_of, memory_of, tensors
from graphpasses._torch.operator_recorder import OPTIMIZERS, OperatorRecorder, unseen
from graphpasses._torch.pytree import tree_leaves, tree_map
from graphpasses._torch.recorded_operator import MODULE_FQN, Operator, Phase, Value, Where
from graphpasses._torch.schemas import bound_arguments, written_names

_UNINITIALISED = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")
# Results of attention that its kernels write only where they drop something.
_OF_DROPOUT = ("philox_seed", "philox_offset", "rng_state", "unused", "debug_attn_mask")
# Of operators, the result that their own backward alone reads, and that they do not write everywhere.
_FOR_BACKWARD = {
    "aten::_ctc_loss": 1,
    "aten::_cudnn_rnn": 3,
    "aten::mkldnn_rnn_layer": 3,
    "graphpasses::rnn_layer": 3,
}
_TO_PYTHON = torch.ops.aten._local_scalar_dense.default  # a program may branch by what it says
# What a call is that neither a module, nor autograd's engine, nor an optimizer makes, by what was called before.
_NEXT: dict[Phase, Phase] = {
    "": "forward",
    "forward": "loss",
    "backward": "gradients",
    "reduction": "gradients",
}


class OperatorStream(OperatorRecorder):  # type: ignore[no-untyped-call]
    """Reports each operator that a block calls, when it has run, with digests of what it reads and makes.

    Those of a graph that runs as generated code have the origin of their nodes. Left out is what computes nothing,
    and how FSDP2 packs what it communicates. Collectives are waited for.

    ``digest`` is called with a plain tensor when an operator is about to read it, or has made it; ``seen`` with each
    call, in order. ``keep`` are the positions of calls to keep, with copies of their tensors, in ``kept``.
    """

    def __init__(
        self,
        model: nn.Module,
        digest: Callable[[Tensor], Any],
        seen: Callable[[Operator], object],
        *,
        keep: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(model, is_mode=False)
        self._digest, self._seen, self._keep = digest, seen, keep
        self._nodes_of: dict[fx.GraphModule, list[fx.Node]] = {}  # of graphs that run, and stay as they are
        self._unwritten: dict[int, StorageWeakRef] = {}
        self._num_calls = 0
        self._phase: Phase = ""
        self.kept: dict[int, dict[str, Any]] = {}

    def report(self, call: Operator) -> None:
        """Reports a call; called from outside for those that no dispatcher sees."""
        phase = call.where.phase or _NEXT.get(self._phase, self._phase)
        where = call.where
        # DDP alone has C++ that communicates, and fills its buckets, while autograd's engine runs.
        is_ddp = where.in_backward and where.by_torch and (call.is_collective or call.operator.endswith(".out"))
        if is_ddp and call.is_collective:  # of a bucket
            where = replace(where, module="")
        if is_ddp or (call.is_collective and phase == "gradients"):
            phase = "reduction"
        if phase != "reduction" or self._phase != "backward":  # backward goes on after a reduction within
            self._phase = phase
        self._seen(replace(call, where=replace(where, phase=phase), position=self._num_calls))
        self._num_calls += 1

    def see(self, name: str, tensor: Tensor) -> Value:
        """Returns what is reported of a tensor."""
        is_plain = tensor.layout == torch.strided and not tensor.is_quantized
        memory = memory_of(tensor)
        if not is_plain or memory in self._unwritten:
            return Value(name, kind_of(tensor), None, memory)
        with torch.no_grad(), unseen():
            return Value(name, kind_of(tensor), self._digest(tensor), memory)

    def record(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], caller: FrameType) -> Any:
        """Calls an operator, and reports it."""
        where, node = self._origin_of(caller)
        if (
            where is None
            or (facts.computes_nothing(func) and func is not _TO_PYTHON)
            or facts.copies_nothing(func, args)
            or not isinstance(func, torch._ops.OpOverload)
            or any(is_fake(each) for each in tensors((*args, *kwargs.values())))
        ):
            return func(*args, **kwargs)
        given = list(_named(func, args, kwargs))
        inputs = tuple(self.see(name, each) for name, each in given if isinstance(each, Tensor))
        state, device = _random_state(func, given)
        if state is not None:
            inputs = (*inputs, replace(self.see("random state", state), memory=None))
        keeps = self._num_calls in self._keep
        kept = {"args": _copied(args), "kwargs": _copied(dict(kwargs))} if keeps else {}
        results = func(*args, **kwargs)
        outputs = self._outputs(func, given, results)
        if keeps:
            kept |= {"random_state": state, "random_device": device}
            self.kept[self._num_calls] = {"operator": str(func), **kept, "results": _copied(results)}
        communicates, arguments = func.namespace in (*FUNCTIONAL, "c10d"), tuple(_texts(func, given))
        self.report(Operator(str(func), where, inputs, outputs, arguments, node, communicates))
        return results

    def _origin_of(self, caller: FrameType) -> tuple[Where | None, str]:
        frame: FrameType | None = caller
        while frame is not None and frame is not self._root:
            if (node := self._node_of(frame)) is not None:
                return origin_of(node), node.name
            frame = frame.f_back
        return self.where(caller), ""

    def _node_of(self, frame: FrameType) -> fx.Node | None:
        """Returns the node that a frame of a graph's generated code calls; None for any other code."""
        module: Any = frame.f_locals.get("self")
        is_generated = frame.f_code.co_filename.startswith("<eval_with_key>")
        if not is_generated or not isinstance(module, fx.GraphModule):
            return None
        # By the map of lines that torch itself takes where it traces generated code again. Tested: 2.13.
        lines: Any = module._lineno_map
        index = lines.get(frame.f_lineno - frame.f_code.co_firstlineno)
        if module not in self._nodes_of:
            self._nodes_of[module] = list(module.graph.nodes)
        return None if index is None else self._nodes_of[module][index]

    def _outputs(self, func: Any, given: list[tuple[str, Any]], results: Any) -> tuple[Value, ...]:
        flat = list(tensors(results))
        if func._schema.name.split("::")[1] in _UNINITIALISED:
            self._leave_unwritten(flat)
            return ()
        if func.namespace in FUNCTIONAL:
            flat = [torch.ops._c10d_functional.wait_tensor.default(each) for each in flat]
        for each in tree_leaves(results):
            if isinstance(each, torch.ScriptObject) and func.namespace == "c10d":
                work = Work.unbox(each)
                if work is not None:  # NCCL has none of what later kernels of the stream wait for anyway
                    work.wait()
        written = _written(func, given)
        seen = {id(each) for each in flat}
        for each in (*flat, *(tensor for _, tensor in written)):
            self._unwritten.pop(memory_of(each), None)
        if not dict(given).get("dropout_p"):
            named = zip(func._schema.returns, results if isinstance(results, tuple) else (), strict=False)
            self._leave_unwritten(tensors([each for kind, each in named if kind.name in _OF_DROPOUT]))
        if (index := _FOR_BACKWARD.get(func._schema.name)) is not None:
            self._leave_unwritten(tensors([results[index]]))
        return (
            *(self.see(f"result {index}", each) for index, each in enumerate(flat)),
            *(self.see(f"written {name}", each) for name, each in written if id(each) not in seen),
        )

    def _leave_unwritten(self, made: Iterable[Tensor]) -> None:
        for each in made:
            self._unwritten[memory_of(each)] = StorageWeakRef(each.untyped_storage())  # type: ignore[no-untyped-call]


def _copied(value: Any) -> Any:
    def copied(leaf: Any) -> Any:
        if isinstance(leaf, (torch.ScriptObject, torch.Generator)):
            return None
        return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf

    return tree_map(copied, value)


def _named(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields an operator's arguments, lists opened, with their names."""
    for name, value in ((argument.name, value) for argument, value in bound_arguments(func, args, kwargs)):
        leaves = tree_leaves(value) if isinstance(value, (list, tuple)) else []
        if any(isinstance(each, Tensor) for each in leaves):
            yield from ((f"{name}[{index}]", each) for index, each in enumerate(leaves))
        else:
            yield name, value


def _texts(func: Any, given: list[tuple[str, Any]]) -> Iterator[str]:
    for name, value in given:
        if isinstance(value, Tensor):
            continue
        if isinstance(value, torch.ScriptObject):
            if "ProcessGroup" in str(value._type()):
                yield f"ranks={list(group_ranks(dist.ProcessGroup.unbox(value)))}"
        elif (ranks := facts.named_ranks(func, name, value)) is not None:
            yield f"ranks={list(ranks)}"
        elif isinstance(value, (list, tuple)):
            yield f"{name}={list(map(facts.facts_of_value, value))}"
        elif value is not None:
            yield f"{name}={facts.facts_of_value(value)}"


def _written(func: Any, given: list[tuple[str, Any]]) -> list[tuple[str, Tensor]]:
    names = written_names(func)
    if func.namespace == "c10d":  # their schemas do not say what they write
        names |= {argument.name for argument in func._schema.arguments}
    return [(name, each) for name, each in given if isinstance(each, Tensor) and name.split("[")[0] in names]


def _random_state(func: Any, given: list[tuple[str, Any]]) -> tuple[Tensor | None, str]:
    """Returns the state of the generator that an operator is about to draw from, if it draws, and its device."""
    generator = next((each for _, each in given if isinstance(each, torch.Generator)), None)
    if generator is not None:
        return generator.get_state(), str(generator.device)
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None, ""
    devices = [each.device for _, each in given if isinstance(each, Tensor)]
    device = devices[0] if devices else next((e for _, e in given if isinstance(e, torch.device)), None)
    if device is not None and device.type == "cuda":
        return torch.cuda.get_rng_state(device), str(device)
    return torch.get_rng_state(), "cpu"


GATHER, REDUCE = "fsdp.gather_parameter", "fsdp.reduce_gradient"
"""The names under which FSDP2's communication of one parameter is recorded."""


@contextmanager
def fsdp2_streamed(model: nn.Module, stream: OperatorStream) -> Iterator[None]:
    """Reports to ``stream`` what FSDP2's groups of a model gather and reduce in a block, parameter by parameter."""
    groups, names = fsdp_groups(model), {"wait_for_unshard": GATHER, "post_backward": REDUCE}
    for group in groups:
        for name, operator in names.items():
            vars(group)[name] = partial(_communicate, group, operator, getattr(group, name), stream)
    try:
        yield
    finally:
        for group in groups:
            for name in names:
                vars(group).pop(name, None)


def _communicate(
    group: FSDPParamGroup, operator: str, original: Callable[..., None], stream: OperatorStream, *unused: Any
) -> None:
    """Lets a group gather or reduce, and reports it for each parameter."""
    if stream.is_paused:
        original(*unused)
        return
    is_reduced = operator == REDUCE
    given: dict[Any, Tensor] = {}
    if not is_reduced and group._all_gather_result:
        given = {each: each.sharded_param for each in group.fsdp_params}
    elif is_reduced and group.reduce_grads:
        found = ((each, unreduced_gradient(each)) for each in group.fsdp_params)
        given = {each: gradient for each, gradient in found if gradient is not None}
    read_name, made_name = ("gradient", "reduced gradient") if is_reduced else ("shard", "parameter")
    read = {each: stream.see(read_name, local_part(tensor.detach())) for each, tensor in given.items()}
    original(*unused)
    if group.device.type != "cpu":
        torch.accelerator.synchronize(group.device)
    ranks = [shard_group(group), replicate_group(group) if is_reduced else None]
    options = [f"ranks={list(group_ranks(each))}" for each in ranks if read and each]
    options += [f"gradient_divide_factor={group.gradient_divide_factor}"] if is_reduced else []
    phase: Phase = "reduction" if is_reduced else "forward"
    for parameter, seen in read.items():
        if (result := parameter.sharded_param.grad if is_reduced else parameter.unsharded_param) is None:
            continue
        fqn = parameter._param_fqn or parameter._module_info.param_name
        where = Where(fqn.rpartition(".")[0], None, in_backward=is_reduced, phase=phase)
        made = stream.see(made_name, local_part(result.detach()))
        stream.report(Operator(operator, where, (seen,), (made,), (fqn, *options), is_collective=True))


_FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+), in (?P<function>.*)')


def origin_of(node: fx.Node) -> Where:
    """Returns where a node comes from, as far as its graph's capture and passes noted it."""
    line = None
    in_optimizer = False
    for frame in _FRAME.finditer(node.meta.get("stack_trace") or ""):
        in_optimizer |= frame["file"].startswith(OPTIMIZERS)
        if not frame["file"].startswith(NOT_THE_USERS):
            line = frame["file"], int(frame["line"]), frame["function"]
    module = (node.meta.get("custom") or {}).get(MODULE_FQN)
    in_backward = bool(node.meta.get("autograd_backward", False))
    phase: Phase = "" if module is None else "forward"
    phase = "optimizer" if in_optimizer else "backward" if in_backward else phase
    return Where(module or "", line, in_backward, by_torch=in_backward, phase=phase)

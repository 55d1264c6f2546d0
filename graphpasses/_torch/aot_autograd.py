"""AOTAutograd and Inductor: compile a Dynamo graph with passes between."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, fx
from torch._dynamo import config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import unimplemented
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.variables import SkipFunctionVariable, TorchInGraphFunctionVariable
from torch._dynamo.variables.builder import VariableBuilder
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import graph_compile
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

from graphpasses._torch import pytree
from graphpasses._torch.aot_values import gradients_whole
from graphpasses._torch.decompose import decompose
from graphpasses._torch.dynamo import leave_optimizers
from graphpasses._torch.eager_formulas import FORMULAS
from graphpasses._torch.fx_graphs import copy_module
from graphpasses._torch.schemas import bound_arguments, writes_arguments
from graphpasses._torch.step_tracer import backwards_end
from graphpasses._torch.strides_of_eager import hide_view, views_to_hide
from graphpasses._torch.surroundings import after_this_backward
from graphpasses._torch.symbols import guessed_sizes
from graphpasses._torch.written_inputs import hide_copies, keep_reads_of_written, show_copies

Compiled = Callable[..., Any]
# Rewrites a graph in place; returns what makes of it the one that runs, if that is another.
Rewrite = Callable[[fx.GraphModule], Callable[[fx.GraphModule], fx.GraphModule] | None]


class Stages(NamedTuple):
    """What rewrites, in place, the graphs that AOTAutograd makes of one."""

    joint: Rewrite
    forward: Rewrite
    backward: Rewrite
    # Entered for each compilation; the backward graph's may come when the first backward runs.
    while_compiling: Callable[[], AbstractContextManager[Any]]
    # Compiles a backward graph: given it, its inputs, and what compiles a graph, see ``LateUpdates.compile``.
    compile_backward: Callable[[fx.GraphModule, Sequence[Any], Callable[..., Compiled]], Compiled]


# Under these an operator has a kernel written in Python that only tracers run.
_ABOVE_FORMULAS = torch.DispatchKey.Autograd, torch.DispatchKey.CompositeImplicitAutograd
# Selects elements, so has the same bits; torch's formulas for the C++ kernels take no sizes that vary.
_SAME_BITS = torch.ops.aten.softshrink, torch.ops.aten.hardshrink


def _bernoulli(x: Tensor, p: float, *, generator: torch.Generator | None = None) -> Tensor:
    """Draws as `bernoulli_` does: what stands for it in graphs draws as of a contiguous tensor, and is one."""
    return torch.empty_like(x).bernoulli_(p, generator=generator).contiguous()


def _assign_data(x: Tensor, source: Tensor) -> None:
    """Assigns to `.data`: `set_`, which Dynamo calls for it, has later uses accumulate their gradients apart."""
    x.data = source


_EAGERS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,  # a formula's strides may not be its fake result's
    torch.ops.aten.bernoulli.p: _bernoulli,
    torch.ops.aten.set_.source_Tensor: _assign_data,
}


def _keep_strides(
    mode: FunctionalTensorMode, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    """Calls an operator as AOTAutograd does; what it writes in place keeps its strides, as in eager.

    A functional form gives a new tensor, in strides of its own, by which later kernels round otherwise.
    """
    result = _DISPATCH(mode, func, types, args, kwargs)
    if writes_arguments(func):
        written = [value for argument, value in bound_arguments(func, args, kwargs or {}) if argument.is_write]
        for tensor in pytree.tree_leaves(written):
            if isinstance(tensor, FunctionalTensor) and tensor.is_base_tensor():
                _keep_strides_of(tensor)
    return result


def _keep_strides_of(tensor: FunctionalTensor) -> None:
    now = torch._from_functional_tensor(tensor.elem)
    if now.shape == tensor.shape and now.stride() != tensor.stride():
        empty = torch.empty_strided(now.shape, tensor.stride(), dtype=now.dtype, device=now.device)
        tensor.replace_(torch.ops.aten.copy(empty, now))
        tensor.commit_update()
        tensor.sync()


_DISPATCH: Any = FunctionalTensorMode.__torch_dispatch__
_ASKS = torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling, torch._utils.is_compiling
_PREPARED = {"torch", "torchrec", "fbgemm_gpu", "graphpasses"}  # compute the same where they are compiled


@contextmanager
def operators_of_eager(note: Callable[[str], None]) -> Iterator[None]:
    """Lets Dynamo and AOTAutograd trace the operators that eager calls; ``note`` is told who may call others.

    torch has them trace others that compute the same and round otherwise: the products and sums of `addcdiv`, lookups
    in place of `upsample_bilinear2d`, a dropout that scales in another dtype.
    """
    # Those that someone has asked for: others have no kernels in Python. Dynamo enters this for each frame.
    packets = tuple(each for each in vars(torch.ops.aten).values() if isinstance(each, torch._ops.OpOverloadPacket))
    overloads = _overloads(packets, sum(len(vars(each)) for each in packets))
    removed = [
        (each, key, each.py_kernels.pop(key))
        for each in overloads
        if each.py_kernels
        for key in _ABOVE_FORMULAS
        if key in each.py_kernels
    ]
    handlers = TorchInGraphFunctionVariable._get_handlers()
    eager = {name: each for name, each in handlers.items() if name is not torch.addcdiv}
    eager |= {name: functools.partial(_answer, note, handlers[name]) for name in _ASKS if name in handlers}
    try:
        for overload, key, _ in removed:
            if overload in FORMULAS:
                overload.py_kernels[key] = FORMULAS[overload]
            overload._dispatch_cache.clear()
        with (
            config.patch(enable_dynamo_decompositions=False, trace_numpy=False),
            # What draws random numbers stays, also where nobody reads them: those that follow are eager's.
            inductor_config.patch(fallback_random=True),
            backwards_end(),
            mock.patch.dict(handlers, eager, clear=True),
            mock.patch.dict(VariableBuilder._type_dispatch(), _left_to_eager()),
            mock.patch.object(FunctionalTensorMode, "__torch_dispatch__", _keep_strides),
            # Numbers that vary stay Python's; as tensors they are computed in the order that sympy sorts terms in.
            mock.patch.object(graph_compile, "_apply_tensorify_python_scalars", return_value=None),
        ):
            yield
    finally:
        for overload, key, kernel in removed:
            overload.py_kernels[key] = kernel
            overload._dispatch_cache.clear()


@functools.lru_cache(maxsize=1)
def _overloads(packets: tuple[torch._ops.OpOverloadPacket, ...], _: int) -> list[torch._ops.OpOverload]:
    """Returns those overloads of packets, which have so many attributes, that do not have their formulas' bits."""
    known = (each for packet in packets if packet not in _SAME_BITS for each in vars(packet).values())
    return [each for each in known if isinstance(each, torch._ops.OpOverload)]


def _run_by_eager(builder: Any, function: Any) -> Any:
    """Breaks the graph at a call of a function of `torch.jit.script`, whose executor rounds as Python does not."""
    builder.install_guards(GuardBuilder.TYPE_MATCH)
    why = f"{function.name} was made by torch.jit.script, whose executor rounds otherwise than its Python"
    disabled = torch.compiler.disable(lambda: None, reason=why)  # type: ignore[no-untyped-call]  # torch has no types
    return SkipFunctionVariable(disabled, source=builder.source)


def _compute_by_numpy(_: Any, number: Any) -> Any:
    """Breaks the graph where a number of NumPy's is used, which Dynamo would make a tensor, that decides dtypes."""
    why = f"{number!r} is a number of NumPy's, of which torch.compile makes a tensor; write float() or int()"
    unimplemented(gb_type="a number of NumPy's", context=repr(number), explanation=why, hints=[])


def _left_to_eager() -> dict[Any, Callable[..., Any]]:
    """Returns by the types of values what takes the place of how Dynamo traces them."""
    numpy = sys.modules.get("numpy")  # without it there are no numbers of its
    numbers = () if numpy is None else numpy.sctypeDict.values()
    return {torch.jit.ScriptFunction: _run_by_eager, **dict.fromkeys(numbers, _compute_by_numpy)}


def _answer(note: Callable[[str], None], answer: Callable[..., Any], variable: Any, tx: Any, *args: Any) -> Any:
    """Answers code that asks whether it is compiled."""
    leave_optimizers(tx)
    name = tx.f_globals.get("__name__", "")
    if name.partition(".")[0] not in _PREPARED or name == "torch.nn.modules.transformer":  # nested tensors of masks
        asker = tx
        while asker.f_code.co_name.startswith("is_") and asker.parent is not None:
            asker = asker.parent
        frame = asker.frame_summary()
        note(
            f"{frame.filename}:{frame.lineno} in {frame.name} asks whether it is compiled, and may compute otherwise "
            "than in eager"
        )
    return answer(variable, tx, *args)


def compile_aot_eager(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    stages: Stages,
    runner: Callable[[fx.GraphModule, Callable[[], fx.GraphModule] | None], Compiled],
) -> Compiled:
    """Compiles a Dynamo graph by AOTAutograd, and runs the ATen graphs as they are, rewritten.

    Without gradients there is one graph: ``joint`` rewrites it first, then ``forward``. ``runner`` returns what runs
    a graph, or from the second run on another that is made of it; the gradients that a backward graph is given have
    the strides in which they arrive.
    """

    def partition(gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        stages.joint(gm)
        keep_reads_of_written(gm)
        with functorch_config.patch(cse=False):
            return _MinCut()(gm, joint_inputs, **kwargs)

    def compiler(*rewrites: Rewrite) -> Callable[..., Any]:
        def compile_graph(gm: fx.GraphModule, *_: Any) -> Compiled:
            with stages.while_compiling():
                (runs_as,) = [rewrite(gm) for rewrite in rewrites][-1:]
                other = runs_as and functools.partial(runs_as, copy_module(gm))
                _call_eagers(gm)

            run_graph = runner(gm, other and (lambda: _call_eagers(other())))
            hidden = views_to_hide() if rewrites == (stages.forward,) else ()

            def run(args: list[Any]) -> Any:
                values = list(args)
                args.clear()  # so that what only this call needs is freed as soon as it is used
                results = run_graph(values)
                if not hidden:
                    return results
                return [hide_view(each) if i in hidden else each for i, each in enumerate(results)]

            return boxed(run)

        return compile_graph

    def compile_backward(gm: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        return boxed(stages.compile_backward(gm, inputs, compiler(stages.backward)))

    # A second backward, with retain_graph=True, may read what the first has read: nothing writes over it.
    kept = mock.patch.object(graph_compile, "collect_bw_donated_buffer_idxs", return_value=[])
    with kept, gradients_whole(copied=False), _backward_after_autocast():
        compiled: Compiled = aot_autograd(
            fw_compiler=compiler(stages.forward),
            bw_compiler=compile_backward,
            inference_compiler=compiler(stages.joint, stages.forward),
            partition_fn=partition,
            keep_inference_input_mutations=True,
        )(module, inputs)
    return compiled


def _backward_after_autocast() -> AbstractContextManager[object]:
    """Lets gradients be traced as eager computes them, after the block of autocast; a list of the user's stays.

    Torch casts what a backward computes as if it ran in the block around forward, see pytorch/pytorch#153044.
    """
    is_list = isinstance(functorch_config.backward_pass_autocast, list)
    return nullcontext() if is_list else functorch_config.patch(backward_pass_autocast="off")


def _call_eagers(gm: fx.GraphModule) -> fx.GraphModule:
    for operator, eagers in _EAGERS.items():
        for node in gm.graph.find_nodes(op="call_function", target=operator):
            node.target = eagers
    gm.recompile()
    return gm


def boxed(run: Compiled) -> Compiled:
    """Lets AOTAutograd give a function one list, which it clears."""
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


_ADDED: dict[int, dict[Any, Tensor | None]] = {}


def added_in_this_backward() -> dict[Any, Tensor | None]:
    """Returns a dict that lasts until the end of the backward in which this is called."""
    task = torch._C._current_graph_task_id()
    if task not in _ADDED:
        _ADDED[task] = {}
        after_this_backward(functools.partial(_ADDED.__delitem__, task))
    return _ADDED[task]


class _Passes(CustomGraphPass):
    def __init__(self, rewrite: Rewrite, digest: str) -> None:
        self._rewrite, self._digest = rewrite, digest

    def __call__(self, graph: fx.Graph) -> None:
        assert graph.owning_module is not None
        self._rewrite(graph.owning_module)

    def uuid(self) -> str:
        return self._digest


class _MinCut(CustomPartitionerFn):
    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        show_copies(gm.graph)
        with guessed_sizes(joint_inputs):
            return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        return type(self).__qualname__


def compile_inductor(
    module: fx.GraphModule, inputs: Sequence[Any], stages: Stages, digest: str, *, keep_order: bool
) -> Compiled:
    """Compiles likewise with Inductor; ``digest``, all that the rewrites depend on, is part of its caches' key.

    With ``keep_order`` kernels run in the order of the graph's calls, which says when collectives start.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.pattern_matcher import stable_topological_sort

    rewrites = [stages.forward]  # that of the graph which is compiled now

    @functools.wraps(compile_fx_inner)
    def compile_graph(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        def compile_part(
            part: fx.GraphModule, fakes: Sequence[Any], places: Sequence[int], kept: Collection[int]
        ) -> Any:
            static = [index for index, at in enumerate(places) if at in kwargs.get("static_input_idxs", ())]
            with _donated(places, kept):
                return compile_fx_inner(part, fakes, **{**kwargs, "static_input_idxs": static})

        is_backward = kwargs.get("is_backward", False)
        rewrites[:] = [stages.backward if is_backward else stages.forward]
        with stages.while_compiling():
            if not is_backward:
                return compile_fx_inner(gm, inputs, **kwargs)
            return boxed(stages.compile_backward(gm, inputs, compile_part))

    def rewrite_joint(gm: fx.GraphModule) -> None:
        stages.joint(gm)
        decompose(gm)
        keep_reads_of_written(gm)
        hide_copies(gm.graph)

    def rewrite_half(gm: fx.GraphModule) -> None:
        stable_topological_sort(gm.graph)  # Inductor does so later
        rewrites[0](gm)

    # Halves after Inductor's passes: those remove clones, as if no operator wrote into its arguments.
    ours = {"joint_custom_pre_pass": rewrite_joint, "post_grad_custom_post_pass": rewrite_half}
    patches: dict[str, Any] = {
        name: _and(getattr(inductor_config, name), _Passes(rewrite, digest)) for name, rewrite in ours.items()
    }
    patches["custom_partitioner_fn"] = inductor_config.custom_partitioner_fn or _MinCut()
    if keep_order:
        patches["reorder_for_peak_memory"] = False
    # As an argument, since the backward graph may be compiled later, when the first backward runs.
    # AOTAutograd's own cache would skip the joint passes, on one rank and not on another: they talk to each other.
    # Its elimination of common subexpressions merges equal collectives on ranks that see that they are equal.
    settings = functorch_config.patch(enable_autograd_cache=False, cse=False)
    with settings, gradients_whole(copied=True), _backward_after_autocast():
        compiled: Any = compile_fx(
            module, inputs, inner_compile=compile_graph, config_patches=patches, decompositions={}
        )
    return compiled  # type: ignore[no-any-return]


@contextmanager
def _donated(places: Sequence[int], kept: Collection[int]) -> Iterator[None]:
    """Tells Inductor which inputs of a part it may write over: those of the whole that nothing reads after it."""
    context = TracingContext.try_get()
    whole: Any = None if context is None else context.fw_metadata
    donated = None if whole is None else whole.bw_donated_idxs
    if not donated:
        yield
        return
    part = [index for index, at in enumerate(places) if at in donated and at not in kept]
    with mock.patch.object(whole, "bw_donated_idxs", part):
        yield


def _and(theirs: Any, ours: CustomGraphPass) -> Any:
    if theirs is None:
        return ours
    return (*theirs, ours) if isinstance(theirs, (list, tuple)) else (theirs, ours)

"""Small graphs as text: read one, print one, and check what a pass makes of it.

One line is one node::

    emb = parameter('emb.weight')             # an input: what it is, and its FQN
    gathered = all_gather(emb, 2, group0)     # collectives by their short name, process groups by position
    total = aten.sum(whole)                   # an operator: its overload is "Tensor" or else "default"
    first = parts[0]
    # backward                                # the nodes after this line are autograd's
    return total, grad  # loss, gradient of emb.weight

In place of these remarks stands the type of the value: ``# bf16[4, 8]``. Of many arguments only data is shown.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import operator
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._dtype_abbrs import dtype_abbrs

import graphpasses
from graphpasses.graph import (
    GraphInput,
    GraphOutput,
    InputKind,
    OutputKind,
    ParameterInfo,
    Stage,
    TrainGraph,
    fake_value,
)
from graphpasses.identity import IdentityMap
from graphpasses.passes.runner import GraphPass, Pipeline
from tests.helpers.kept import Keep

c10d = torch.ops._c10d_functional
COLLECTIVES = {
    "all_gather": c10d.all_gather_into_tensor.default,
    "reduce_scatter": c10d.reduce_scatter_tensor.default,
    "all_reduce": c10d.all_reduce.default,
    "all_to_all": c10d.all_to_all_single.default,
    "wait": c10d.wait_tensor.default,
}
SHORT = {target: name for name, target in COLLECTIVES.items()}
RESULTS = dict(zip(COLLECTIVES, ("gathered", "scattered", "reduced", "exchanged", "waited"), strict=True))
DTYPES = {name: dtype for dtype, name in dtype_abbrs.items()}
BACKWARD = "# backward"
MAX_ARGUMENTS = 8  # of more, only data is shown, and only the inputs that are shown then
LOOKUP = "split_embedding_codegen_lookup_"  # of FBGEMM; _sgd_function_pt2 follows
AUTOMATIC_INPUT = r"l_|arg\d+_|primals_|tangents_|x_\d"


def golden(p: GraphPass, graph: TrainGraph, after: TrainGraph | None = None, *, example: int = 0) -> str:
    """Returns what a pass makes of a graph, as text.

    The docstring of the pass must show the same: its literal blocks are diffs of graphs. With ``EXPECTTEST_ACCEPT=1``
    they are written anew.

    Args:
        p: the pass.
        graph: a graph of about ten nodes.
        after: what the pass made of it; by default the pass is run.
        example: which of the blocks it is.
    """
    before, rewritten = show(graph), show(after or Pipeline((p,)).run(graph))
    block, diff = literal_blocks(type(p))[example], _diff(before, rewritten)
    if os.environ.get("EXPECTTEST_ACCEPT"):
        path = Path(inspect.getfile(type(p)))
        path.write_text(path.read_text().replace(indent(block, " " * 8), indent(diff, " " * 8), 1))
    else:
        assert block == diff, f"the docstring of {type(p).__name__} must show\n\n{diff}"
    return rewritten


def _diff(before: str, after: str) -> str:
    """Returns all lines of two graphs, those that go with ``-`` and those that come with ``+`` in front."""
    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), n=len(before))
    return "".join(f"{line[0]} {line[1:]}" for line in [*lines][3:])


def compiled(p: GraphPass, function: Callable[..., Any], *inputs: Any, stage: Stage) -> list[TrainGraph]:
    """Compiles a function or model for inputs; returns its graph of a stage before and after a pass."""
    before, after = _Before((stage,)), _After((stage,))
    torch.compiler.reset()
    graphpasses.compile(function, pipeline=Pipeline((before, p, after)), inner="aot_eager", fullgraph=True)(*inputs)
    return [*before.graphs, *after.graphs]


class _Before(Keep):
    name = "before"


class _After(Keep):
    name = "after"


def literal_blocks(cls: type) -> list[str]:
    """Returns the blocks behind ``::`` in a docstring, each with a newline at its end."""
    found = re.findall(r"::\n\n((?:(?: {4}.*)?\n)+)", inspect.cleandoc(cls.__doc__ or "") + "\n")
    return ["".join(line[4:] for line in block.strip("\n").splitlines(True)) + "\n" for block in found]


def show(graph: TrainGraph) -> str:
    """Returns a graph as text, free of what a machine or a process brings: one line a node."""
    return "".join(f"{line}\n" for line in _Printer(graph).lines())


class _Printer:
    def __init__(self, graph: TrainGraph) -> None:
        self.graph = graph
        self.items = dict(zip(graph.placeholders, graph.inputs, strict=True))
        self.groups: list[str] = []
        self.names: dict[fx.Node, str] = {}
        automatic = {node: base for node in graph.graph.nodes if (base := self.short_name(node))}
        taken = {node.name for node in graph.graph.nodes if node not in automatic}
        for node in graph.graph.nodes:
            base = automatic.get(node, node.name)
            numbered = (f"{base}_{index}" if index else base for index in range(len(automatic) + 1))
            self.names[node] = next(n for n in numbered if n not in taken) if node in automatic else base
            taken.add(self.names[node])

    def short_name(self, node: fx.Node) -> str | None:
        """Returns a name for a node that was named automatically: ``cat_default_1`` tells no more than ``cat``."""
        if node in self.items and re.match(AUTOMATIC_INPUT, node.name):
            return re.sub(r"\W+", "_", self.items[node].fqn).strip("_")
        for start, short in (LOOKUP, "lookup"), ("auto_functionalized", "written"):
            if node.op == "call_function" and node.name.startswith(start):
                return short
        if not isinstance(node.target, torch._ops.OpOverload):
            return None
        packet, overload = str(node.target).split(".")[1:]
        pattern = rf"{re.escape(packet)}(_{re.escape(overload)})?(_\d+)?"
        short = RESULTS.get(SHORT.get(node.target, ""), packet.strip("_"))
        return short if re.fullmatch(pattern, node.name, re.IGNORECASE) else None

    def lines(self) -> Iterator[str]:
        nodes = list(self.graph.graph.nodes)
        body = list(self.body([node for node in nodes if node.op != "placeholder"]))
        words = set(re.findall(r"\w+", "\n".join(body)))
        for node in self.items:
            if self.names[node] in words or (not node.users and self.is_data(node)):
                yield self.line(node)
        yield from body

    def body(self, nodes: list[fx.Node]) -> Iterator[str]:
        is_backward = False
        for node in nodes:
            if node.op == "output":
                outputs = ", ".join(map(_output_name, self.graph.outputs))
                yield f"return {', '.join(map(self.value, self.graph.output_values))}  # {outputs}"
                continue
            if is_backward != node.meta.get("autograd_backward", False):
                is_backward = not is_backward
                yield BACKWARD if is_backward else "# forward"
            yield self.line(node)

    def line(self, node: fx.Node) -> str:
        type_ = _type(node.meta.get("val", node.meta.get("example_value")))
        return f"{self.names[node]} = {self.call(node)}" + f"  # {type_}" * bool(type_)

    def call(self, node: fx.Node) -> str:
        if node.op == "placeholder":
            item = self.items[node]
            first = self.graph.identity.canonical(item.fqn) if item.is_state else item.fqn
            tied = f", same_as={first!r}" if first != item.fqn else ""
            more = "".join(f", {each!r}" for each in (item.state, item.attr) if each)
            return f"{item.kind.value.replace(' ', '_')}({item.fqn!r}{tied}{more})"
        if node.op == "get_attr":
            return f"self.{node.target}"
        if node.target is operator.getitem:
            return f"{self.value(node.args[0])}[{self.value(node.args[1])}]"
        group = _group_position(node.target)
        args = [self.group(arg) if index == group else self.value(arg) for index, arg in enumerate(node.args)]
        kwargs = [f"{key}={self.value(value)}" for key, value in node.kwargs.items()]
        if len(args) + len(kwargs) > MAX_ARGUMENTS:
            values = [*node.args, *node.kwargs.values()]
            values = [[*filter(self.is_data, v)] if isinstance(v, (list, tuple)) else v for v in values]
            args, kwargs = [self.value(value) for value in values if self.is_data(value)], ["..."]
        if node.op == "call_method":
            return f"{args[0]}.{node.target}({', '.join([*args[1:], *kwargs])})"
        prefix = "self." if node.op == "call_module" else ""
        return f"{prefix}{_target_name(node.target)}({', '.join([*args, *kwargs])})"

    def is_data(self, value: object) -> bool:
        """Whether an argument of many says what is computed, not how: options and modules' bookkeeping do not."""
        if isinstance(value, (list, tuple)):
            return any(map(self.is_data, value))
        if isinstance(value, fx.Node) and value in self.items:
            item = self.items[value]
            if item.kind is InputKind.PARAMETER:
                return value.meta["val"].numel() > 0
            return item.kind is InputKind.BATCH or "." not in item.fqn
        return isinstance(value, (fx.Node, torch._ops.OpOverload))

    def group(self, name: object) -> str:
        if not isinstance(name, str):
            return self.value(name)
        if name not in self.groups:
            self.groups.append(name)
        return f"group{self.groups.index(name)}"

    def value(self, value: object) -> str:
        if isinstance(value, fx.Node):
            return self.names[value]
        if isinstance(value, torch.dtype):
            return dtype_abbrs[value]
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self.value, value))}]"
        if isinstance(value, torch._ops.OpOverload):
            return _target_name(value)
        return str(value) if isinstance(value, torch.device) else repr(value)


def _output_name(output: GraphOutput) -> str:
    return f"gradient of {output.fqn}" if output.is_gradient else output.fqn or output.kind.value


def _group_position(target: Any) -> int | None:
    if not isinstance(target, torch._ops.OpOverload):
        return None
    names = [argument.name for argument in target._schema.arguments]
    return names.index("group_name") if "group_name" in names else None


def _target_name(target: Any) -> str:
    if isinstance(target, str):
        return target
    if target in SHORT or getattr(target, "default", None) in SHORT:
        return SHORT.get(target) or SHORT[target.default]
    if isinstance(target, torch._ops.OpOverload):
        name = _without_codegen(str(target))
        return name.removesuffix(f".{_usual_overload(target.overloadpacket)}")
    if isinstance(target, torch._ops.OpOverloadPacket | torch._ops.HigherOrderOperator):
        return _without_codegen(str(target).removeprefix("torch.ops.higher_order."))
    return f"{target.__module__.removeprefix('_')}.{target.__name__}"


def _without_codegen(name: str) -> str:
    return re.sub(rf"{LOOKUP}(\w+)_function_pt2", r"lookup_\1", name)


def _usual_overload(packet: Any) -> str:
    return "Tensor" if "Tensor" in packet.overloads() else "default"


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{dtype_abbrs[value.dtype]}[{', '.join(map(str, value.shape))}]"
    # Of several values each has its line.
    return "" if value is None or isinstance(value, (list, tuple)) else str(value)


def read(text: str, stage: Stage = Stage.STEP) -> TrainGraph:
    """Returns the graph that a text shows, with fake values; :func:`show` prints it as it was.

    Parameters are sharded evenly on dim 0 where there is a process group, which is then ``group0``.

    Args:
        text: lines as this module's docstring tells; only inputs need their type.
        stage: the stage of the graph.
    """
    reader = _Reader()
    for line in dedent(text).splitlines():
        reader.read(line)
    graph = TrainGraph(
        module=fx.GraphModule(nn.Module(), reader.graph),
        inputs=tuple(reader.inputs),
        outputs=tuple(reader.outputs),
        identity=IdentityMap.of(reader.model),
        parameters=reader.parameters,
        model=reader.model,
        stage=stage,
    )
    assert show(graph) == dedent(text), f"the text must be\n\n{show(graph)}"
    return graph


class _Reader:
    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.nodes: dict[str, fx.Node] = {}
        self.inputs: list[GraphInput] = []
        self.outputs: list[GraphOutput] = []
        self.parameters: dict[str, ParameterInfo] = {}
        self.model = nn.Module()
        self.is_backward = False
        self.mode = FakeTensorMode()

    def read(self, line: str) -> None:
        if line.startswith("#"):
            self.is_backward = line == BACKWARD
            return
        code, _, comment = line.partition("  # ")
        if code.startswith("return"):
            self.outputs = [_output(what) for what in comment.split(", ")]
            returned = ast.parse(code.removeprefix("return "), mode="eval").body
            self.graph.output([self.value(each) for each in getattr(returned, "elts", [returned])])
            return
        name, _, expression = code.partition(" = ")
        call = ast.parse(expression, mode="eval").body
        node = self.call(call, name) or self.input(call, name, comment)
        self.nodes[name] = node

    def call(self, call: ast.expr, name: str) -> fx.Node | None:
        if isinstance(call, ast.Subscript):
            target: Any = operator.getitem
            args, kwargs = (self.value(call.value), self.value(call.slice)), {}
        else:
            assert isinstance(call, ast.Call)
            target = _find_target(ast.unparse(call.func))
            if target is None:
                return None
            args = tuple(map(self.value, call.args))
            kwargs = {str(keyword.arg): self.value(keyword.value) for keyword in call.keywords}
        node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        with self.mode:
            node.meta["val"] = fake_value(node)
        if self.is_backward:
            node.meta["autograd_backward"] = True
        return node

    def input(self, call: ast.expr, name: str, type_: str) -> fx.Node:
        assert isinstance(call, ast.Call)
        kind, fqn = InputKind(ast.unparse(call.func)), ast.literal_eval(call.args[0])
        self.inputs.append(GraphInput(kind, fqn))
        node = self.graph.placeholder(name)
        dtype, _, sizes = type_.partition("[")
        shape = ast.literal_eval(f"[{sizes}")
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=DTYPES[dtype])
        if kind in (InputKind.PARAMETER, InputKind.BUFFER):
            first = [ast.literal_eval(keyword.value) for keyword in call.keywords]
            self.add_state(fqn, kind, shape, DTYPES[dtype], *first)
        return node

    def add_state(self, fqn: str, kind: InputKind, shape: list[int], dtype: torch.dtype, *first: str) -> None:
        path, _, name = fqn.rpartition(".")
        module = self.model
        for part in path.split(".") if path else ():
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        if kind is InputKind.BUFFER:
            module.register_buffer(name, torch.empty(shape, dtype=dtype))
            return
        if first:
            module.register_parameter(name, self.model.get_parameter(first[0]))
            return
        ranks = tuple(range(dist.get_world_size())) if dist.is_initialized() else ()
        whole = (shape[0] * len(ranks), *shape[1:]) if ranks else tuple(shape)
        module.register_parameter(name, nn.Parameter(torch.empty(whole, dtype=dtype)))
        self.parameters[fqn] = ParameterInfo(fqn, whole, dtype, True, 0 if ranks else None, ranks)

    def value(self, value: ast.expr) -> Any:
        if isinstance(value, ast.Name):
            if value.id == "group0":
                return dist.group.WORLD.group_name
            return self.nodes[value.id] if value.id in self.nodes else DTYPES[value.id]
        if isinstance(value, (ast.List, ast.Tuple)):
            return [self.value(each) for each in value.elts]
        return ast.literal_eval(value)


def _find_target(name: str) -> Any:
    if name in COLLECTIVES:
        return COLLECTIVES[name]
    namespace, *rest = name.split(".")
    if not rest:
        return None
    packet = getattr(getattr(torch.ops, namespace), rest[0])
    return getattr(packet, rest[1] if len(rest) > 1 else _usual_overload(packet))


def _output(what: str) -> GraphOutput:
    if what == "loss":
        return GraphOutput(OutputKind.LOSS)
    kind = OutputKind.GRADIENT if what.startswith("gradient of ") else OutputKind.VALUE
    return GraphOutput(kind, what.removeprefix("gradient of "))

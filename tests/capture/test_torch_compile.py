"""The backend: its options, what passes see at each stage, and that nothing global stays changed."""

from __future__ import annotations

import gc
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

import graphpasses
from graphpasses.errors import CaptureError, LayoutError, PipelineError, UnknownPassError
from graphpasses.graph import InputKind, OutputKind, Stage, TrainGraph
from graphpasses.passes.runner import GraphPass, Numerics, Pipeline

pytestmark = pytest.mark.slow

STAGES = frozenset(Stage) - {Stage.STEP}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 4)
        self.out.weight = nn.Parameter(self.inner.weight.detach().t().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(F.gelu(self.norm(self.inner(x))))


@dataclass(frozen=True)
class Look(GraphPass):
    """Keeps the graphs that it sees."""

    name: ClassVar[str] = "look"
    numerics: ClassVar[Numerics] = Numerics.BITWISE
    stages: ClassVar[frozenset[Stage]] = STAGES
    seen: list[TrainGraph] = field(default_factory=list, compare=False, repr=False)

    def rewrite(self, graph: TrainGraph) -> int:
        self.seen.append(graph.copy())
        return 0


def train(model: nn.Module, call: Any, num_steps: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    values = []
    for step in range(num_steps):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        loss = call(x).square().mean()
        loss.backward()
        values += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*values, *(p.detach().clone() for p in model.parameters())]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_passes_remember_from_one_compilation_to_the_next() -> None:
    look = Look()
    for _ in range(2):
        torch.compiler.reset()  # else Dynamo gives the second instance what it compiled for the first
        call = graphpasses.compile(Net(), pipeline=Pipeline((look,)), inner="aot_eager", dynamic=False)
        call(torch.ones(2, 4))
        call(torch.ones(3, 4))  # compiled again
    memories = [graph.remembered for graph in look.seen]
    first, second = memories[0], memories[-1]
    assert first is not second
    middle = len(memories) // 2
    assert all(memory is first for memory in memories[:middle])
    assert all(memory is second for memory in memories[middle:])


def test_string_works_without_any_import() -> None:
    code = (
        "import torch; model = torch.nn.Linear(4, 2)\n"
        "compiled = torch.compile(model, backend='graphpasses', options={'inner': 'aot_eager'}, fullgraph=True)\n"
        "x = torch.ones(3, 4); print(torch.equal(compiled(x), model(x)))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr


def test_aot_eager_has_eagers_bits_in_training_and_inference() -> None:
    eager, compiled = Net(), Net()
    call = graphpasses.compile(compiled, inner="aot_eager", fullgraph=True)
    assert same(train(eager, eager), train(compiled, call))
    with torch.no_grad():
        assert torch.equal(call(torch.ones(2, 4)), eager(torch.ones(2, 4)))


def test_module_compile_and_functions_go_through_the_same_door() -> None:
    eager, compiled, called = Net(), Net(), Net()
    report = graphpasses.CompileReport()
    compiled.compile(backend="graphpasses", options={"inner": "aot_eager", "report": report})
    function = graphpasses.compile(lambda x: called(x), inner="aot_eager", report=report)
    expected = train(eager, eager)
    assert same(expected, train(compiled, compiled))
    assert same(expected, train(called, function))
    assert report.num_graphs == 2


def test_passes_see_what_every_value_is() -> None:
    look = Look()
    model = Net()
    train(model, graphpasses.compile(model, pipeline=Pipeline((look,)), inner="aot_eager"), num_steps=1)
    assert [graph.stage for graph in look.seen] == [Stage.DYNAMO, Stage.JOINT, Stage.FORWARD, Stage.BACKWARD]
    fqns = {fqn for fqn, _ in model.named_parameters()}
    for graph in look.seen[:3]:
        assert {item.fqn for item in graph.inputs if item.kind is InputKind.PARAMETER} == fqns
    for graph in (look.seen[1], look.seen[3]):
        assert {item.fqn for item in graph.outputs if item.kind is OutputKind.GRADIENT} == fqns
        assert graph.without_gradient == set()
    live = {item.fqn: value for item, value in zip(look.seen[0].inputs, look.seen[0].live, strict=True)}
    assert all(live[fqn] is parameter for fqn, parameter in model.named_parameters())


def test_passes_see_one_joint_graph_whatever_compiles_it() -> None:
    targets = []
    for inner in ("aot_eager", "inductor"):
        look, model = Look(), Net()
        train(model, graphpasses.compile(model, pipeline=Pipeline((look,)), inner=inner), num_steps=1)
        (joint,) = [graph for graph in look.seen if graph.stage is Stage.JOINT]
        targets.append([node.target for node in joint.graph.nodes if node.op == "call_function"])
    assert targets[0] == targets[1]
    assert torch.ops.aten.native_layer_norm.default in targets[0]


def test_inductor_is_equal_up_to_rounding_and_follows_shapes() -> None:
    eager, compiled = Net(), Net()
    call = graphpasses.compile(compiled, fullgraph=True, dynamic=True)
    for expected, actual in zip(train(eager, eager, 1), train(compiled, call, 1), strict=True):
        torch.testing.assert_close(actual, expected)
    for num_rows in (2, 7):
        torch.testing.assert_close(call(torch.ones(num_rows, 4)), compiled(torch.ones(num_rows, 4)))


def test_inductors_cache_knows_the_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    hits = []
    for disable in ((), (), ("look",)):
        torch._dynamo.reset()
        counters.clear()
        model = Net()
        with inductor_config.patch(fx_graph_cache=True):
            train(model, graphpasses.compile(model, pipeline=Pipeline((Look(),)), disable=disable), num_steps=1)
        hits.append(counters["inductor"]["fxgraph_cache_hit"])
        assert counters["aot_autograd"]["autograd_cache_hit"] == 0  # passes that ask other ranks run everywhere
    assert hits == [0, 2, 0]  # forward and backward


@dataclass(frozen=True)
class AddInput(GraphPass):
    """Adds ``offset`` to what the model returns, and refuses when ``offset`` was marked bad."""

    name: ClassVar[str] = "add-input"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    stages: ClassVar[frozenset[Stage]] = frozenset({Stage.DYNAMO})
    offset: torch.Tensor = field(default_factory=lambda: torch.ones(4), compare=False, repr=False)

    def rewrite(self, graph: TrainGraph) -> int:
        (value,) = graph.output_values
        extra = graph.add_input(self.offset, "offset of the test")
        with graph.graph.inserting_after(value):
            total = graph.emit(torch.add, (value, extra), like=value)
        graph.set_output(0, total)
        graph.checks += (self.check,)
        return 1

    def check(self) -> None:
        if self.offset[0] < 0:
            raise LayoutError("the offset is negative")


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_pass_can_add_a_live_input_and_a_check(inner: Any) -> None:
    add, model = AddInput(), Net()
    call = graphpasses.compile(model, pipeline=Pipeline((add,)), inner=inner)
    x = torch.ones(2, 4)
    torch.testing.assert_close(call(x), model(x) + 1)
    add.offset.fill_(3.0)
    torch.testing.assert_close(call(x), model(x) + 3)
    add.offset.fill_(-1.0)
    with pytest.raises(LayoutError, match="the offset is negative"):
        call(x)


@dataclass(frozen=True)
class Refuse(GraphPass):
    name: ClassVar[str] = "refuse"
    numerics: ClassVar[Numerics] = Numerics.BITWISE
    stages: ClassVar[frozenset[Stage]] = frozenset({Stage.JOINT})

    def rewrite(self, graph: TrainGraph) -> int:
        raise LayoutError("table 'users' cannot be moved")


def test_an_error_of_a_pass_arrives_as_it_is() -> None:
    call = graphpasses.compile(Net(), pipeline=Pipeline((Refuse(),)), inner="aot_eager")
    with pytest.raises(LayoutError, match="table 'users' cannot be moved"):
        call(torch.ones(2, 4))


def test_report(tmp_path: Path) -> None:
    path = tmp_path / "report.txt"
    model = Net()
    train(model, graphpasses.compile(model, pipeline=Pipeline((Look(),)), inner="aot_eager", report=path), 1)
    lines = path.read_text().splitlines()
    assert lines[:3] == [
        "1 graph",
        "graph 0, dynamo:",
        "  pass  numerics  rewrites  nodes    collectives  ms",
    ]
    assert [line for line in lines if line.startswith("graph")] == [
        f"graph 0, {stage}:" for stage in ("dynamo", "joint", "forward", "backward")
    ]


class Broken(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()
        return x + 1


def test_report_names_line_and_reason_of_each_graph_break() -> None:
    report = graphpasses.CompileReport()
    with torch.no_grad():
        graphpasses.compile(Broken(), inner="aot_eager", report=report)(torch.ones(2, 4))
    assert report.num_graphs == 2
    (line,) = report.graph_breaks
    number = Broken.forward.__code__.co_firstlineno + 2
    assert line.startswith(f"{__file__}:{number} in forward: Call to `torch._dynamo.graph_break()`")
    assert f"graph break: {line}" in str(report)


@dataclass(frozen=True)
class StepOnly(Refuse):
    name: ClassVar[str] = "step-only"
    stages: ClassVar[frozenset[Stage]] = frozenset({Stage.STEP})


def test_report_says_which_pass_no_compiled_graph_can_take() -> None:
    report = graphpasses.CompileReport()
    graphpasses.compile(Net(), pipeline=Pipeline((StepOnly(),)), inner="aot_eager", report=report)(torch.ones(2, 4))
    assert str(report) == "1 graph\nstep-only: left out, it takes captured steps only"


@dataclass(frozen=True)
class SkipActivation(GraphPass):
    name: ClassVar[str] = "skip-activation"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    stages: ClassVar[frozenset[Stage]] = frozenset({Stage.JOINT})

    def rewrite(self, graph: TrainGraph) -> int:
        nodes = [node for node in graph.graph.nodes if node.target is torch.ops.aten.gelu.default]
        for node in nodes:
            node.replace_all_uses_with(node.args[0])
        return len(nodes)


def test_report_can_be_recorded_with_a_run(tmp_path: Path) -> None:
    report = graphpasses.CompileReport(graph_diff=True)
    model = Net()
    call = graphpasses.compile(model, pipeline=Pipeline((SkipActivation(),)), inner="aot_eager", report=report)
    with graphpasses.ParityRecorder(tmp_path / "run.jsonl") as recorder:
        recorder.record(0, call(torch.ones(2, 4)).sum(), model)
        recorder.record_passes(report.by_graph)
    passes = graphpasses.read_run(tmp_path / "run.jsonl").passes
    assert passes == report.by_graph
    assert list(passes) == ["graph 0, joint"]
    assert passes["graph 0, joint"]["skip-activation"].graph_diff


def test_wrong_options_are_refused_where_they_are_written() -> None:
    model = Net()
    with pytest.raises(
        PipelineError, match=r"unknown option 'iner' of backend 'graphpasses'; .* did you mean 'inner'\?"
    ):
        torch.compile(model, backend="graphpasses", options={"iner": "inductor"})
    with pytest.raises(PipelineError, match="option 'inner' is 'inductor' or 'aot_eager', got 'eager'"):
        graphpasses.compile(model, inner="eager")
    with pytest.raises(PipelineError, match=r"option 'pipeline' takes a graphpasses\.Pipeline, got str"):
        torch.compile(model, backend="graphpasses", options={"pipeline": "fuse"})
    with pytest.raises(PipelineError, match=r"write disable=\['look'\]"):
        graphpasses.compile(model, disable="look")
    with pytest.raises(UnknownPassError, match="unknown pass 'fuse'"):
        graphpasses.compile(model, disable=["fuse"])


def test_a_report_in_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PipelineError) as error:
        graphpasses.compile(Net(), report=tmp_path / "none" / "report.txt")
    assert str(error.value) == (
        f"option 'report' names a file in {tmp_path / 'none'}, which is no folder; make it first"
    )
    assert not (tmp_path / "none").exists()


def test_modes_are_refused() -> None:
    with pytest.raises(PipelineError) as error:
        torch.compile(Net(), backend="graphpasses", mode="max-autotune")
    assert str(error.value) == (
        "backend 'graphpasses' has no mode='max-autotune'; what modes of Inductor set can be set in "
        "torch._inductor.config"
    )


def test_a_model_on_meta_is_refused_until_it_is_materialised() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.ReLU(), nn.Linear(4, 2))
    compiled = graphpasses.compile(model, inner="aot_eager")
    with pytest.raises(CaptureError) as error:
        compiled(torch.ones(2, 4))
    assert str(error.value) == (
        "parameter or buffer '1.weight' is on the meta device; materialise the model (to_empty, then initialise it) "
        "before the first call of what torch.compile returned"
    )
    model.to_empty(device="cpu")
    assert compiled(torch.ones(2, 4)).shape == (2, 2)


def test_nothing_global_stays_changed_and_other_backends_are_left_alone() -> None:
    before = dynamo_config.get_config_copy(), inductor_config.get_config_copy()
    model = Net()
    train(model, graphpasses.compile(model, inner="aot_eager"), 1)
    assert (dynamo_config.get_config_copy(), inductor_config.get_config_copy()) == before
    assert torch.equal(torch.compile(model, backend="eager")(torch.ones(2, 4)), model(torch.ones(2, 4)))


def test_an_aot_graph_is_not_a_step() -> None:
    look = Look()
    graphpasses.compile(Net(), pipeline=Pipeline((look,)), inner="aot_eager")(torch.ones(2, 4))
    with pytest.raises(CaptureError, match="a dynamo graph is run by the compiled model, not by itself"):
        look.seen[0](torch.ones(2, 4))


@pytest.mark.parametrize("in_place", [True, False])
def test_a_dropped_model_is_freed(in_place: bool) -> None:
    model, x = Net(), torch.ones(2, 4)
    compiled: Any = model
    options = {"inner": "aot_eager"}
    if in_place:
        model.compile(backend="graphpasses", options=options)
    else:
        compiled = torch.compile(model, backend="graphpasses", options=options)
    weight, module = model.out.weight, ref(model)
    loss = compiled(x).sum()
    del model, compiled
    gc.collect()
    assert module() is None
    loss.backward()  # which compiles the backward
    eager = Net()
    eager(x).sum().backward()
    assert torch.equal(weight.grad, eager.out.weight.grad)


def test_hooks_that_come_and_go() -> None:
    net, x = Net(), torch.ones(2, 4)
    compiled = graphpasses.compile(net, inner="aot_eager")
    assert torch.equal(compiled(x), net(x))
    hook = net.norm.register_forward_hook(lambda module, args, output: 2 * output)
    assert torch.equal(compiled(x), net(x))
    hook.remove()
    assert torch.equal(compiled(x), net(x))


def test_a_module_that_runs_eagerly_inside() -> None:
    loss = torch.compiler.disable(nn.MSELoss())
    compiled = graphpasses.compile(lambda x: loss(x.sin(), x), inner="aot_eager")
    assert torch.equal(compiled(x := torch.ones(2, requires_grad=True)), loss(x.sin(), x))

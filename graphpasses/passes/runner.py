"""Run passes over a captured step, check the graph between them, and report what each did."""

from __future__ import annotations

import abc
import dataclasses
import functools
import hashlib
import inspect
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
from torch import fx

from graphpasses._torch.fake_mode import strides_of_kernels
from graphpasses._torch.fsdp2_accumulation import accumulation_set_aside
from graphpasses._torch.operator_recorder import recording_paused
from graphpasses.errors import GraphPassesError, PipelineError, ProofError, UnknownPassError
from graphpasses.fsdp.traffic import graph_traffic, has_fixed_sizes
from graphpasses.gc_pause import paused_gc
from graphpasses.graph import DynamoGraph, Stage, TrainGraph
from graphpasses.graph.certificate import Certificate, joined
from graphpasses.graph.nodes import eliminate_dead_code
from graphpasses.graph.pass_report import Numerics, PassReport, PipelineReport
from graphpasses.graph.rules import Verifier
from graphpasses.passes.graph_diff import diff_lines, read_lines
from graphpasses.progress import stage, stages_shown
from graphpasses.proof.prove import launches_of_rounding, prove_as
from graphpasses.roomy_stack import with_roomy_stack
from graphpasses.source_digest import digest_of_sources

__all__ = ["GraphPass", "Numerics", "PassReport", "Pipeline", "PipelineReport"]

Graph = TypeVar("Graph", bound=TrainGraph)


@dataclass(frozen=True)
class GraphPass(abc.ABC):
    """A rewrite of a captured training step; a frozen dataclass whose fields are its options.

    A subclass sets ``name`` (its command-line name: its file's name, with dashes), ``numerics`` and, where it
    needs them, ``stages`` and ``runs_after``, and implements :meth:`rewrite`. Verification, dead code, timing
    and reports are the pipeline's work.

    Example:
        >>> @dataclass(frozen=True)
        ... class RemoveDetach(GraphPass):
        ...     name = "remove-detach"
        ...     numerics = Numerics.BITWISE
        ...
        ...     def rewrite(self, graph):
        ...         nodes = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default)
        ...         for node in nodes:
        ...             node.replace_all_uses_with(node.args[0])
        ...         return len(nodes)
    """

    name: ClassVar[str]
    numerics: ClassVar[Numerics]
    stages: ClassVar[frozenset[Stage]] = frozenset(Stage)
    runs_after: ClassVar[frozenset[str]] = frozenset()

    @abc.abstractmethod
    def rewrite(self, graph: TrainGraph) -> int:
        """Rewrites ``graph``, a copy that the pass owns; returns the number of rewrites, 0 if nothing changed."""

    def uuid(self) -> str:
        """Returns a digest for compilers' caches: of the pass's options, its module and package, and graphpasses."""
        module = sys.modules[type(self).__module__]
        package = getattr(sys.modules.get(module.__name__.partition(".")[0]), "__path__", ())
        folders = dict.fromkeys([str(Path(__file__).parents[1]), *package])
        sources = [inspect.getsource(module), *map(digest_of_sources, folders)]
        return hashlib.sha256("\n".join([self.name, *sources, repr(self)]).encode()).hexdigest()

    def as_function(
        self, step: TrainGraph, reports: list[PassReport] | None = None, *, graph_diff: bool = False
    ) -> Callable[..., fx.GraphModule]:
        """Returns the pass as a plain function ``(gm, example_inputs=None) -> gm``, for other runners.

        The function checks the graph as the pipeline does, keeps the flat signature (no placeholder goes)
        and rewrites ``gm`` in place.

        Args:
            step: the traced step to which the graph module belongs; it says what inputs and outputs are.
            reports: gets what the pass did, each time it runs.
            graph_diff: whether reports show the places that changed.
        """

        def run(gm: fx.GraphModule, example_inputs: object = None) -> fx.GraphModule:
            graph = dataclasses.replace(step, module=gm, fixed_signature=True, notes=[], timelines=[])
            report = _run_pass(self, graph, Verifier(graph), (), graph_diff)
            if reports is not None:
                reports.append(report)
            gm.recompile()
            return gm

        run.__name__ = re.sub(r"\W", "_", self.name) + "_pass"
        run.__doc__ = inspect.getdoc(self)
        return run


@dataclass(frozen=True)
class Pipeline:
    """A literal sequence of passes.

    Args:
        passes: the passes, in the order in which they run.
        disable: names of passes to leave out.
        stop_after: name of the last pass to run, to bisect; None runs all.

    Raises:
        UnknownPassError: ``disable`` or ``stop_after`` names a pass that is not among ``passes``.
        PipelineError: a name occurs twice, or a pass stands before one that it must run after.

    Example:
        >>> import torch
        >>> from graphpasses import capture_train_step
        >>> from graphpasses.passes import CoalesceGradReductions, DeduplicateShared
        >>> model = torch.nn.Linear(4, 1)
        >>> captured = capture_train_step(lambda model, x: model(x).square().mean(), model, torch.ones(2, 4))
        >>> step = Pipeline((DeduplicateShared(), CoalesceGradReductions())).run(captured)
        >>> [report.name for report in step.report]
        ['deduplicate-shared', 'coalesce-grad-reductions']
    """

    passes: tuple[GraphPass, ...]
    disable: Collection[str] = ()
    stop_after: str | None = None

    def __post_init__(self) -> None:
        names = [p.name for p in self.passes]
        for name in names:
            if names.count(name) > 1:
                raise PipelineError(f"pass {name!r} is in the pipeline {names.count(name)} times")
        if isinstance(self.disable, str):
            raise PipelineError(f"disable takes a collection of names; write disable=({self.disable!r},)")
        wanted = [*self.disable, *([self.stop_after] if self.stop_after is not None else [])]
        for name in wanted:
            if name not in names:
                raise UnknownPassError(f"unknown pass {name!r}; this pipeline has: {', '.join(names)}")
        for index, p in enumerate(self.passes):
            late = [name for name in names[index + 1 :] if name in p.runs_after]
            if late:
                raise PipelineError(f"pass {p.name!r} must run after {late[0]!r}: move it later in the pipeline")

    @property
    def _running(self) -> tuple[GraphPass, ...]:
        """Those that are not left out."""
        names = [p.name for p in self.passes]
        end = len(names) if self.stop_after is None else names.index(self.stop_after) + 1
        return tuple(p for p in self.passes[:end] if p.name not in self.disable)

    def at(self, stage: Stage) -> Pipeline:
        """Returns the pipeline of those passes that accept graphs of a stage."""
        return Pipeline(tuple(p for p in self._running if stage in p.stages))

    def uuid(self) -> str:
        """Returns a digest of the passes that run and of their options, for compilers' caches."""
        return hashlib.sha256("\n".join(p.uuid() for p in self._running).encode()).hexdigest()

    @with_roomy_stack
    def run(
        self, graph: Graph, *, dump: Path | str | None = None, graph_diff: bool = False, prove: bool | None = None
    ) -> Graph:
        """Runs the passes over a copy of ``graph``; ``graph`` itself stays as it was.

        Args:
            graph: the captured step.
            dump: folder for the readable code of the graph after every pass; None writes nothing.
            graph_diff: whether the report shows the places that each pass changed, and what the step sends before and
                after it, which takes about as long as the passes.
            prove: whether the result is proved to have the bits that ``graph`` has, see :func:`graphpasses.prove`.
                None does so, and reports what could not be followed; True raises for that, too; False does not. The
                result of a pass that may round is taken as it is. A proof takes about a fifth of the capture's
                time.

        Returns:
            The rewritten step; its ``report`` says what each pass did.

        Raises:
            VerificationError: a pass left a malformed graph; it names the pass and the ones before it.
            PipelineError: a pass raised something else; its own exception is the cause.
            ProofError: a pass changes bits; it names the pass, the first value that it changes, and where. Or, with
                ``prove=True``, something could not be followed, or a pass may round.
            GraphPassesError: what the passes themselves refuse.
        """
        notes = tuple(graph.notes) if graph.report is None else graph.report.notes
        # Passes ask how FSDP2 reduces.
        with (
            accumulation_set_aside(graph.model),
            recording_paused(),
            stages_shown(),
            paused_gc(),
            _random_numbers_kept(),
        ):
            rewritten = graph.copy()
            folder = Path(dump) if dump is not None else None
            reports, rounded = self._rewrite(rewritten, folder, graph_diff, keeps_rounded=prove is not False)
            if prove is not False:
                stage("proves that the passes keep bits")
            certificate = None if prove is False else self._prove(graph, rewritten, rounded)
            rounded = [each for each in rounded if each.did]
        if prove and (why := _why_not_proved(certificate, rounded)):
            raise ProofError(f"prove=True: {why}")
        rewritten.report = PipelineReport(tuple(reports), notes, certificate, _proof(certificate, rounded))
        rewritten.record_rewrite(functools.partial(self.run, graph_diff=graph_diff, prove=prove))
        return rewritten

    def _rewrite(
        self, graph: TrainGraph, folder: Path | None, graph_diff: bool, *, keeps_rounded: bool
    ) -> tuple[list[PassReport], list[_Rounded]]:
        """Runs the passes; returns their reports, and if asked for what those that may round were given and made."""
        rounded: list[_Rounded] = []
        verifier = Verifier(graph)
        reports: list[PassReport] = []
        _write(folder, 0, "captured", graph)
        for p in self._running:
            before = tuple(report.name for report in reports)
            stage(p.name)
            may_round = keeps_rounded and p.numerics is Numerics.ROUNDING
            given = graph.copy() if may_round and before else None
            reports.append(_run_pass(p, graph, verifier, before, graph_diff))
            _write(folder, len(reports), p.name, graph)
            # Ranks describe what they launch beside what such a pass was given, also where it did nothing.
            is_compared = graph.stage is Stage.STEP and any(reports[-1].collectives)
            if may_round and (reports[-1].num_rewrites or is_compared):
                rounded.append(_Rounded(p.name, given, graph.copy(), did=bool(reports[-1].num_rewrites)))
        graph.module.recompile()
        return reports, rounded

    def _prove(self, original: TrainGraph, graph: TrainGraph, rounded: Sequence[_Rounded]) -> Certificate:
        """Proves what is between passes that may round, and before and after them."""
        passes, certificates, launches = self.at(graph.stage).passes, [], {}
        captured: TrainGraph | None = None
        for each in (*rounded, None):
            names = [p.name for p in passes]
            end = names.index(each.name) if each else len(names)
            after = each.given if each else graph
            if after is not None:
                certificates.append(self._prove_part(original, after, passes[:end], captured))
            if each:
                history = f"pass {each.name!r}"
                if after is not None:
                    launches[f"what {history} was given"] = certificates[-1].launches
                launches[f"what {history} made"] = launches_of_rounding(history, after or original, each.made)
                captured = captured or original
                original, passes = each.made, passes[end + 1 :]
        return dataclasses.replace(joined(certificates), rounding=launches)

    def _prove_part(
        self, original: TrainGraph, graph: TrainGraph, passes: Sequence[GraphPass], captured: TrainGraph | None
    ) -> Certificate:
        layout = next((found for p in passes if (found := getattr(p, "expected_layout", None))), None)
        is_planned = any(getattr(p, "plan", None) is not None for p in passes)
        try:
            return prove_as("the pipeline", original, graph, layout, is_planned=is_planned, captured=captured)
        except ProofError:
            self._blame(original, passes, captured, is_planned=is_planned)
            raise

    def _blame(
        self, original: TrainGraph, passes: Sequence[GraphPass], captured: TrainGraph | None, *, is_planned: bool
    ) -> None:
        """Raises for the first pass after which the step cannot be proved, if it is one pass alone."""
        graph = original.copy()
        verifier = Verifier(graph)
        names = tuple(p.name for p in passes)
        for index, p in enumerate(passes):
            _run_pass(p, graph, verifier, names[:index], False)
            prove_as(_history(p, names[:index]), original, graph, None, is_planned=is_planned, captured=captured)


@dataclass(frozen=True)
class _Rounded:
    """A pass that ran and may round."""

    name: str
    given: TrainGraph | None  # None: what was captured
    made: TrainGraph
    did: bool  # whether it rewrote anything


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Leaves all generators of random numbers as they were: what a pass draws is not drawn by eager."""
    is_there = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = range(torch.cuda.device_count()) if is_there else ()
    with torch.random.fork_rng(devices):
        yield


def _why_not_proved(certificate: Certificate | None, rounded: Sequence[_Rounded]) -> str:
    if rounded:
        return f"pass {rounded[-1].name!r} may round; without it, or with prove=None, the rest is proved"
    first = next(iter(() if certificate is None else certificate.unproved), None)
    return "" if first is None else f"{first[0]} is not proved: {first[1]}"


def _proof(certificate: Certificate | None, rounded: Sequence[_Rounded]) -> str:
    if certificate is None:
        return "off (prove=False)"
    names = " and ".join(repr(each.name) for each in rounded)
    since = f"but for what {names} did, which may round: " if rounded else ""
    return since + certificate.summary


def _run_pass(
    p: GraphPass, graph: TrainGraph, verifier: Verifier, before: tuple[str, ...], graph_diff: bool
) -> PassReport:
    history = _history(p, before)
    if graph.stage not in p.stages:
        stages = ", ".join(sorted(stage.value for stage in p.stages))
        raise PipelineError(f"{history} accepts the stages {stages}; this graph is a {graph.stage.value}")
    if graph.stage is Stage.DYNAMO:
        DynamoGraph.of(graph)  # raises where it is of another kind
    num_nodes, collectives = len(graph.graph.nodes), graph.collectives()
    lines = read_lines(graph) if graph_diff else []
    shows_traffic = graph_diff and graph.stage is Stage.STEP and has_fixed_sizes(graph)
    traffic = graph_traffic(graph) if shows_traffic else None
    start = time.perf_counter()
    try:
        with strides_of_kernels():
            num_rewrites = p.rewrite(graph)
    except GraphPassesError as error:
        error.add_note(f"raised by {history}")
        raise
    except Exception as error:
        raise PipelineError(f"{history} failed: {type(error).__name__}: {error}") from error
    seconds = time.perf_counter() - start
    verifier.check_form(history)
    start = time.perf_counter()
    if verifier.is_changed and graph.stage is not Stage.DYNAMO:  # fx knows no effects of torch-level calls
        eliminate_dead_code(graph.graph)
    seconds += time.perf_counter() - start
    verifier.check_rules(history)
    notes, graph.notes = tuple(graph.notes), []
    timelines, graph.timelines = tuple(graph.timelines), []
    found, num_left_out = diff_lines(lines, read_lines(graph)) if graph_diff else ((), 0)
    return PassReport(
        name=p.name,
        numerics=p.numerics,
        num_rewrites=num_rewrites,
        num_nodes=(num_nodes, len(graph.graph.nodes)),
        collectives=(collectives, graph.collectives()),
        seconds=seconds,
        notes=notes,
        graph_diff=found,
        num_left_out=num_left_out,
        traffic=(traffic, graph_traffic(graph)) if traffic is not None else None,
        timelines=timelines,
    )


def _history(p: GraphPass, before: Sequence[str]) -> str:
    return f"pass {p.name!r}" + (f" (after {', '.join(before)})" if before else "")


def _write(folder: Path | None, index: int, name: str, graph: TrainGraph) -> None:
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    code = graph.module.print_readable(print_output=False, include_stride=True)
    (folder / f"{index:02d}-{name}.py").write_text(code)

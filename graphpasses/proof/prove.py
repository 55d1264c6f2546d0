"""Prove, without running anything, that a rewritten step has the bits of the step that it was made from."""

from __future__ import annotations

import time
from collections.abc import Container
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields
from typing import TYPE_CHECKING

from torch import fx
from torch.types import py_sym_types

from graphpasses.errors import ProofError
from graphpasses.fbgemm.names import FBGEMM
from graphpasses.fsdp.layout import Layout
from graphpasses.graph import ALL_TO_ALL, Stage, TrainGraph, is_collective
from graphpasses.graph.certificate import Certificate, Launch
from graphpasses.proof import eager_gradients
from graphpasses.proof.bookkeeping import what_is_another
from graphpasses.proof.calls import GRADIENT
from graphpasses.proof.core.operators import AXIOMS
from graphpasses.proof.core.values import Value
from graphpasses.proof.core.views import View
from graphpasses.proof.counterexample import Runs, Trial
from graphpasses.proof.difference import Difference, are_drawn_alike, find_difference
from graphpasses.proof.eager_gradients import EagerGradients, layout_of
from graphpasses.proof.evaluated import Evaluated, are_touched_alike, numbers_in
from graphpasses.proof.launches import launches_of
from graphpasses.proof.pairs import context_set, evaluate_both, why_not_evaluated
from graphpasses.proof.rows import RowValues
from graphpasses.text import some

if TYPE_CHECKING:
    from graphpasses.simulate import Topology

AXIOMS |= {
    "operators": (
        "an operator's result depends on its arguments' values, shapes, dtypes, devices and strides, on how far each "
        "begins behind a multiple of 64 bytes unless it computes element by element, and on no more; a collective's "
        "also on which one it is of those in which this rank sends the same; what draws random numbers is tagged so"
    ),
    "eager's place": eager_gradients.AXIOM,
    "eager's order": eager_gradients.TOPOLOGY_AXIOM,
    "lists": (
        "an operator on lists of tensors does with each element what it does with that alone, on an accelerator in "
        "lists that the same kernels compute"
    ),
}


def prove(
    before: TrainGraph, after: TrainGraph, *, layout: Layout | None = None, topology: Topology | None = None
) -> Certificate:
    """Proves that a rewritten step computes the bits of the step that it was made from.

    Both are evaluated on numbers that name values: the same operator on the same inputs has the same number, and
    operators that only move elements are followed element by element. Nothing is run, and no other rank is asked;
    every rank proves its own graph, and :attr:`Certificate.launches` must be the same on all.

    Args:
        before: the step as it was captured, or as it was before a pass.
        after: the rewritten step.
        layout: where eager reduces gradients, e.g. ``eager_layout(eager_model)``: then a gradient may also be
            autograd's local sum of its uses, reduced at eager's place, as that of a SimpleFSDP model is.
        topology: of the cluster, with ``layout``: then a gradient may also lie at another place where NCCL adds all
            its elements in eager's order, as :func:`graphpasses.simulate.predict` says. Without one only eager's
            place counts, which is right on every cluster.

    Returns:
        What is proved, what could not be followed, and what was taken for granted.

    Raises:
        ProofError: the rewritten step *changes* the loss, a gradient or something that the step writes: it is lost,
            or both were run on random inputs, and parted. Or it *is not proved to keep* it: it is computed otherwise,
            in a way that no rule knows, and that cannot be run here (it is too large, or needs other ranks). The
            error names the first such value, the smallest part in which the graphs differ, and the inputs. What is
            computed otherwise, but alike on these inputs, is no error: it is not proved.

    Example:
        >>> model = nn.Linear(4, 1)
        >>> step = graphpasses.capture_train_step(lambda model, x: model(x).square().mean(), model, torch.ones(2, 4))
        >>> certificate = prove(step, graphpasses.Pipeline((graphpasses.passes.DeduplicateShared(),)).run(step))
        >>> certificate.proved
        ('the loss', "the gradient of 'weight'", "the gradient of 'bias'")
    """
    if topology is not None and layout is None:
        raise ValueError("topology says in which order gradients are added; give eager's layout=, too")
    return prove_as("the rewritten step", before, after, layout, topology=topology)


def prove_as(
    subject: str,
    before: TrainGraph,
    after: TrainGraph,
    layout: Layout | None,
    *,
    is_planned: bool = False,
    topology: Topology | None = None,
    captured: TrainGraph | None = None,
) -> Certificate:
    """Does what :func:`prove` does, in the name of a pass.

    ``captured`` is the step of which passes have made ``before``, if it is another: its fake values are true.

    With ``is_planned`` a plan says how gradients are reduced, which may be otherwise than in ``before``; without a
    layout they then are not proved, as long as they are autograd's sums, reduced and scaled.
    """
    start = time.perf_counter()
    if reason := why_not_evaluated(before, after):
        return Certificate((), (("the graph", reason),), {}, (), time.perf_counter() - start)
    pair = evaluate_both(subject, before, after, captured)
    values, one, two = pair.values, pair.one, pair.two
    proof = _Proof(subject, before, after, values, one, two, layout, topology, is_planned)
    proof.compare()
    proof.leave_open(pair.updated, pair.sizes.wrong)
    names = {"operators", "NaNs", *one.axioms, *two.axioms}
    return Certificate(
        tuple(proof.proved),
        tuple(proof.unproved),
        {name: AXIOMS[name] for name in AXIOMS if name in names},
        launches_of(values, one, two),
        time.perf_counter() - start,
    )


def launches_of_rounding(subject: str, before: TrainGraph, after: TrainGraph) -> tuple[Launch, ...]:
    """Returns the launches of what a pass that may round has made, beside those of what it was given.

    Raises:
        ProofError: what rounding does not excuse: bits depend on chance, a check or a write is lost, or other random
            numbers are drawn; or what the step does beside its graph is another.
    """
    one, two = (" and ".join(context_set(graph)) or "nothing" for graph in (before, after))
    if one != two:
        raise ProofError(f"{subject} sets {two} for the calls after it, where it was {one}, which is no rounding")
    if name := what_is_another(before, after):
        raise ProofError(f"{subject} makes the step's {name} another, which is no rounding")
    if why_not_evaluated(before, after):
        return ()
    pair = evaluate_both(subject, before, after)
    known, nodes = {each.name for each in pair.two.checks.values()} | pair.two.written.keys(), pair.one.nodes
    lost = [(each.name, each.node) for each in pair.one.checks.values() if each.name not in known]
    lost += [(name, nodes[name]) for name in pair.one.written if name not in known and name in nodes]
    for name, node in lost:
        raise ProofError(f"{subject} changes {name}: {Difference(node, None, 'it is lost')}")
    if not are_drawn_alike(pair.values, pair.one.random_state, pair.two.random_state):
        raise ProofError(f"{subject} draws other random numbers, or in another order, which is no rounding")
    return launches_of(pair.values, pair.one, pair.two)


@dataclass
class _Proof:
    """Compares what two graphs do; see :func:`prove_as`."""

    subject: str
    before: TrainGraph
    after: TrainGraph
    values: RowValues
    one: Evaluated  # what the graph ``before`` does
    two: Evaluated  # what the graph ``after`` does
    layout: Layout | None
    topology: Topology | None
    is_planned: bool
    proved: list[str] = field(default_factory=list)
    unproved: list[tuple[str, str]] = field(default_factory=list)
    changed: list[tuple[str, Difference]] = field(default_factory=list)
    refused: list[tuple[str, Difference]] = field(default_factory=list)  # what may be as it was

    def __post_init__(self) -> None:
        layout = layout_of(self.before, self.after, self.layout)
        self._eager: EagerGradients | None = None
        if layout is not None:
            self._eager = EagerGradients(
                self.values,
                self.before,
                self.one,
                layout,
                is_eagers=self.layout is not None,
                may_scale=self.is_planned,
                topology=self.topology,
            )
        updates = [graph.update for graph in (self.before, self.after) if graph.update is not None]
        modules = [self.before.module, self.after.module, *(update.module for update in updates)]
        common = self.one.made.keys() & self.two.made.keys()
        self._runs = Runs(self.values, [module.graph for module in modules], common)

    def compare(self) -> None:
        one = {**self.one.outputs, **self.one.written}
        two = {**self.two.outputs, **self.two.written}
        for name in {**one, **two}:
            self._compare(name, one.get(name), two.get(name), is_known=name in one)
        self._compare_checks()
        self._compare_uses()
        if self.one.random_state != self.two.random_state:
            name = "the state of random numbers after the step"
            if are_drawn_alike(self.values, self.one.random_state, self.two.random_state):
                self.unproved.append((name, "numbers are drawn for other values"))  # which the outputs tell
            else:
                found = Difference(None, None, "other numbers are drawn, or the state is put back otherwise")
                trial = self._runs.compare("source", self.one.random_state, self.two.random_state)
                self._judge(name, found, trial)
        if self.one.touched != self.two.touched:
            name = "the gradients of what is written in place"
            if are_touched_alike(self.one, self.two):
                self.unproved.append((name, "other values lie there"))  # which the outputs tell
            else:
                found = Difference(None, None, "other calls read or write it, or in another order, or otherwise")
                self.refused.append((name, found))
        if self.one.context != self.two.context:
            found = Difference(None, None, "gradients are left on or off, or autocast, as they were not")
            self.refused.append(("what is set around the calls after the graph", found))
        if self.one.hidden_state != self.two.hidden_state:
            name = "what calls keep that may have a state of their own"
            self.unproved.append((name, "others were made, or in another order"))
        if not self.changed and not self.refused:
            return
        order = {node: index for index, node in enumerate(self.after.graph.nodes)}
        candidates = self.changed or self.refused
        name, first = min(candidates, key=lambda each: order.get(each[1].after, len(order)))
        others = [other for other, _ in (*self.changed, *self.refused) if other != name]
        more = f" (and {len(others)} others: {', '.join(others[:3])}{', …' * (len(others) > 3)})" if others else ""
        verb = "changes" if self.changed else "is not proved to keep"
        raise ProofError(f"{self.subject} {verb} {name}{more}: {first}")

    def leave_open(self, updated: Container[str], wrong: str) -> None:
        """Takes back what was proved of gradients that are not, and all if ranks were told what is not so."""
        if wrong:
            self.unproved += [(name, wrong) for name in self.proved]
            self.proved = []
        if any(name.startswith(GRADIENT) for name, _ in self.unproved):
            reason = "it is made of gradients, of which some are not proved"
            self.unproved += [(name, reason) for name in self.proved if name in updated]
            self.proved = [name for name in self.proved if name not in updated]

    def _judge(self, name: str, found: Difference, trial: Trial) -> None:
        """Notes what was found to be computed otherwise, by what running it has shown."""
        if trial.parts:
            self.changed.append((name, replace_fields(found, shown=trial.parts)))
        elif trial.reason and self._has_sizes_of_data():
            self.unproved.append((name, f"no rule looks into sizes that depend on data: {found}"))
        elif trial.reason:
            self.refused.append((name, replace_fields(found, shown=f"it cannot be run here: {trial.reason}")))
        else:
            self.unproved.append((name, f"no rule says that it is the same, as it is on random inputs: {found}"))

    def _has_sizes_of_data(self) -> bool:
        """Whether a tensor that comes from outside has a size that is not known, so that nothing can be run."""
        views = (View.of(node.meta.get("val")) for node in self.before.placeholders)
        return any(view is not None and not view.is_known for view in views)

    def _compare_checks(self) -> None:
        """Asks whether all is checked that was, with the same words, and in a step after the same writes."""
        is_step = self.before.stage is Stage.STEP  # AOTAutograd puts writes at the end, from where passes take them
        for key, one in self.one.checks.items():
            two = self.two.checks.get(key)
            moved = dict(one.written.items() ^ two.written.items()) if is_step and two is not None else {}
            names = sorted(moved.keys() - dict(self.unproved).keys())
            kinds = [type(each.meta["val"]) for each in one.node.all_input_nodes]
            if two is None and any(issubclass(kind, py_sym_types) for kind in kinds):
                self.unproved.append((one.name, "no rule looks into sizes that depend on data"))
            elif two is None or two.name != one.name or names:
                reason = f"another write of {some(names, limit=3)} is before or after it" if names else "it is lost"
                self.changed.append((one.name, Difference(one.node, two and two.node, reason)))
            elif one.name not in self.proved:
                self.proved.append(one.name)

    def _compare_uses(self) -> None:
        """Compares in which order autograd adds gradients, of values that both graphs have."""
        known = [self.one.numbers(), self.two.numbers()]
        for value, uses in self.one.uses.items():
            others = self.two.uses.get(value, [])
            if uses == others:
                continue
            mine, theirs = ({*numbers_in(found)} for found in (uses, others))
            are_known = mine <= known[1] and theirs <= known[0]
            one, two = self.one.makers.get(value.number), self.two.makers.get(value.number)
            is_table = one is not None and any(str(user.target).startswith(FBGEMM) for user in one.users)
            # Where no call reads one that is known, but for tables, a call reads it without a gradient.
            is_known = bool(others) or (value.number in known[1] and not is_table)
            if max(len(uses), len(others)) == 1 and not (is_known and are_known):
                continue
            name = f"the gradient of {one.name if one is not None else 'a value that no call returns'}"
            reason = "autograd adds it up from other calls, or in another order"
            if one is not None and two is not None:
                if not are_known:
                    # What reads it was not found to be equal, which the outputs tell.
                    reason = "other values are made of it"
                elif is_table:
                    reason += ": lookups update a table"
                else:
                    self.refused.append((name, Difference(one, two, reason)))
                    continue
            self.unproved.append((name, reason))

    def _compare(self, name: str, one: Value | None, two: Value | None, *, is_known: bool) -> None:
        if one is two and not self._lost_another(name):
            before, after = (each.lies.get(name, frozenset()) for each in (self.one, self.two))
            if lies := after - before:  # who writes memory of two changes both, who reads it may round by its strides
                self.unproved.append((name, f"it lies in {some(sorted(lies), limit=3)}, as it did not"))
            elif (lies := before - after) and not name.startswith(GRADIENT):
                self.unproved.append((name, f"it no longer lies in {some(sorted(lies), limit=3)}"))
            else:
                self.proved.append(name)
            return
        reason = self._unlike_eager(name, one, two)
        if one is two and reason != "":
            self.changed.append(
                (name, Difference(None, self.two.nodes.get(name), "the gradient of another use is lost"))
            )
            return
        if reason and self._eager is not None and self._eager.is_apart(_parameter_of(name)):
            self.unproved.append((name, "uses of it are reduced apart, in several buckets"))
            return
        if reason == "":
            if self._eager is not None and self._eager.is_scaled:
                self.unproved.append((name, "it is divided, and no layout says by what eager divides"))
            elif self.layout is not None:
                self.two.axioms.add("eager's place")
                self.proved.append(name)
            else:
                self.unproved.append((name, "its summands are autograd's, but where eager reduces it was not given"))
            return
        if one is None or two is None:
            if self.two.unknown:
                self.unproved.append((name, f"no rule looks into {self.two.unknown}"))
            elif reason is None:
                is_further = name.startswith(GRADIENT) and name.endswith(")")
                if is_known and two is None and is_further and self._eager is not None:
                    return  # of a tied parameter's outputs one has the total
                reason = "it is lost" if two is None else "it was not computed, or written, before"
                lost = Difference(self.one.nodes.get(name), self.two.nodes.get(name), reason)
                self.changed.append((name, lost))
            else:
                self.changed.append((name, Difference(None, self.two.nodes.get(name), reason)))
            return
        found = find_difference(self.values, self.one, self.two, one, two)
        if reason is not None and self._is_reduction(found):
            found = Difference(found.before, found.after, reason)
        trial = Trial() if reason is not None else self._runs.compare("value", one.number, two.number)
        unknown = found.unknown or self.two.unknown or self._rests_on_others(found)
        if unknown and not trial.parts:
            self.unproved.append((name, f"no rule looks into {unknown}: {found}"))
        elif reason is not None:  # it is not where eager has it
            self.changed.append((name, found))
        else:
            self._judge(name, found, trial)

    def _lost_another(self, name: str) -> bool:
        """Whether another output of the same gradient, of a tied parameter, is lost: this one must have the total."""
        others = [other for other in self.one.outputs if other.startswith(f"{name} (")]
        return any(self.two.outputs.get(other) is None for other in others)

    def _rests_on_others(self, found: Difference) -> str:
        """Returns what a value is made of that ranks tell each other: sizes of data, all-to-alls cut anew; or
        nothing.
        """
        known = {launch.arguments for launch in self.one.collectives}
        odd = {
            launch.node
            for launch in self.two.collectives
            if launch.node.target == ALL_TO_ALL and launch.arguments not in known and not launch.is_followed
        }
        odd |= {unpack for unpack, members in self.two.unpacked.items() if not known.issuperset(members)}
        pending, seen = [node for node in (found.before, found.after) if node is not None], set[fx.Node]()
        while pending:
            node = pending.pop()
            if node in odd:
                return str(node.target)
            if isinstance(node.meta.get("val"), py_sym_types):
                return "sizes that depend on data"
            if node not in seen:
                seen.add(node)
                pending += node.all_input_nodes
        return ""

    def _unlike_eager(self, name: str, one: Value | None, two: Value | None) -> str | None:
        """Returns how a gradient differs from eager's; None where nothing is known of eager's."""
        if self._eager is None or two is None or two.pieces is None or not name.startswith(GRADIENT):
            return None
        if one is not None and (one.dtype, one.shape) != (two.dtype, two.shape):
            return f"it has dtype {two.dtype} and shape {two.shape}, not {one.dtype} and {one.shape}"
        return self._eager.difference(_parameter_of(name), two)

    @staticmethod
    def _is_reduction(found: Difference) -> bool:
        return any(
            not isinstance(node, fx.Node) or is_collective(node) or "_c10d_functional" in str(node.target)
            for node in (found.before, found.after)
        )


def _parameter_of(name: str) -> str:
    return name.split("'")[1]

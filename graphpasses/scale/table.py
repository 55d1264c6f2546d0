"""Steps side by side at several numbers of ranks: what ``layout show --scale`` prints and the report draws."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from graphpasses.errors import TopologyError
from graphpasses.fsdp.layout import Layout
from graphpasses.fsdp.traffic import layout_traffic
from graphpasses.graph.pass_report import PipelineReport
from graphpasses.graph.traffic import Traffic
from graphpasses.scale.speeds import Speeds
from graphpasses.scale.step_time import StepTime, step_time


@dataclass(frozen=True)
class ScaleRow:
    """A step on a number of ranks."""

    num_ranks: int  # of the world
    step: str  # what it is called
    num_transfers: int = 0  # its collectives
    num_bytes: int = 0  # of all of them, as in :class:`graphpasses.scale.Transfer`
    times: Mapping[str, StepTime] = field(default_factory=dict)  # by algorithm; empty if there are none
    trouble: str = ""  # why there are none

    def cell(self, algorithm: str) -> str:
        """Returns the exposed and the hidden time of one of ``times``, in milliseconds, for people."""
        time = self.times[algorithm]
        return f"{1e3 * time.exposed:,.2f} + {1e3 * time.hidden:,.2f}"

    def to_json(self) -> dict[str, Any]:
        """Returns plain dicts, hidden times among them."""
        times = {name: {**asdict(time), "hidden": time.hidden} for name, time in self.times.items()}
        return {**asdict(self), "times": times}


def bucketings(
    layout: Layout, num_ranks: int, speeds: Speeds, others: Mapping[str, Iterable[Sequence[str]]]
) -> dict[str, Traffic]:
    """Returns what a step would send with the buckets of a recorded run's layout, and with others.

    ``speeds`` has the batch's tokens and the dtype of parameters, ``others`` the FQNs of other buckets, by name. By
    name: one collective per parameter, each waited for at once, as a step is traced; the layout's; others.

    Raises:
        LayoutError: buckets mix reductions.
    """
    made = {"no passes: one per parameter": layout.regrouped(()), "the run's buckets": layout}
    made |= {name: layout.regrouped(buckets) for name, buckets in others.items()}
    return {
        name: layout_traffic(
            each,
            num_ranks,
            num_tokens=speeds.tokens,
            param_dtype=speeds.param_dtype,
            overlap=not name.startswith("no passes"),
        )
        for name, each in made.items()
    }


def steps_of_passes(report: PipelineReport) -> dict[str, Traffic]:
    """Returns what a step sends as captured and after each pass of a pipeline that ran with ``graph_diff=True``."""
    recorded = [(each.name, each.traffic) for each in report if each.traffic is not None]
    if not recorded:
        return {}
    return {"captured": recorded[0][1][0], **{f"after {name}": after for name, (_, after) in recorded}}


def scale_rows(steps: Mapping[str, Traffic], speeds: Speeds) -> tuple[ScaleRow, ...]:
    """Returns the times of steps, given what they send, on all numbers of ranks of ``speeds``, in order.

    Raises:
        UnsupportedError: a step has a collective that is not modelled.

    Example:
        >>> from graphpasses.scale import Event, Transfer
        >>> step = Traffic(2, (Transfer("all_reduce", 10**6, 2, 1),), (Event("launch", 0), Event("wait", 0)))
        >>> [row] = scale_rows({"mine": step}, Speeds(ranks=(8,), algorithms=("ring",)))
        >>> row.cell("ring")
        '0.06 + 0.00'
    """
    return tuple(_row(name, steps[name], speeds, num_ranks) for num_ranks in speeds.ranks for name in steps)


def _row(name: str, traffic: Traffic, speeds: Speeds, num_ranks: int) -> ScaleRow:
    try:
        there = traffic.at(num_ranks)
    except TopologyError as error:
        return ScaleRow(num_ranks, name, trouble=str(error))
    num_bytes = sum(transfer.num_bytes for transfer in there.transfers)
    times: dict[str, StepTime] = {each: step_time(there, speeds, each) for each in speeds.algorithms}
    return ScaleRow(num_ranks, name, len(there.transfers), num_bytes, times)

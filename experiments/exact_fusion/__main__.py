"""Command line: ``python -m experiments.exact_fusion --help``."""

from __future__ import annotations

import torch
import torch.distributed as dist
import tyro
from rich.table import Table

from experiments.exact_fusion.steps import CONTROLS, FSDP2, GRADIENTS, WITHOUT_FSDP, Result, measure
from experiments.harness.bench import Timing
from graphpasses.terminal import make_console


def main(
    layers: int = 4,
    dim: int = 512,
    length: int = 512,
    batch: int = 1,
    steps: int = 25,
    rounds: int = 20,
    compiled: bool = False,
) -> None:
    """Compares the bits of eager, captured, fused and compiled training of a decoder, and times it on one thread.

    Args:
        compiled: compare graphs of torch.compile, of a bf16 decoder without FSDP, and not captured steps.
        layers: layers of the decoder.
        dim: its width.
        length: tokens of a sequence.
        batch: sequences of a batch.
        steps: steps whose losses, gradients and weights are compared.
        rounds: timed rounds, each of one step of every variant.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    console = make_console()
    console.print(f"{layers} layers, width {dim}, {batch} x {length} tokens, bf16 …")
    names = WITHOUT_FSDP if compiled else FSDP2
    found = measure(names, layers, dim, length, batch, steps, rounds)
    console.print(_table(found, *names[:2]))
    console.print(found.report)
    share = found.share_of_products
    console.print(
        f"{share:.0%} of the step that is not fused is spent in products of matrices and attention, whose kernels "
        f"stay: without anything else it would be {1 / share:.2f} times as fast"
    )
    console.print(f"the first step with kernels took {found.seconds_to_compile:.1f} s")
    dist.destroy_process_group()
    wrong = [name for name, what in found.first_difference.items() if bool(what) != (name in CONTROLS)]
    if wrong:
        raise SystemExit(f"WRONG: {', '.join(wrong)}")


def _table(found: Result, eager: str, plain: str) -> Table:
    table = Table("variant", "bits", title="Training steps, one thread; times as fast: the median of paired rounds")
    for column in ("CPU, ms", "of eager", "unfused", "wall, ms", "of eager", "unfused"):
        table.add_column(column, justify="right")
    for name, what in found.first_difference.items():
        bits = f"differ: {what}" if what else "eager's"
        timings = () if name == GRADIENTS else (found.cpu, found.wall)
        table.add_row(name, bits, *(cell for each in timings for cell in _cells(each, name, eager, plain)))
    return table


def _cells(timings: dict[str, Timing], name: str, *others: str) -> tuple[str, ...]:
    own = timings[name]
    ratios = (f"{own.times_as_fast_as(timings[other]):.2f}" for other in others)
    return f"{1e3 * own.median:,.0f}", *ratios


if __name__ == "__main__":
    tyro.cli(main)

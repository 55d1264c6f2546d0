"""Command line: ``python -m experiments.emulated_cluster --help``."""

from __future__ import annotations

import torch
import tyro
from rich.table import Table

from experiments.emulated_cluster.models import MODELS
from experiments.emulated_cluster.run import ALONE, EAGER, ORDER, Found, compare
from graphpasses.terminal import make_console


def main(
    models: tuple[str, ...] = tuple(MODELS),
    ranks: tuple[int, ...] = (8, 64, 512),
    rounds: int = 5,
    wall: bool = False,
    tokens: int = 129,
) -> int:
    """Runs steps on emulated clusters, and says what their wires cost.

    Args:
        models: what is trained.
        ranks: of the clusters, 8 of each node.
        rounds: counted rounds; each runs one step of every variant.
        wall: count seconds of the wall clock, in which waiting sleeps, and not those of this process.
        tokens: of each of a rank's two sequences.

    Returns:
        1 if bits, memory, the bound or the predicted gain are missed, else 0.
    """
    torch.set_num_threads(1)  # the clock counts the seconds of all threads
    console = make_console()
    missed: list[str] = []
    for name in models:
        for num_ranks in ranks:
            found = compare(name, num_ranks, rounds, is_wall=wall, tokens=tokens)
            case = f"{name}, {num_ranks} ranks"
            console.print(_table(case, found))
            console.print(_gain_text(found))
            for variant, error in found.failed.items():
                console.print(f"{variant}: {error}")
            missed += [f"{case}: {each}" for each in _missed(found)]
    console.print("\n".join(missed) or "nothing is missed")
    return int(bool(missed))


def _table(title: str, found: Found) -> Table:
    table = Table("variant", title=title)
    for column in ("step, ms", "exposed", "predicted", "wire", "held, MB", "predicted", "eager's bits"):
        table.add_column(column, justify="right")
    for name, each in found.variants.items():
        planned = each.planned
        table.add_row(
            name,
            *(f"{1e3 * seconds:.0f}" for seconds in (each.seconds, each.exposed)),
            f"{1e3 * planned.exposed:.0f}" if planned else "",
            f"{1e3 * planned.wire:.0f}" if planned else "",
            f"{each.held / 1e6:.1f}" if each.held else "",
            f"{planned.peak / 1e6:.1f}" if planned else "",
            "yes" if each.has_eager_bits else "NO",
        )
    table.add_row("no order of FSDP2's collectives waits less", "", f"{1e3 * found.critical:.0f}")
    table.add_row("max(compute, wire), first gather, last reduction", "", f"{1e3 * found.bound:.0f}")
    return table


def _gain(found: Found) -> float:
    """Returns what eager gains by gathering ahead."""
    return found.variants[ALONE].exposed - found.variants[EAGER].exposed


def _gain_text(found: Found) -> str:
    gain, predicted = _gain(found), found.predicted_gain
    return (
        f"eager gains {1e3 * gain:.0f} ms by gathering ahead, predicted {1e3 * predicted:.0f} "
        f"({gain / predicted - 1:+.1%})"
    )


def _missed(found: Found) -> list[str]:
    missed = [] if abs(_gain(found) / found.predicted_gain - 1) <= 0.1 else ["eager's gain is not the predicted one"]
    for name, each in found.variants.items():
        if not each.has_eager_bits:
            missed.append(f"{name} has other bits than eager")
        if name.startswith("schedule"):
            assert each.planned is not None
            assert each.held is not None
            missed += [f"{name} holds more than planned"] * (each.held > each.planned.peak)
            missed += [f"{name} is beyond the bound"] * (each.exposed > 1.1 * max(found.bound, found.critical))
            missed += [f"{name} is slower than FSDP2's order"] * (each.seconds > 1.01 * found.variants[ORDER].seconds)
    return missed


if __name__ == "__main__":
    raise SystemExit(tyro.cli(main))

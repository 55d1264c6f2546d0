"""``graphpasses layout``: the buckets of recorded runs, and which gradients two layouts add in another order."""

from __future__ import annotations

import dataclasses
import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, UseAppendAction, arg

from graphpasses.commands.cluster_options import DEFAULT_CLUSTER, ClusterOptions, describe, named_values
from graphpasses.commands.exit_codes import EXIT_DIFFERENT, EXIT_EQUAL, EXIT_OF, EXIT_OK
from graphpasses.errors import RunFileError, TopologyError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from graphpasses.fsdp.layout import Layout
    from graphpasses.html_report.scale import ScaleTable
    from graphpasses.parity.run_file import Run
    from graphpasses.scale import Speeds
    from graphpasses.simulate import Drift, TopologyDiff

_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)


def show(
    run: Annotated[Path, Positional, arg(metavar="RUN")],
    /,
    *,
    scale: bool = False,
    speeds: Path | None = None,
    json: bool = False,
) -> int:
    """Show every bucket of a recorded run: its reduction, and its parameters in byte order.

    With --scale, show how long the collectives of a step would take on 8 to 100,000 ranks, with these buckets, with
    those of torchtitan, and without any; and, if the run recorded it (graph_diff=True), before and after each pass.

    Exit codes: 0, or 2 if the run has no layout or the file of speeds is wrong (the reason is on stderr).

    Example: graphpasses layout show eager.jsonl --scale

    Args:
        run: A run that was recorded with layouts=.
        scale: Show times on paper instead of buckets: latencies and bandwidths of links, not a measurement.
        speeds: File of TOML with the latencies, bandwidths and numbers of ranks; what it leaves out is assumed.
        json: Print one JSON object instead of a table.
    """
    from graphpasses.terminal import make_console, plain_table

    if scale:
        return _show_scale(run, speeds, json)
    if speeds is not None:
        raise TopologyError("--speeds is for --scale; give both")
    _, layout = _read(run)
    if json:
        print(jsonlib.dumps(layout.to_json()))
        return EXIT_OK
    rows = []
    for index, bucket in enumerate(layout.buckets):
        kind = f"{bucket.collective} {bucket.op} {bucket.dtype}, {len(bucket.ranks)} ranks"
        cells = [str(index), f"{kind}, {bucket.num_bytes} bytes each"]
        for entry in bucket.entries:
            rows.append([*cells, entry.fqn, *map(str, (entry.offset, entry.numel, entry.padded_numel))])
            cells = ["", ""]
    make_console().print(plain_table(("bucket", "reduction", "parameter", "byte", "elements", "padded"), rows))
    return EXIT_OK


def diff(
    run_a: Annotated[Path, Positional, arg(metavar="RUN_A")],
    run_b: Annotated[Path | None, Positional, arg(metavar="RUN_B")] = None,
    /,
    *,
    log: Annotated[tuple[Path, ...], UseAppendAction] = (),
    cluster: Annotated[ClusterOptions, arg(name="")] = DEFAULT_CLUSTER,
    sweep: bool = False,
    json: bool = False,
) -> int:
    """Show which gradients two layouts, or one on two clusters, would add in another order, without running anything.

    Lists the parameters whose elements change rings, how many elements do, and their places. With --sweep, also the
    numbers of ranks and channels at which the two layouts could differ at all. Where nothing is found, both layouts
    reduce to the same bits. Where something is found, the bits may differ. With --algorithm auto it also tells in
    which buckets a PREMUL_SUM of eager's would take another algorithm than the second run's SUM.

    With --log A --log B and one run it says instead which gradients keep their bits from one allocation or NCCL to
    another, and which order of ranks restores the others. Both logs must be of the run's number of ranks.

    Exit codes: 0 no element would be added in another order, 1 some would, 2 the layouts cannot be compared or, with
    logs, the order of some is unknown.

    Example: graphpasses layout diff eager.jsonl compiled.jsonl --ranks 4 --gpus-per-node 2

    Args:
        run_a: A run that was recorded with layouts=, e.g. eager's.
        run_b: Another one; none with --log.
        log: Output of a run with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV,TUNING; give two.
        cluster: The cluster.
        sweep: Look at 8 to 1024 ranks and 1 to 32 channels.
        json: Print one JSON object instead of text.
    """
    from graphpasses.fsdp.layout import at_world_size
    from graphpasses.simulate import other_algorithms, predict
    from graphpasses.simulate import sweep as sweep_settings
    from graphpasses.terminal import make_console, plain_table

    if log:
        if run_b is not None or len(log) != 2 or sweep or cluster.nccl_log is not None:
            raise TopologyError("two logs compare one run on two clusters: layout diff --log A --log B RUN")
        return _diff_logs(run_a, log, cluster, json)
    if run_b is None:
        raise TopologyError("give two runs, or two logs: layout diff --log A --log B RUN")
    (first, a), (_, b) = _read(run_a), _read(run_b)
    header = first.header
    topology = cluster.topology(header.topology, header.world_size)
    if topology.num_ranks != header.world_size:
        a, b = (at_world_size(layout, topology.num_ranks) for layout in (a, b))
    prediction = predict(a, b, topology)
    others = other_algorithms(b, topology)
    sizes = [num for num in _SIZES if num % topology.gpus_per_node == 0] if sweep else []
    settings = list(sweep_settings(a, b, topology, sizes)) if sweep else []
    if json:
        data = {
            "topology": dataclasses.asdict(topology),
            "num_elements": prediction.num_elements,
            "reordered": [
                {**dataclasses.asdict(each), "num_elements": each.num_elements, "num_bytes": each.num_bytes}
                for each in prediction.reordered
            ],
            "other_algorithms": [dataclasses.asdict(each) for each in others],
            "sweep": [dataclasses.asdict(setting) for setting in settings],
        }
        print(jsonlib.dumps(data))
    else:
        console = make_console()
        console.print(f"on {describe(topology)}:", markup=False)
        console.print(str(prediction), markup=False)
        if others:
            console.print("if eager has a gradient divide factor of 1 (torchtitan), and so PREMUL_SUM:")
        for each in others:
            console.print(str(each), markup=False)
        if settings:
            channels = sorted({setting.num_channels for setting in settings})
            found = {(each.num_ranks, each.num_channels): each.num_bytes for each in settings}
            rows = (
                [str(num), *(f"{found[num, c]:,} bytes" if found[num, c] else "–" for c in channels)] for num in sizes
            )
            head = ["ranks", *(f"{num} channels" for num in channels)]
            console.print("added in another order:", plain_table(head, rows))
    return EXIT_DIFFERENT if prediction or any(each.num_bytes for each in settings) else EXIT_EQUAL


def _diff_logs(path: Path, logs: tuple[Path, ...], cluster: ClusterOptions, json: bool) -> int:
    from graphpasses.simulate import diff_topologies

    run, layout = _read(path)
    num_ranks, topologies = run.header.world_size, []
    for log in logs:
        algorithm, protocol = cluster.algorithm or "auto", cluster.protocol or "auto"
        of_log = dataclasses.replace(cluster, nccl_log=log, algorithm=algorithm, protocol=protocol)
        topology = of_log.topology()
        if topology.hardware.nccl_version is None:
            raise TopologyError(
                f"'{log}' has no line \"NCCL version 2…\", which decides how buckets are split; give --nccl-version"
            )
        topologies.append(topology)
    sizes = [topology.num_ranks for topology in topologies]
    if sizes != [num_ranks] * 2:
        raise TopologyError(
            f"'{path}' has {num_ranks} ranks, '{logs[0]}' {sizes[0]} and '{logs[1]}' {sizes[1]}; logs of its size "
            "are needed"
        )
    found = diff_topologies(layout, *topologies)
    heads = (
        f"{name}: {log}, NCCL {topology.hardware.nccl_version}, {topology.num_channels} channels"
        for name, log, topology in zip("AB", logs, topologies, strict=True)
    )
    return _print_bits(heads, found, json)


def drift(
    run: Annotated[Path, Positional, arg(metavar="RUN")],
    /,
    *,
    mesh: tuple[str, ...],
    cluster: Annotated[ClusterOptions, arg(name="")] = DEFAULT_CLUSTER,
    json: bool = False,
) -> int:
    """Show which replicated gradients may get other bits on some of their holders than on others, without running.

    Where several groups reduce one gradient side by side, each for its own holders, replicas drift apart if the
    groups' rings differ: FSDP of each tensor-parallel rank, or two all-reduces, one along each axis of the mesh.
    Along an axis over which no bucket reduces all parameters count as replicated; what tensor parallelism shards has
    one holder there, whatever is shown of it (in Python, find_drift(…, model=model) knows).

    Exit codes: 0 all holders get the same bits, 1 some may differ, 2 some are unknown, or the mesh is not the run's.

    Example: graphpasses layout drift eager.jsonl --mesh dp=2 tp=2 --gpus-per-node 2

    Args:
        run: A run that was recorded with layouts=.
        mesh: Names and sizes of the mesh's dims; ranks are numbered row by row, as by init_device_mesh.
        cluster: The cluster.
        json: Print one JSON object instead of a table.
    """
    from graphpasses.simulate import find_drift

    recorded, layout = _read(run)
    axes = named_values("--mesh", mesh, "dp=8 tp=5")
    if wrong := [name for name, size in axes.items() if not size.isdecimal() or int(size) < 1]:
        raise TopologyError(f"--mesh has {wrong[0]!r} without a size; write it as in --mesh dp=8 tp=5")
    topology = cluster.topology(recorded.header.topology, recorded.header.world_size)
    found = find_drift(layout, topology, {name: int(size) for name, size in axes.items()})
    if not found.replicas and not json:
        print(f"no gradient has several holders along an axis of the mesh {' '.join(mesh)}: each is sharded over all")
    return _print_bits([f"on {describe(topology)}:"], found, json)


def _print_bits(heads: Iterable[str], found: TopologyDiff | Drift, json: bool) -> int:
    """Prints what was found of gradients' bits; returns the exit code."""
    from graphpasses.terminal import make_console, plain_table

    if json:
        print(jsonlib.dumps({**dataclasses.asdict(found), "outcome": found.outcome}))
        return EXIT_OF[found.outcome]
    head, *rows = found.rows()
    console = make_console()
    if rows:
        console.print("\n".join(heads), markup=False)
        console.print(plain_table(head, rows))
    console.print("\n".join(filter(None, (found.verdict, found.remedy))), markup=False)
    return EXIT_OF[found.outcome]


def _show_scale(path: Path, speeds_file: Path | None, json: bool) -> int:
    from graphpasses.html_report.scale import scale_tables
    from graphpasses.scale import Speeds, read_speeds

    speeds = Speeds() if speeds_file is None else read_speeds(speeds_file)
    tables = scale_tables(_read(path)[0], speeds)
    if json:
        data = {
            table.title: {"notes": table.notes, "rows": [row.to_json() for row in table.rows]} for table in tables
        }
        print(jsonlib.dumps({"speeds": dataclasses.asdict(speeds), "tables": data}))
        return EXIT_OK
    print_scale(tables, speeds)
    return EXIT_OK


def print_scale(tables: Iterable[ScaleTable], speeds: Speeds) -> None:
    """Prints steps side by side at several numbers of ranks, and what is assumed."""
    from graphpasses.terminal import make_console, plain_table

    console = make_console()
    for table in tables:
        console.print(f"{table.title}; time on the wire per step, exposed + hidden, in ms:", markup=False)
        rows = []
        for row in table.rows:
            cells = [row.cell(name) for name in row.times] or [row.trouble]
            numbers = (f"{row.num_transfers:,}", f"{row.num_bytes / 1e6:,.1f}") if row.times else ("", "")
            rows.append([f"{row.num_ranks:,}", row.step, *numbers, *cells])
        console.print(plain_table(["ranks", "step", "collectives", "MB", *speeds.algorithms], rows))
        for note in table.notes:
            console.print(note, markup=False)
    console.print(f"assumed: {', '.join(speeds.assumed)}", markup=False)


def _read(path: Path) -> tuple[Run, Layout]:
    from graphpasses.parity.run_file import read_run

    run = read_run(path)
    if run.header.layouts is None:
        raise RunFileError(
            f"'{path}' has no bucket layouts; record it with ParityRecorder(…, layouts=eager_layout(model)), or with "
            "layouts=graph_layout(step)"
        )
    return run, run.header.layouts

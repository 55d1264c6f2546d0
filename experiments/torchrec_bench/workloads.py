"""What is measured: which recommenders, which ways to train them, and how fast each must be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Ids = Literal["one-hot, uniform", "one-hot, Zipf", "multi-hot, uniform", "multi-hot, Zipf"]
Optimizer = Literal["sgd", "row-wise adagrad"]
Layout = Literal["26 EBCs", "one EBC", "one EBC, mixed", "plain EBC", "fused EBC"]
How = Literal["eager", "torch.compile", "aot_eager", "inductor", "floor"]

# The 26 tables of MLPerf's DLRM-DCNv2, whose samples look up 214 rows.
NUM_ROWS = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10),
    *(2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
)
MULTI_HOT_SIZES = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)


@dataclass(frozen=True)
class Variant:
    """One way to train a recommender.

    Args:
        layout: how the tables are spread over modules and ranks.
        how: what runs it: eager, ``torch.compile`` as shipped, or graphpasses with one of its inner compilers; or
            "floor", what a step must do in any case, part by part.
    """

    layout: Layout
    how: How = "eager"

    @property
    def is_ours(self) -> bool:
        """Whether graphpasses compiles it."""
        return self.how in ("aot_eager", "inductor")

    def __str__(self) -> str:
        return f"{self.layout}, {'graphpasses ' * self.is_ours}{self.how}"


@dataclass(frozen=True)
class Workload:
    """Something to train, all its variants and their goals.

    Args:
        kind: of the model and its sharding.
        num_rows: rows of each table.
        dim: embedding dimension.
        batch_size: samples of a rank.
        ids: how many rows a sample looks up in a table, and how popular they are.
        optimizer: of the tables, run in backward.
        variants: what is compared; the first is eager of what graphpasses compiles.
        collectives_goal: how many a step may issue, forward and backward; None if there is no goal.
        num_ranks: processes, which share the machine's cores.
    """

    kind: str
    num_rows: tuple[int, ...]
    dim: int
    batch_size: int
    ids: Ids
    optimizer: Optimizer
    variants: tuple[Variant, ...]
    collectives_goal: tuple[int, int] | None = None
    num_ranks: int = 2

    @property
    def hot_sizes(self) -> tuple[int, ...]:
        """How many rows of each table a sample looks up."""
        sizes = MULTI_HOT_SIZES if self.ids.startswith("multi-hot") else (1,) * len(MULTI_HOT_SIZES)
        return sizes[: len(self.num_rows)]

    @property
    def has_dense_layers(self) -> bool:
        """Whether it is TorchRec's DLRM; else the loss is the mean of all pooled rows."""
        return self.kind.startswith("DLRM")

    @property
    def name(self) -> str:
        """The kind, embedding dimension, ids and optimizer."""
        return f"{self.kind}, D {self.dim}, {self.ids}, {self.optimizer}"

    def __str__(self) -> str:
        return self.name


def workloads(table_mib: int) -> tuple[Workload, ...]:
    """Returns all that is measured.

    Args:
        table_mib: size that no table exceeds, so that all variants of a workload fit into memory side by side.
    """
    plain, fused = Variant("plain EBC"), Variant("fused EBC")
    shipped = Variant("plain EBC", "torch.compile")
    return (
        _separate(table_mib, 64, "one-hot, uniform", "sgd"),
        _separate(table_mib, 64, "multi-hot, Zipf", "row-wise adagrad"),
        _separate(table_mib, 128, "multi-hot, uniform", "sgd"),
        _mixed(table_mib, "one-hot, uniform", "sgd"),
        _mixed(table_mib, "multi-hot, Zipf", "row-wise adagrad"),
        Workload(
            "one process, plain EBC",
            _capped((100_000,) * len(NUM_ROWS), 64, table_mib),
            64,
            2048,
            "one-hot, uniform",
            "sgd",
            (plain, shipped, fused, *_ours("plain EBC"), Variant("one EBC", "floor")),
            num_ranks=1,
        ),
    )


def _capped(num_rows: tuple[int, ...], dim: int, table_mib: int) -> tuple[int, ...]:
    max_rows = table_mib * 2**20 // (4 * dim)
    return tuple(min(rows, max_rows) for rows in num_rows)


def _separate(table_mib: int, dim: int, ids: Ids, optimizer: Optimizer) -> Workload:
    eager, shipped = Variant("26 EBCs"), Variant("26 EBCs", "torch.compile")
    ceiling = Variant("one EBC")
    variants = (eager, shipped, ceiling, *_ours("26 EBCs"), Variant("one EBC", "floor"))
    num_rows = _capped(NUM_ROWS, dim, table_mib)
    return Workload("26 EBCs, table-wise", num_rows, dim, 512, ids, optimizer, variants)


def _mixed(table_mib: int, ids: Ids, optimizer: Optimizer) -> Workload:
    eager, shipped = Variant("one EBC, mixed"), Variant("one EBC, mixed", "torch.compile")
    variants = (eager, shipped, *_ours("one EBC, mixed"), Variant("one EBC, mixed", "floor"))
    num_rows = _capped(NUM_ROWS, 64, table_mib)
    return Workload("DLRM, mixed plan", num_rows, 64, 512, ids, optimizer, variants, (4, 1))


def _ours(layout: Layout) -> tuple[Variant, ...]:
    return Variant(layout, "aot_eager"), Variant(layout, "inductor")

"""What is trained, and which comparisons must or must not be equal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from experiments.harness.verdict import Comparison

LOCAL_SIZE = 2  # ranks of one node


@dataclass(frozen=True)
class Case:
    """One recommender, sharded and trained one way.

    Args:
        name: what the table calls it.
        shardings: how the tables are sharded, cycled over them; one of the keys of ``models.SHARDINGS``.
        optimizer: of the tables, one of the keys of ``models.OPTIMIZERS``.
        kind: ``EmbeddingBagCollection`` or ``EmbeddingCollection``.
        use: one module; three, each with tables of its own; or one that two parents share and that is called with
            one batch of ids, or with one for each parent.
        pooling: of a bag's rows.
        weighted: whether every id has a weight.
        vbe: whether each feature has a batch size of its own (variable batch embeddings).
        dense: how the dense part of a tower is trained: replicated by DistributedDataParallel; or in bf16 by FSDP2,
            over all ranks, or on a mesh of 2 replicas of 2 shards (HSDP).
        num_ranks: 2, or 4 on two nodes of 2.
        inductor: whether it is also compiled with Inductor, which takes long.
        controls: variants that must differ from eager.
    """

    name: str
    shardings: tuple[str, ...]
    optimizer: str
    kind: Literal["ebc", "ec"] = "ebc"
    use: Literal["one", "several", "shared", "shared, two batches"] = "one"
    pooling: Literal["sum", "mean"] = "sum"
    weighted: bool = False
    vbe: bool = False
    dense: Literal["ddp", "fsdp", "hsdp"] = "ddp"
    num_ranks: Literal[2, 4] = 2
    inductor: bool = False
    controls: tuple[str, ...] = ()

    @property
    def variants(self) -> tuple[str, ...]:
        """How it is trained, eager first."""
        return (EAGER, COMPILED, *((INDUCTOR, INDUCTOR_ALONE) if self.inductor else ()), *self.controls)

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """What is compared; only tables can have eager's bits where Inductor compiles the dense part."""
        inductor = (
            Comparison(INDUCTOR, EAGER, "equal", only=is_table, label=f"{INDUCTOR}, tables against {EAGER}"),
            Comparison(INDUCTOR, INDUCTOR_ALONE, "equal", label=f"{INDUCTOR}, against {INDUCTOR_ALONE}"),
        )
        return (
            Comparison(COMPILED, EAGER, "equal", label=f"{COMPILED}, against {EAGER}"),
            *(inductor if self.inductor else ()),
            *(Comparison(control, EAGER, "differ", label=f"{control}, against {EAGER}") for control in self.controls),
        )


def is_table(name: str) -> bool:
    """Whether a recorded tensor is a table, or its optimizer's state."""
    return ".embeddings." in name


EAGER, COMPILED, INDUCTOR, INDUCTOR_ALONE = "eager", "aot_eager", "inductor", "inductor alone"
OTHER_LR, SWAPPED, MERGED = "another learning rate", "two outputs swapped", "calls of a table merged"
BY_NAME, ALL_REDUCE_FIRST = "parameters packed by name", "all-reduce first"
UNCOMPILED = (EAGER, OTHER_LR)

_MIXED = ("table-wise", "row-wise", "column-wise")

CASES = (
    Case("EBC table-wise", ("table-wise",), "sgd"),
    Case("EBC row-wise", ("row-wise",), "adagrad", inductor=True, controls=(OTHER_LR,)),
    Case("EBC column-wise", ("column-wise",), "row-wise adagrad", inductor=True),
    Case("EBC table-column-wise", ("table-column-wise",), "sgd"),
    Case("EBC table-row-wise", ("table-row-wise",), "row-wise adagrad", num_ranks=4),
    Case("EBC grid", ("grid",), "adagrad", num_ranks=4),
    Case("EBC data-parallel", ("data-parallel",), "adagrad"),
    Case("EBC mixed, SGD", _MIXED, "sgd"),
    Case("EBC mixed, Adagrad", _MIXED, "adagrad", inductor=True),
    Case("EBC mixed, row-wise Adagrad", _MIXED, "row-wise adagrad"),
    Case("EC table-wise", ("table-wise",), "adagrad", kind="ec", inductor=True),
    Case("EC row-wise", ("row-wise",), "row-wise adagrad", kind="ec"),
    Case("EC column-wise", ("column-wise",), "sgd", kind="ec"),
    Case("EBC mixed, weighted", _MIXED, "adagrad", weighted=True),
    Case("EBC mixed, mean pooling", _MIXED, "row-wise adagrad", pooling="mean"),
    Case("EBC table-wise, VBE", ("table-wise",), "row-wise adagrad", vbe=True),
    Case("several EBCs, table-wise", ("table-wise",), "sgd", use="several", inductor=True, controls=(SWAPPED,)),
    Case("several EBCs, mixed", _MIXED, "adagrad", use="several"),
    Case("shared EBC, one batch", ("table-wise",), "adagrad", use="shared", inductor=True, controls=(MERGED,)),
    Case("shared EBC, two batches", ("table-wise",), "adagrad", use="shared, two batches"),
    Case("beside FSDP, table-wise", ("table-wise",), "adagrad", dense="fsdp", num_ranks=4, controls=(BY_NAME,)),
    # Two ranks, as in the groups of a 2×2 mesh, add in one order only: how buckets are packed cannot matter.
    Case(
        "beside HSDP, mixed",
        (*_MIXED, "table-row-wise"),
        "row-wise adagrad",
        dense="hsdp",
        num_ranks=4,
        controls=(ALL_REDUCE_FIRST,),
    ),
)

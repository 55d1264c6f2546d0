"""Which cases of which experiment are shown, and what a newcomer is told of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from experiments.any_cluster import cases as any_cluster
from experiments.any_cluster import run as any_cluster_run
from experiments.architectures import cases as architectures
from experiments.architectures import run as architectures_run
from experiments.fsdp_parity import cases as fsdp
from experiments.fsdp_parity import run as fsdp_run
from experiments.graph_trainer_parity import cases as torchtitan
from experiments.graph_trainer_parity import run as torchtitan_run
from experiments.harness.parity import Case, ParityExperiment
from experiments.harness.verdict import Verdict
from experiments.torchrec_parity import cases as torchrec
from experiments.torchrec_parity import run as torchrec_run

__all__ = ["PARTS", "Part", "Shown"]


@dataclass(frozen=True)
class Shown:
    """One case, and what the table says of it.

    Args:
        case: of an experiment.
        model: what is trained.
        sharding: how.
        num_ranks: processes, or simulated ranks.
    """

    case: Case
    model: str
    sharding: str
    num_ranks: int = 4

    @property
    def name(self) -> str:
        """By which ``--only`` selects it."""
        return f"{self.model}, {self.sharding}"


@dataclass(frozen=True)
class Part:
    """The cases of one experiment.

    Args:
        folder: for its run files.
        num_steps: optimizer steps of each run.
        train_and_judge: the experiment's; called with what launches the cases, and with the cases.
        shown: the cases.
        needs: a package that need not be installed; without it the part is left out.
    """

    folder: str
    num_steps: int
    train_and_judge: Callable[[ParityExperiment, Sequence[Any]], list[Verdict]]
    shown: tuple[Shown, ...]
    needs: str = "torch"

    @property
    def is_possible(self) -> bool:
        """Whether what it needs is installed."""
        return find_spec(self.needs) is not None

    @property
    def cases(self) -> tuple[Case, ...]:
        """What is trained."""
        return tuple(each.case for each in self.shown)


def _show(cases: Sequence[Case], name: str, model: str, sharding: str, num_ranks: int = 4) -> Shown:
    (case,) = (case for case in cases if case.name == name)
    return Shown(case, model, sharding, num_ranks)


PARTS = (
    Part(
        "fsdp",
        5,
        fsdp_run.train_and_judge,
        (
            _show(fsdp.CASES, "gpt-fsdp-bf16", "GPT, head and embedding tied", "FSDP2"),
            _show(fsdp.CASES, "reused-fsdp-bf16", "a layer that is called three times", "FSDP2"),
            _show(fsdp.CASES, "uneven-fsdp-bf16", "sizes that 4 does not divide", "FSDP2"),
            _show(fsdp.CASES, "llama-hsdp-bf16", "Llama", "HSDP, 2 replicas"),
        ),
    ),
    Part(
        "any_cluster",
        3,
        any_cluster_run.train_and_judge,
        (
            _show(any_cluster.PARITY, "GPT on 2 and 4 ranks", "GPT, added in a tree", "FSDP2, HSDP; 2, 4 ranks"),
            _show(any_cluster.PARITY, "Llama, added in fp32", "Llama, added in a tree", "FSDP2; 1, 2 ranks", 2),
            _show(
                any_cluster.PARITY,
                "torchtitan's llama3, added in bf16",
                "torchtitan's llama3, added in a tree",
                "FSDP2; 1, 2 ranks",
                2,
            ),
        ),
    ),
    Part(
        "architectures",
        5,
        architectures_run.train_and_judge,
        (
            _show(architectures.CASES, "llama, bf16", "Hugging Face's Llama", "FSDP2, simulated"),
            _show(
                architectures.CASES,
                "granitemoe, bf16",
                "Hugging Face's GraniteMoe, experts",
                "FSDP2, simulated",
            ),
        ),
    ),
    Part(
        "torchtitan",
        5,
        torchtitan_run.train_and_judge,
        (
            _show(torchtitan.CASES, "llama3 biased, bf16 reduction", "torchtitan's Llama 3 with biases", "FSDP2"),
            _show(torchtitan.CASES, "llama3 tied, 2 replicas", "torchtitan's Llama 3, tied", "HSDP, 2 replicas"),
        ),
    ),
    Part(
        "torchrec",
        6,  # in the fourth one rank has no ids, in the sixth none has
        torchrec_run.train_and_judge,
        (
            _show(torchrec.CASES, "EBC row-wise", "embedding bags, Adagrad", "TorchRec, row-wise", 2),
            _show(
                torchrec.CASES,
                "several EBCs, table-wise",
                "several towers of embedding bags",
                "TorchRec, table-wise",
                2,
            ),
            _show(
                torchrec.CASES,
                "beside HSDP, mixed",
                "embedding bags beside FSDP layers",
                "TorchRec, mixed; HSDP",
            ),
        ),
        needs="torchrec",
    ),
)

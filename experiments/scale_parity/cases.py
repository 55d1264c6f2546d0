"""What is trained at scale, in which orders gradients are packed, and on which clusters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from experiments.fsdp_parity.models import Decoder, gpt_block, llama_block
from experiments.fsdp_parity.orders import EXECUTION, PER_MODULE
from experiments.harness.verdict import Comparison

__all__ = ["EAGER", "GRAPH", "MODELS", "Case", "cases"]

EAGER, GRAPH = "eager FSDP2", "graph, eager's order"
# Every size is a multiple of 256, so that up to 256 ranks have shards of one shape and need one captured graph.
DIM, VOCAB, NUM_LAYERS = 256, 256, 2


def llama() -> nn.Module:
    """RMSNorm, SwiGLU, no biases, untied."""
    blocks = [llama_block(DIM) for _ in range(NUM_LAYERS)]
    return Decoder(blocks, nn.RMSNorm(DIM), VOCAB, dim=DIM)


def gpt() -> nn.Module:
    """LayerNorm, biases, embedding and head tied."""
    blocks = [gpt_block(2 * DIM, DIM) for _ in range(NUM_LAYERS)]
    return Decoder(blocks, nn.LayerNorm(DIM), VOCAB, tied=True, dim=DIM)


MODELS = {"llama": llama, "gpt": gpt}


@dataclass(frozen=True)
class Case:
    """One model on one cluster: eager, and its graph in several orders.

    Args:
        model: name in ``MODELS``.
        num_ranks: ranks of the cluster.
        mode: rings of the cluster.
        gpus_per_node: GPUs of each node.
        protocol: NCCL's protocol, or "auto": what it would choose for each reduction. The algorithm is the ring,
            which NCCL takes for every AVG reduce-scatter.
    """

    model: str
    num_ranks: int
    mode: Literal["rail", "cross_nic"]
    gpus_per_node: int = 8
    protocol: Literal["simple", "auto"] = "simple"

    @property
    def name(self) -> str:
        chosen = ", chosen protocols" if self.protocol == "auto" else ""
        return f"{self.model}, {self.num_ranks} ranks, {self.mode}{chosen}"

    @property
    def controls(self) -> tuple[str, ...]:
        """Orders other than eager's. Modules without biases have one gradient each, and no order inside."""
        return (EXECUTION,) if self.model == "llama" else (PER_MODULE, EXECUTION)

    @property
    def variants(self) -> tuple[str, ...]:
        return (EAGER, GRAPH, *self.controls)

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Every graph against eager."""
        controls = (Comparison(control, EAGER, "differ") for control in self.controls)
        return (Comparison(GRAPH, EAGER, "equal"), *controls)

    @property
    def topology(self) -> dict[str, Any]:
        return {
            "num_ranks": self.num_ranks,
            "gpus_per_node": self.gpus_per_node,
            "mode": self.mode,
            "protocol": self.protocol,
        }


def cases(num_ranks: int, gpus_per_node: int, protocol: Literal["simple", "auto"] = "simple") -> Iterator[Case]:
    """Yields every model on every kind of rings.

    Args:
        num_ranks: ranks of the cluster.
        gpus_per_node: GPUs of each node.
        protocol: see :class:`Case`.
    """
    for model in MODELS:
        for mode in ("rail", "cross_nic"):
            yield Case(model, num_ranks, mode, gpus_per_node, protocol)

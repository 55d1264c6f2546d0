"""Lookups in a graph: calls of FBGEMM's table-batched embeddings (TBE), whose backward updates the tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, fx

from graphpasses._torch.schemas import named_arguments
from graphpasses.fbgemm.names import FUSED_OPTIMIZERS, UPDATING_LOOKUP
from graphpasses.graph import DynamoGraph
from graphpasses.graph.nodes import reach

# FBGEMM's `EmbeddingLocation`, by the device of the tables, and `PoolingMode.NONE`.
LOCATIONS = {"cpu": 3, "cuda": 0}
_NO_POOLING = 2

# What FBGEMM 1.8.0's `lookup_sgd.py` and its siblings put where in the op's lists.
_CACHE_LOCATIONS = 3  # aux_tensor: without a cache, an empty tensor
INFO_B = slice(1, 3)  # aux_int
_GLOBAL_WEIGHT_DECAY, MIXED_D = 3, 6  # aux_bool
_SETTINGS = ("aux_float", "optim_int", "optim_float")


@dataclass(frozen=True)
class TableLayout:
    """Which table each feature of a lookup reads, and where the tables lie; all tables in one flat tensor."""

    dims: tuple[int, ...]  # embedding dimension of each feature
    # For each feature, number of rows of the tables before its own; equal for features of one table.
    first_rows: tuple[int, ...]
    num_rows: int  # number of rows of all tables
    # For each feature, where in the flat tensor its table begins, in elements.
    weights_offsets: tuple[int, ...]
    momentum1_offsets: tuple[int, ...] = ()  # likewise where its optimizer state begins; empty for SGD

    @classmethod
    def join(
        cls, layouts: Sequence[TableLayout], weights: Sequence[int], momentum1: Sequence[int] = ()
    ) -> TableLayout:
        """Returns the layout of the features of several lookups, one after the other.

        ``weights`` say where each begins in the common flat tensor, ``momentum1`` the same for optimizer states.
        """
        rows = [0, *accumulate(layout.num_rows for layout in layouts)]
        return cls(
            dims=tuple(dim for layout in layouts for dim in layout.dims),
            first_rows=_shifted([layout.first_rows for layout in layouts], rows),
            num_rows=rows[-1],
            weights_offsets=_shifted([layout.weights_offsets for layout in layouts], weights),
            momentum1_offsets=_shifted([layout.momentum1_offsets for layout in layouts], momentum1),
        )

    def d_offsets(self) -> Tensor:
        """Returns where in the output each feature begins, and the end; int32 [features + 1]."""
        return torch.tensor([0, *accumulate(self.dims)], dtype=torch.int32, device="cpu")

    def info_b(self) -> tuple[int, int]:
        """Returns FBGEMM's ``info_B_num_bits`` and ``info_B_mask``: how it packs feature and sample in a number."""
        num_bits, mask = torch.ops.fbgemm.get_infos_metadata(self.d_offsets(), 1, len(self.dims))
        return num_bits, mask


def _shifted(parts: Sequence[Sequence[int]], starts: Sequence[int]) -> tuple[int, ...]:
    return tuple(value + start for values, start in zip(parts, starts, strict=False) for value in values)


def placed(tables: Sequence[Any]) -> slice:
    """Returns where one of the op's lists has placements and offsets: of tables on a GPU, behind UVM's."""
    first = 1 if len(tables) == 3 else 2
    return slice(first, first + 2)


def find_triggers(graph: fx.Graph) -> set[fx.Node]:
    """Returns what a graph is given for autograd to reach its lookups, whose backward updates their tables."""
    calls = (node for node in graph.nodes if UPDATING_LOOKUP.fullmatch(str(node.target)))
    triggers = (named_arguments(node)["placeholder_autograd_tensor"] for node in calls)
    return {node for node in reach(triggers, lambda node: node.all_input_nodes) if node.op == "placeholder"}


@dataclass(frozen=True)
class LookupCall:
    """One call in a ``DYNAMO`` graph of ``split_embedding_codegen_lookup_<optimizer>_function_pt2``."""

    node: fx.Node
    module: str  # FQN of the module that looks up, e.g. ``ebc._lookups[0]._emb_modules.0._emb_module``
    optimizer: str  # ``"sgd"``, ``"adagrad"`` or ``"rowwise_adagrad"``
    arguments: Mapping[str, Any]  # by their names in the op's schema
    inputs: Mapping[fx.Node, Tensor]  # of those of the arguments that are inputs of the graph, the live tensors

    @classmethod
    def all(cls, graph: DynamoGraph) -> list[LookupCall]:
        """Returns the lookups of a ``DYNAMO`` graph, in order, except those by other optimizers."""
        placeholders = graph.placeholders
        fqns = {node: item.fqn for node, item in zip(placeholders, graph.inputs, strict=True)}
        live = {node: each for node, each in zip(placeholders, graph.live, strict=True) if isinstance(each, Tensor)}
        calls = []
        for node in graph.graph.nodes:
            if (optimizer := FUSED_OPTIMIZERS.get(str(node.target).removesuffix(".default"))) is not None:
                arguments = named_arguments(node)
                weights = arguments["weights"][0]
                module = re.sub(r"\.weights_(host|dev)$", "", fqns.get(weights, weights.name))
                own = {other: live[other] for other in node.all_input_nodes if other in live}
                calls.append(cls(node, module, optimizer, arguments, own))
        return calls

    @property
    def state_tensors(self) -> tuple[Tensor, ...]:
        """The live tensors of ``states``; of a call that :meth:`reject_reason` accepts."""
        return tuple(self.inputs[node] for node in self.states)

    @property
    def states(self) -> tuple[fx.Node, ...]:
        """What the backward writes: the tables' flat tensor, then that of the optimizer's states, if it has one."""
        return tuple(self.arguments[name][0] for name in ("weights", "momentum1") if name in self.arguments)

    @property
    def device(self) -> torch.device:
        """Where the tables lie."""
        return self.state_tensors[0].device

    @property
    def num_features(self) -> int:
        """Number of features."""
        return int(self.arguments["D_offsets"].meta["val"].numel()) - 1

    @property
    def is_pooled(self) -> bool:
        """Whether it returns a row per bag [B, total_D], not one per id [N, D]."""
        return bool(self.arguments["pooling_mode"] != _NO_POOLING)

    def reject_reason(self) -> str | None:
        """Returns why the call cannot be described by a :class:`TableLayout`; None if it can."""
        arguments = self.arguments
        constants = [*self.arguments["weights"], *arguments.get("momentum1", ()), arguments["D_offsets"]]
        constants += [arguments["hash_size_cumsum"], arguments["learning_rate_tensor"]]
        if any(node not in self.inputs for node in constants):
            return "its tables are not inputs of the graph"
        if self.device.type not in LOCATIONS:
            return f"its tables are on {self.device.type}"
        if arguments["max_B"] != -1 or arguments["vbe_output"] is not None:
            return "its features have batch sizes of their own"
        lists = [value for name in _SETTINGS for value in arguments.get(name, ())]
        if any(isinstance(value, fx.Node) for value in lists):
            return "its hyperparameters are inputs of the graph, as torch.compile(dynamic=True) makes them"
        others = [value for index, value in enumerate(arguments["aux_tensor"]) if index != _CACHE_LOCATIONS]
        if arguments["feature_requires_grad"] is not None or any(value is not None for value in others):
            return "it uses FBGEMM's feature_requires_grad, a cache, or statistics"
        if arguments["aux_bool"][_GLOBAL_WEIGHT_DECAY]:
            return "its optimizer decays all rows, looked up or not"
        placements, _ = arguments["weights"][placed(arguments["weights"])]
        if self.inputs[placements].ne(LOCATIONS[self.device.type]).any():
            return "its tables lie in several memories, or in a cache"
        if self.inputs[arguments["hash_size_cumsum"]].diff()[-1] == 0:
            return "its last table has no rows"
        return None

    def effect_without_gradient(self) -> str | None:
        """Returns what an update whose gradient is zero does to rows that were looked up; None if nothing."""
        options = self.arguments.get("optim_float", ())
        if any(isinstance(value, fx.Node) for value in options):
            return "may change rows, as its hyperparameters are inputs of the graph"
        effects = ("divides zero by eps=0", "decays rows", "limits the norm of rows")
        acts = (value == 0 if index == 0 else value != 0 for index, value in enumerate(options))
        return next((effect for effect, does in zip(effects, acts, strict=False) if does), None)

    def layout(self) -> TableLayout:
        """Returns where the tables lie; for a call that :meth:`reject_reason` accepts."""

        def numbers(node: fx.Node) -> tuple[int, ...]:
            return tuple(self.inputs[node].tolist())

        def offsets(key: str) -> tuple[int, ...]:
            tables = self.arguments.get(key, ())
            return numbers(tables[placed(tables)][1]) if tables else ()

        *first_rows, num_rows = numbers(self.arguments["hash_size_cumsum"])
        return TableLayout(
            dims=tuple(end - start for start, end in pairwise(numbers(self.arguments["D_offsets"]))),
            first_rows=tuple(first_rows),
            num_rows=num_rows,
            weights_offsets=offsets("weights"),
            momentum1_offsets=offsets("momentum1"),
        )

    def settings(self) -> tuple[object, ...]:
        """Returns what two calls must have in common to become one, apart from their tables, ids and batch size."""
        arguments = self.arguments
        aux_int, aux_bool = [list(arguments[name]) for name in ("aux_int", "aux_bool")]
        del aux_int[INFO_B], aux_bool[MIXED_D]
        lists = [aux_int, aux_bool, *(arguments.get(name, ()) for name in _SETTINGS)]
        return (
            self.optimizer,
            *(tensor.dtype for tensor in self.state_tensors),
            arguments["pooling_mode"],
            arguments["output_dtype"],
            arguments["indice_weights"] is not None,
            # CUDA's kernels are chosen by it, and how they add.
            None if self.is_pooled and self.device.type == "cpu" else arguments["max_D"],
            self.inputs[arguments["learning_rate_tensor"]].item(),
            *map(tuple, lists),
        )

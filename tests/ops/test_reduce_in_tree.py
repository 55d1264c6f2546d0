"""Reductions in a binary tree: what they compute, as operators and on ranks, and how exact they are."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.ops import reduce_in_tree
from graphpasses.ops.reduce_in_tree import (
    ALL_REDUCE_IN_TREE,
    REDUCE_SCATTER_IN_TREE,
    accumulate_dtype,
    add_in_tree,
    is_tree_op,
    tree_op,
)
from graphpasses.simulate import Topology, run_cluster

wait = torch.ops._c10d_functional.wait_tensor.default


def contribution(rank: int, numel: int = 24) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).bfloat16()


def in_tree(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The definition."""
    if len(parts) == 1:
        return parts[0].to(dtype)
    half = len(parts) // 2
    return in_tree(parts[:half], dtype) + in_tree(parts[half:], dtype)


def group_name() -> str:
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("accumulate", [None, torch.float32])
def test_ranks_get_the_tree_s_sum(num_ranks: int, accumulate: torch.dtype | None) -> None:
    def reduce() -> tuple[Tensor, Tensor]:
        mine = contribution(dist.get_rank())
        part = REDUCE_SCATTER_IN_TREE(mine, tree_op(accumulate), num_ranks, group_name())
        # Of a size that the ranks do not divide.
        whole = ALL_REDUCE_IN_TREE(mine[:23], tree_op(accumulate), group_name())
        return wait(part), wait(whole)

    parts, sums = zip(*run_cluster(reduce, Topology(num_ranks, gpus_per_node=num_ranks)), strict=True)
    expected = in_tree([contribution(rank) for rank in range(num_ranks)], accumulate or torch.bfloat16)
    assert torch.equal(torch.cat(parts), expected)
    assert all(torch.equal(each, expected[:23]) for each in sums)


@pytest.mark.parametrize("num_elements", [1, 4, 5])
def test_large_buckets_travel_in_pieces(monkeypatch: pytest.MonkeyPatch, num_elements: int) -> None:
    sizes: list[int] = []

    def reduce() -> Tensor:
        return wait(REDUCE_SCATTER_IN_TREE(contribution(dist.get_rank()), tree_op(), 2, group_name()))

    def sent(output: Tensor, *args: object, **options: Any) -> Any:
        sizes.append(output.numel())
        return send(output, *args, **options)

    send = dist.all_to_all_single
    monkeypatch.setattr(dist, "all_to_all_single", sent)
    monkeypatch.setattr(reduce_in_tree, "PIECE_BYTES", num_elements * 2 * 2)
    parts = run_cluster(reduce, Topology(2, gpus_per_node=2))
    assert torch.equal(torch.cat(parts), in_tree([contribution(0), contribution(1)], torch.bfloat16))
    assert max(sizes) == 2 * num_elements
    assert sum(sizes) == 2 * 24


@pytest.mark.parametrize("op", ["tree", "tree:float32"])
def test_operators_are_registered_whole(op: str) -> None:
    with fake_process_group(2):
        checks = ("test_schema", "test_faketensor")
        for operator, arguments in (
            (REDUCE_SCATTER_IN_TREE, (contribution(0).view(4, 6), op, 2, group_name())),
            (ALL_REDUCE_IN_TREE, (contribution(0).view(4, 6), op, group_name())),
        ):
            results = torch.library.opcheck(operator, arguments, test_utils=checks)
            assert set(results.values()) == {"SUCCESS"}


def test_the_bits_are_the_order_s() -> None:
    """Control: one after the other, as a ring adds, gives other bits."""
    parts = [contribution(rank, 1000) for rank in range(8)]
    ring = parts[0].clone()
    for part in parts[1:]:
        ring += part
    tree = add_in_tree(torch.stack(parts))
    assert torch.equal(tree, in_tree(parts, torch.bfloat16))
    assert not torch.equal(tree, ring)


def test_an_element_s_place_and_a_kernel_s_shape_do_not_matter() -> None:
    """Vectors and what is left of them add alike, wherever an element lies."""
    parts = [contribution(rank, 300) for rank in range(4)]
    for dtype in (torch.bfloat16, torch.float32):
        whole = add_in_tree(torch.stack(parts), dtype)
        for start, end in ((0, 1), (1, 300), (7, 40), (33, 96), (299, 300)):
            assert torch.equal(add_in_tree(torch.stack([p[start:end] for p in parts]), dtype), whole[start:end])


KERNEL = """
import torch
from graphpasses.ops._tree_kernel import add_in_tree_on_gpu
from graphpasses.ops.reduce_in_tree import add_in_tree

generator = torch.Generator().manual_seed(0)
for num_rows in (1, 2, 8, 64, 256):
    for dtype, accumulate in KINDS:
        rows = (torch.randn(num_rows, 300, generator=generator) * 1000).to(dtype).to(DEVICE)
        found = add_in_tree_on_gpu(rows.clone(), accumulate)
        expected = add_in_tree(rows.cpu(), accumulate)
        assert torch.equal(found.cpu(), expected), (num_rows, dtype, accumulate)
        in_turn = rows[0].cpu().to(accumulate)
        for row in rows[1:].cpu():
            in_turn += row
        print(torch.equal(in_turn, expected))
"""


@pytest.mark.parametrize("device", ["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_triton_s_kernel_makes_the_same_additions(device: str) -> None:
    """Triton's interpreter truncates what it makes bfloat16: a GPU alone shows that. Control: one after the other."""
    pytest.importorskip("triton")
    of_bf16 = "(torch.bfloat16, torch.float32)" + (", (torch.bfloat16,) * 2" if device == "cuda" else "")
    kinds = f"{of_bf16}, (torch.float16,) * 2, (torch.float32,) * 2, (torch.float64,) * 2"
    code = KERNEL.replace("KINDS", f"({kinds})").replace("DEVICE", repr("cpu" if device == "interpreter" else device))
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if device == "interpreter" else {})
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "False" in done.stdout


def test_triton_compiles_the_kernel_for_a_gpu() -> None:
    """Without one: its interpreter takes what its compiler does not."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from graphpasses.ops._tree_kernel import _add_groups

    sizes = {"NUM_ROWS": 8, "NUM_LEVELS": 3, "BLOCK": 128}
    kinds = {"rows": "*bf16", "sums": "*fp32", "num_elements": "i32", **dict.fromkeys(sizes, "constexpr")}
    source = triton.compiler.ASTSource(fn=_add_groups, signature=kinds, constexprs=sizes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
    assert "add" in made.asm["ptx"]


def errors(num_ranks: int, numel: int = 4096) -> dict[str, float]:
    """Root-mean-square errors of sums of bfloat16, relative to those of float64, as the docs have them."""
    parts = [contribution(rank, numel) for rank in range(num_ranks)]
    exact = torch.stack(parts).double().sum(0)
    ring = parts[0].clone()
    for part in parts[1:]:
        ring += part
    sums = {
        "ring": ring,
        "tree": add_in_tree(torch.stack(parts)),
        "tree:float32": add_in_tree(torch.stack(parts), torch.float32),
    }
    scale = math.sqrt(exact.square().mean())
    return {name: math.sqrt((each.double() - exact).square().mean()) / scale for name, each in sums.items()}


def test_a_tree_is_more_exact_than_a_ring() -> None:
    found = errors(64)
    assert found["ring"] > 1.5 * found["tree"] > 1000 * found["tree:float32"]


def test_ops_have_names() -> None:
    assert [tree_op(), tree_op(torch.float32)] == ["tree", "tree:float32"]
    assert [is_tree_op(op) for op in ("tree", "tree:float32", "sum", None)] == [True, True, False, False]
    assert accumulate_dtype("tree", torch.bfloat16) is torch.bfloat16
    assert accumulate_dtype("tree:float32", torch.bfloat16) is torch.float32

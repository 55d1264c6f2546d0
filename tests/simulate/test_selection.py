"""NCCL_ALGO and NCCL_PROTO, read as NCCL reads them."""

from __future__ import annotations

import pytest

from graphpasses.errors import TopologyError
from graphpasses.simulate import Hardware
from graphpasses.simulate.environment import enabled, parse_selection

PROTOCOLS = ("ll", "ll128", "simple")


def allowed(text: str, function: str) -> list[str]:
    found = parse_selection(text, PROTOCOLS, "NCCL_PROTO").get(function, dict.fromkeys(PROTOCOLS, True))
    return [name for name, is_allowed in found.items() if is_allowed]


@pytest.mark.parametrize(
    ("text", "all_reduce", "broadcast"),
    [
        ("", "ll ll128 simple", "ll ll128 simple"),
        ("Simple", "simple", "simple"),
        ("^LL", "ll128 simple", "ll128 simple"),
        ("^ll,simple", "ll128", "ll128"),
        ("LL,Simple;allreduce:^LL", "ll128 simple", "ll simple"),
        ("^LL128;allreduce:LL128", "ll128", "ll simple"),
        ("allreduce:ll;AllReduce:simple", "simple", "ll ll128 simple"),
        ("broadcast:ll;;", "ll ll128 simple", "ll"),
        ("^", "ll ll128 simple", "ll ll128 simple"),
    ],
)
def test_lists(text: str, all_reduce: str, broadcast: str) -> None:
    assert allowed(text, "allreduce") == all_reduce.split()
    assert allowed(text, "broadcast") == broadcast.split()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "ll;simple",
            (
                'NCCL_PROTO="ll;simple": entry "simple" names no function; all but the first need one, '
                "as in allreduce:ll"
            ),
        ),
        (
            ";ll",
            'NCCL_PROTO=";ll": entry "ll" names no function; all but the first need one, as in allreduce:ll',
        ),
        (
            "reduce_scatter:ll",
            (
                'NCCL_PROTO="reduce_scatter:ll": NCCL has no function "reduce_scatter"; it has broadcast, reduce, '
                "allgather, reducescatter, allreduce"
            ),
        ),
        ("ll64", 'NCCL_PROTO="ll64": NCCL has no "ll64"; it has ll, ll128, simple'),
    ],
)
def test_what_nccl_refuses(text: str, message: str) -> None:
    with pytest.raises(TopologyError) as caught:
        parse_selection(text, PROTOCOLS, "NCCL_PROTO")
    assert str(caught.value) == message


def test_2_23_has_one_list_and_ignores_what_it_does_not_know() -> None:
    old = Hardware(nccl_version="2.23", algorithms="allreduce:tree,ring", protocols="^ll")
    assert enabled(old, "all_reduce")["ring"]
    assert not enabled(old, "all_reduce")["tree"]
    assert enabled(old, "reduce_scatter")["ll"] is False
    # Nothing known is allowed: ring and tree are.
    assert enabled(Hardware(nccl_version="2.23", algorithms="collnet"), "all_reduce")["tree"]
    with pytest.raises(TopologyError, match="NCCL has no function"):
        enabled(Hardware(algorithms="all:tree"), "all_reduce")


def test_nothing_said_of_protocols_is_none() -> None:
    assert enabled(Hardware(), "all_reduce")["ll128"] is None
    assert enabled(Hardware(protocols="^ll"), "all_reduce")["ll128"] is True

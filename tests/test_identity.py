"""Names of shared objects, and ties that survive a transformation."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from graphpasses.errors import IdentityError
from graphpasses.identity import IdentityMap, preserve_identity


class Model(nn.Module):
    """``out`` is tied to ``emb``, ``b`` is ``a``, ``a`` has a buffer, ``frozen`` is not trained."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 4, device=device)
        self.a = nn.BatchNorm1d(4, device=device)
        self.blocks = nn.ModuleList([nn.Linear(4, 4, device=device), self.a])
        self.out = nn.Linear(4, 5, device=device)
        self.out.weight = self.emb.weight
        self.frozen = nn.Linear(4, 4, bias=False, device=device).requires_grad_(False)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_names_in_first_seen_order(device: str) -> None:
    identity = IdentityMap.of(Model(device))
    assert identity.modules == (
        ("",),
        ("emb",),
        ("a", "blocks.1"),
        ("blocks",),
        ("blocks.0",),
        ("out",),
        ("frozen",),
    )
    assert identity.shared_modules == {"a": ("a", "blocks.1")}
    assert identity.shared_parameters == {
        "emb.weight": ("emb.weight", "out.weight"),
        "a.weight": ("a.weight", "blocks.1.weight"),
        "a.bias": ("a.bias", "blocks.1.bias"),
    }
    assert list(identity.shared_buffers) == ["a.running_mean", "a.running_var", "a.num_batches_tracked"]
    assert [aliases[0] for aliases in identity.parameters][-2:] == ["out.bias", "frozen.weight"]
    assert identity.canonical("blocks.1.running_var") == "a.running_var"
    assert identity.aliases("out.weight") == ("emb.weight", "out.weight")
    assert identity.canonical("") == ""
    assert repr(identity) == "IdentityMap(modules=7 (1 shared), parameters=7 (3 shared), buffers=3 (3 shared))"


def test_agrees_with_torch() -> None:
    model = Model()
    identity = IdentityMap.of(model)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert sorted(name for aliases in identity.parameters for name in aliases) == sorted(names)
    assert [aliases[0] for aliases in identity.parameters] == [name for name, _ in model.named_parameters()]
    assert [aliases[0] for aliases in identity.modules] == [name for name, _ in model.named_modules()]


def test_equal_hashable_and_free_of_the_model() -> None:
    model = Model()
    reference = weakref.ref(model)
    identity = IdentityMap.of(model)
    assert identity == IdentityMap.of(copy.deepcopy(model))
    assert hash(identity) == hash(IdentityMap.of(model))
    del model
    gc.collect()
    assert reference() is None


def test_unknown_name() -> None:
    with pytest.raises(IdentityError) as raised:
        IdentityMap.of(Model()).canonical("out.weigth")
    assert str(raised.value) == (
        "the model has no module, parameter or buffer 'out.weigth'; "
        "did you mean 'out.weight' or 'a.weight' or 'frozen.weight'?"
    )
    with pytest.raises(IdentityError, match=r"^the model has no module, parameter or buffer 'zzz'$"):
        IdentityMap.of(Model()).aliases("zzz")


def test_cycle_of_modules_ends() -> None:
    model = nn.Module()
    model.child = nn.Linear(2, 2)
    model.child.add_module("parent", model)
    identity = IdentityMap.of(model)
    assert identity.modules == (("",), ("child",))
    assert identity.parameters == (("child.weight",), ("child.bias",))


def test_to_empty_keeps_ties() -> None:
    broken = Model("meta").to_empty(device="cpu")
    assert broken.out.weight is not broken.emb.weight  # why it is needed
    model = Model("meta")
    before = IdentityMap.of(model)
    with preserve_identity(model) as names:
        model.to_empty(device="cpu")
    assert names == before == IdentityMap.of(model)
    assert model.emb.weight.device.type == "cpu"
    assert not model.frozen.weight.requires_grad


def test_conversion_keeps_ties() -> None:
    model = Model()
    before = IdentityMap.of(model)
    with preserve_identity(model, check_values=True):
        model.to(torch.bfloat16)
    assert IdentityMap.of(model) == before
    assert model.out.weight.dtype is torch.bfloat16


def test_requires_grad_returns_and_the_canonical_value_wins() -> None:
    model = Model()
    model.emb.weight.requires_grad_(False)
    with preserve_identity(model):
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(torch.full_like(parameter, float(len(str(module))))))
        value = model.emb.weight.detach().clone()
    assert model.out.weight is model.emb.weight
    assert torch.equal(model.emb.weight, value)
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == [
        "emb.weight",
        "frozen.weight",
    ]


def test_check_values() -> None:
    model = Model()
    with preserve_identity(model, check_values=True):
        model.out.weight = nn.Parameter(model.emb.weight.detach().clone())
    assert model.out.weight is model.emb.weight
    with torch.no_grad():
        model.emb.weight[0, 0] = torch.nan
    with preserve_identity(model, check_values=True):  # NaN has the bits of NaN
        model.out.weight = nn.Parameter(model.emb.weight.detach().clone())
    with pytest.raises(IdentityError) as raised:
        with preserve_identity(model, check_values=True):
            model.out.weight = nn.Parameter(model.emb.weight.detach() + 1)
    assert str(raised.value) == (
        "the block broke ties that cannot be restored:\n  'emb.weight' and 'out.weight' were tied: values differ"
    )


@pytest.mark.parametrize(
    ("weight", "problem"),
    [
        (torch.empty(6, 4), r"shape is \(5, 4\) and \(6, 4\)"),
        (torch.empty(5, 4, dtype=torch.bfloat16), "dtype is torch.float32 and torch.bfloat16"),
        (torch.empty(5, 4, device="meta"), "device is cpu and meta"),
        (None, "'out.weight' vanished"),
    ],
)
def test_ties_that_cannot_return(weight: torch.Tensor | None, problem: str) -> None:
    model = Model()
    replaced = None if weight is None else nn.Parameter(weight)

    def transform(model: Model) -> None:
        model.out.weight = replaced
        model.blocks[1] = copy.deepcopy(model.a)

    with pytest.raises(IdentityError, match=f"^the block .*\n  'emb.weight' and 'out.weight' were tied: {problem}$"):
        with preserve_identity(model):
            transform(model)
    assert model.out.weight is replaced
    assert model.blocks[1] is not model.a  # nothing was restored


def test_canonical_name_that_vanished() -> None:
    model = Model()
    with pytest.raises(IdentityError, match=r"'emb.weight' and 'out.weight' were tied: 'emb.weight' vanished"):
        with preserve_identity(model):
            del model.emb


def test_exceptions_of_the_block_pass() -> None:
    model = Model()

    def transform(model: Model) -> None:
        model.out.weight = None
        raise KeyError("mine")

    with pytest.raises(KeyError, match=r"mine"):
        with preserve_identity(model):
            transform(model)
    assert model.out.weight is None


def test_shared_module_replaced_under_its_canonical_name() -> None:
    model = Model()
    with preserve_identity(model):
        model.a = nn.Sequential(model.a)  # as a sharding planner does that skips second names
    assert model.blocks[1] is model.a
    assert isinstance(model.a, nn.Sequential)


def test_shared_module_copied_under_both_names() -> None:
    model = Model()
    with preserve_identity(model):
        model.a, model.blocks[1] = copy.deepcopy(model.a), copy.deepcopy(model.a)
    assert model.blocks[1] is model.a
    with pytest.raises(
        IdentityError, match=r"'a.weight' and 'blocks.1.weight' were tied: shape is \(4,\) and \(3,\)"
    ):
        with preserve_identity(model):
            model.blocks[1] = nn.BatchNorm1d(3)


def test_shared_module_that_cannot_return() -> None:
    model = Model()
    with pytest.raises(
        IdentityError, match=r"modules 'a' and 'blocks.1' were one: now they are BatchNorm1d and Ident"
    ):
        with preserve_identity(model):
            model.blocks[1] = nn.Identity()
    model = Model()
    with pytest.raises(IdentityError, match=r"modules 'a' and 'blocks.1' were one: 'blocks.1' vanished"):
        with preserve_identity(model):
            del model.blocks[1]


def test_shared_module_around_a_shared_module() -> None:
    model = nn.Module()
    model.inner = nn.Linear(2, 2)
    model.x = nn.Sequential(model.inner)
    model.y = model.x
    before = IdentityMap.of(model)
    with preserve_identity(model):
        model.x, model.y = copy.deepcopy(model.x), copy.deepcopy(model.x)
    assert IdentityMap.of(model) == before


def test_read_only_property_of_the_name() -> None:
    """SimpleFSDP answers ``module.weight`` from a property of the class."""
    model = Model()
    with preserve_identity(model):
        model.out._parameters["weight"] = nn.Parameter(torch.zeros(5, 4))
        model.out.__class__ = type("Wrapped", (nn.Linear,), {"weight": property(lambda self: "computed")})
    assert model.out._parameters["weight"] is model.emb.weight
    assert model.out.weight == "computed"

"""Hashes on one rank: every bit and every position counts; strides, chunks and registration order do not."""

import itertools
import random

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.errors import UnsupportedError
from graphpasses.parity import _lanes
from graphpasses.parity.hashing import gradient_hashes, tensor_hash, tensor_hashes, weight_hash, weight_hashes

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
REAL_DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
]


def tensor_of(dtype: torch.dtype, numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


@pytest.mark.parametrize("dtype", REAL_DTYPES, ids=str)
def test_every_bit_flip_changes_both_halves(dtype: torch.dtype) -> None:
    tensor = tensor_of(dtype, 5)
    hashes = {tensor_hash(tensor)}
    words = tensor.view(torch.uint8)
    for byte, bit in itertools.product(range(words.numel()), range(8)):
        words[byte] ^= 1 << bit
        hashes.add(tensor_hash(tensor))
        words[byte] ^= 1 << bit
    num_variants = 1 + 8 * words.numel()
    assert len({digest[:16] for digest in hashes}) == num_variants
    assert len({digest[16:] for digest in hashes}) == num_variants


def test_every_value_of_a_16_bit_element_hashes_differently() -> None:
    values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16)[:, None]
    lanes = torch.stack([_lanes.lanes(value, (9,), (7,)) for value in values[::16]])
    assert len(lanes[:, 0].unique()) == len(lanes[:, 1].unique()) == len(lanes)


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.complex128], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
    hashes = {tensor_hash(tensor)}
    for index in range(5):
        changed = tensor.clone()
        changed[index] = 1 - changed[index] if dtype != torch.bool else ~changed[index]
        hashes.add(tensor_hash(changed))
    assert len(hashes) == 6
    if dtype.is_complex:
        assert tensor_hash(tensor * 1j) != tensor_hash(tensor)
        assert tensor_hash((tensor * 1j).conj()) == tensor_hash((tensor * 1j).conj().resolve_conj())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8], ids=str)
def test_every_swap_of_unequal_elements_changes_the_hash(dtype: torch.dtype) -> None:
    words = tensor_of(dtype, 96).view(WORDS[dtype.itemsize])
    original = tensor_hash(words)
    i, j = torch.tensor([pair for pair in itertools.combinations(range(96), 2) if words[pair[0]] != words[pair[1]]]).T
    swapped = words.repeat(len(i), 1)
    rows = torch.arange(len(i))
    swapped[rows, i], swapped[rows, j] = words[j], words[i]
    hashes = tensor_hashes({f"{first} and {second}": row for first, second, row in zip(i, j, swapped, strict=True)})
    assert len(hashes) > 4000
    assert [pair for pair, digest in hashes.items() if digest == original] == []
    assert tensor_hash(words.clone()) == original


def test_swaps_of_values_that_differ_in_the_sign_do_not_collide_in_either_half() -> None:
    """The hardest swaps for a mixer: one bit, the highest, which multiplication does not spread."""
    places = [*((i,) for i in range(48)), *itertools.combinations(range(48), 2)]
    tensors = torch.zeros(len(places), 48, dtype=torch.float64)
    for tensor, where in zip(tensors, places, strict=True):
        tensor[list(where)] = -0.0
    seen = {*tensor_hashes({str(where): row for where, row in zip(places, tensors, strict=True)}).values()}
    assert len({digest[:16] for digest in seen}) == len({digest[16:] for digest in seen}) == len(seen)
    assert len(seen) == len(places)


def test_signed_zeros_and_nan_payloads_differ() -> None:
    nans = torch.tensor([0x7FC00000, 0x7FC00001, -0x400000], dtype=torch.int32).view(torch.float32)
    assert nans.isnan().all()
    scalars = [torch.tensor(0.0), torch.tensor(-0.0), *nans]
    assert len({tensor_hash(scalar) for scalar in scalars}) == 5


def test_dtype_and_shape_enter() -> None:
    zeros = [torch.zeros(2, 3, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.int32)]
    shapes = [torch.zeros(3, 2), torch.zeros(6), torch.zeros(1, 6), torch.zeros(0), torch.zeros(0, 5)]
    scalars = [torch.zeros(()), torch.zeros(1)]
    tensors = [*zeros, *shapes, *scalars]
    assert len({tensor_hash(tensor) for tensor in tensors}) == len(tensors)


def test_hash_is_stable() -> None:
    """Pinned, so that runs of two releases can be compared: a new formula needs a new run file version."""
    assert tensor_hash(torch.arange(10.0)) == "f67c3334a6c8d66843fad93b1b1de0d3"


def test_strides_do_not_enter() -> None:
    tensor = torch.randn(6, 5, 4, 3)
    expected = tensor_hash(tensor)
    for order in itertools.permutations(range(4)):
        inverse = sorted(range(4), key=order.__getitem__)
        permuted = tensor.permute(order).contiguous().permute(inverse)
        assert tensor_hash(permuted) == expected
    gaps = torch.zeros(6, 10, 4, 6)[:, ::2, :, ::2].copy_(tensor)
    assert tensor_hash(gaps) == expected
    row = torch.randn(1, 3)
    assert tensor_hash(row.expand(4, 3)) == tensor_hash(row.repeat(4, 1))


@pytest.mark.parametrize("limit", [1, 2, 7, 30, 64, 1000])
def test_chunks_do_not_enter(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(5, 6, 7)
    views = [tensor, tensor.flatten(), tensor.permute(2, 0, 1), tensor[:, 1::2], tensor[1, 2, 3]]
    expected = [tensor_hash(view) for view in views]
    monkeypatch.setitem(_lanes._CHUNK, "cpu", limit)
    assert [tensor_hash(view) for view in views] == expected


def test_formula_against_python_integers() -> None:
    """The docstring's formula, written with unbounded integers."""
    tensor = torch.randn(40)
    mask, sums = (1 << 64) - 1, [0, 0]
    for position, bits in enumerate(tensor.view(torch.int32).tolist()):
        w = (position + 1) * 0x9E3779B97F4A7C15 & mask
        h = (bits & mask) ^ w
        h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9 & mask
        h = (h ^ h >> 27) * 0x94D049BB133111EB & mask
        h ^= h >> 31
        g = h * ((h - (h >> 63 << 64)) >> 32) & mask
        sums = [sums[0] + h & mask, sums[1] + g & mask]
    assert [value & mask for value in _lanes.lanes(tensor, (40,), (0,)).tolist()] == sums


def _element_of(h: int, position: int) -> int:
    """Returns the raw bits, as int64, whose mix is ``h`` at a position: the docstring's formula backwards."""
    mask = (1 << 64) - 1
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        unshifted = h
        for _ in range(2):
            unshifted = h ^ unshifted >> shift
        h = unshifted * pow(factor, -1, 1 << 64) & mask
    return _lanes.signed(h ^ (position + 1) * 0x9E3779B97F4A7C15)


def test_flips_of_one_bit_of_two_mixes_do_not_cancel() -> None:
    """They do every second time in the first sum: the control."""
    generator, num_cancelled = random.Random(0), 0
    for bit in range(64):
        for _ in range(8):
            mixes = [generator.getrandbits(64) for _ in range(2)]
            before, after = (
                torch.tensor([_element_of(mix ^ flip, p) for p, mix in enumerate(mixes)]) for flip in (0, 1 << bit)
            )
            change = (_lanes.lanes(before, (2,), (0,)) - _lanes.lanes(after, (2,), (0,))).tolist()
            num_cancelled += change[0] == 0
            assert change[1] != 0
    assert 200 < num_cancelled < 350


def test_parts_add_up_in_any_dimension() -> None:
    tensor = torch.randn(4, 5, 6).bfloat16()
    whole = _lanes.lanes(tensor, tensor.shape, (0, 0, 0))
    for dim in range(3):
        total = torch.zeros(2, dtype=torch.int64)
        for start, part in zip((0, 1, 3), tensor.split([1, 2, tensor.shape[dim] - 3], dim), strict=True):
            offset = [0, 0, 0]
            offset[dim] = start
            total += _lanes.lanes(part, tensor.shape, offset)
        assert torch.equal(total, whole)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("kept", torch.ones(3))
        self.register_buffer("scratch", torch.ones(3), persistent=False)
        self.register_buffer("again", self.kept)


def test_model_names_each_tensor_once_by_its_first_name() -> None:
    model = Tied()
    assert list(weight_hashes(model)) == ["frozen", "embedding.weight", "kept", "scratch"]
    before = weight_hash(model)
    for buffer in (model.scratch, model.kept):
        buffer += 1
        assert weight_hash(model) != before
        buffer -= 1
        assert weight_hash(model) == before


def test_model_hash_ignores_registration_order_but_not_names() -> None:
    a, b = nn.Module(), nn.Module()
    x, y = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))
    a.x, a.y = x, y
    b.y, b.x = y, x
    assert weight_hash(a) == weight_hash(b)
    b.x, b.y = y, x
    assert weight_hash(a) != weight_hash(b)


def test_parameters_that_a_forward_left_unsharded_are_hashed_as_they_are_trained() -> None:
    with fake_process_group(2):
        model = nn.Linear(4, 4)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        before = weight_hash(model)
        with torch.no_grad():
            model(torch.ones(2, 4))
        assert model.weight.dtype == torch.bfloat16
        assert weight_hash(model) == before


def test_missing_gradients_are_none() -> None:
    model = Tied()
    assert set(gradient_hashes(model).values()) == {None}
    model.head(model.embedding(torch.tensor([1]))).sum().backward()
    hashes = gradient_hashes(model)
    assert hashes["frozen"] is None
    assert hashes["embedding.weight"] == tensor_hash(model.embedding.weight.grad)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.eye(2).to_sparse(), "its layout is torch.sparse_coo; make it dense first"),
        (torch.zeros(2, device="meta"), "it is on the meta device and has no values"),
    ],
)
def test_unsupported_tensors(tensor: torch.Tensor, reason: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        tensor_hashes({"a.b": tensor})
    assert str(error.value) == f"cannot hash 'a.b': {reason}"


def test_unknown_subclasses_are_refused() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fake = torch.zeros(2)
    with pytest.raises(UnsupportedError, match=r"^cannot hash 'w': it is a FakeTensor, whose data"):
        tensor_hashes({"w": fake})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", REAL_DTYPES, ids=str)
def test_cuda_hashes_as_the_cpu_does(dtype: torch.dtype) -> None:
    tensor = tensor_of(dtype, 3000)
    assert tensor_hash(tensor.cuda()) == tensor_hash(tensor)

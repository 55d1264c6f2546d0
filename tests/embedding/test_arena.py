"""Tables moved into one memory: every alias follows, nothing else changes, and what cannot move is refused."""

from __future__ import annotations

import copy
import gc
import io
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpasses.embedding import arena as arena_module
from graphpasses.embedding.arena import Arena, give_back_pages
from graphpasses.errors import ArenaError


def table(rows: int, value: float) -> nn.Parameter:
    return nn.Parameter(torch.full((rows, 4), value))


def test_tensors_and_their_aliases_follow() -> None:
    a, b = table(3, 1.0), table(5, 2.0)
    hidden = a.detach().view(-1)[4:8]  # its base has no Python object
    old = a.untyped_storage().data_ptr()
    arena = Arena.of([a, b], ["a", "b"])
    assert a.data_ptr() == arena.flat.data_ptr() != old
    assert arena.offsets == (0, 16)  # a has 12 elements; tables begin at multiples of 64 bytes
    arena.flat[arena.offsets[0] + 4] = 7.0
    arena.flat[arena.offsets[1]] = 8.0
    assert (a[1, 0].item(), hidden[0].item(), b[0, 0].item()) == (7.0, 7.0, 8.0)
    assert hidden._base is not None
    assert hidden._base.data_ptr() == a.data_ptr()
    assert (a.is_leaf, a.requires_grad, a._version) == (True, True, 0)


def test_an_arena_is_used_again() -> None:
    tensors = [table(3, 1.0), table(5, 2.0)]
    first = Arena.of(tensors, ["a", "b"])
    again = Arena.of(tensors[::-1], ["b", "a"])
    assert again.flat is first.flat
    assert again.offsets == first.offsets[::-1]
    assert Arena.containing(tensors[0]) is first.flat
    assert Arena.reject_reason(tensors[0]) is None
    assert Arena.containing(first.flat) is first.flat
    assert Arena.containing(table(1, 0.0)) is None


def test_memory_lives_as_long_as_a_tensor() -> None:
    a, b = table(3, 1.0), table(5, 2.0)
    arena = Arena.of([a, b], ["a", "b"])
    memory = torch.multiprocessing.reductions.StorageWeakRef(arena.flat.untyped_storage())
    del arena, a
    gc.collect()
    assert (memory.expired(), b.sum().item()) == (False, 40.0)
    del b
    gc.collect()
    assert memory.expired()


def test_saving_loading_and_copying_are_as_before() -> None:
    modules = [nn.Linear(4, 2), nn.Linear(4, 3)]

    def size() -> int:
        file = io.BytesIO()
        torch.save(modules[0].state_dict(), file)
        return file.tell()

    before, saved = size(), copy.deepcopy(modules[0].state_dict())
    arena = Arena.of([module.weight for module in modules], ["0.weight", "1.weight"])
    assert size() == before
    reference = copy.deepcopy(modules[0])
    assert (reference.weight.untyped_storage().nbytes(), Arena.containing(reference.weight)) == (32, None)
    arena.flat.zero_()
    assert reference.weight.detach().abs().sum() > 0
    modules[0].load_state_dict(saved)
    torch.testing.assert_close(arena.flat[:8].view(2, 4), saved["weight"], rtol=0, atol=0)
    arena.check([module.weight for module in modules])


def test_a_gradient_in_flight_reaches_the_moved_table() -> None:
    a, b = table(3, 1.0), table(5, 2.0)
    loss = (a * a).sum()
    Arena.of([a, b], ["a", "b"])
    loss.backward()
    assert a.grad is not None
    assert a.grad.eq(2.0).all()


@pytest.mark.parametrize("how", ["assign", "data", "share"])
def test_a_table_that_moved_is_noticed(how: str) -> None:
    module = nn.Linear(4, 2)
    arena = Arena.of([module.weight], ["fc.weight"])
    arena.check([module.weight])
    if how == "assign":
        module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)
    elif how == "data":
        module.weight.data = module.weight.data.clone()
    else:
        module.share_memory()
    with pytest.raises(ArenaError, match=r"fc.weight was moved or replaced.*torch.compiler.reset\(\)"):
        arena.check([module.weight])


def test_an_interrupt_leaves_no_half_of_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    a, num_pieces = torch.ones(128 << 18), 0  # 128 MiB

    def interrupt(piece: Tensor) -> None:
        nonlocal num_pieces
        num_pieces += 1
        signal.raise_signal(signal.SIGINT)
        give_back_pages(piece)

    monkeypatch.setattr("graphpasses.embedding.arena.give_back_pages", interrupt)
    old = a.data_ptr()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            Arena.of([a], ["a"])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert num_pieces == 4
    assert a.data_ptr() != old
    assert a.eq(1).all()


def foreign(kind: str, folder: Path) -> Tensor:
    tensor = torch.ones(8)
    if kind == "numpy":
        tensor.numpy()
    elif kind == "shared":
        tensor.share_memory_()
    elif kind == "file":
        tensor = torch.from_file(str(folder / "table"), shared=True, size=8)
    else:
        tensor = torch.ones(4, 4).t()
    return tensor


@pytest.mark.parametrize("kind", ["numpy", "shared", "file", "strided"])
def test_memory_that_is_not_the_tables_own_stays(kind: str, tmp_path: Path) -> None:
    tensor, other = foreign(kind, tmp_path), table(2, 1.0)
    places = tensor.data_ptr(), other.data_ptr()
    with pytest.raises(ArenaError, match=r"^users cannot be put into one memory with other tables: it"):
        Arena.of([other, tensor], ["items", "users"])
    assert (tensor.data_ptr(), other.data_ptr()) == places


def test_one_memory_belongs_to_one_arena() -> None:
    a, b, c = table(2, 1.0), table(2, 2.0), table(2, 3.0)
    with pytest.raises(ArenaError, match="users and clicks are the same memory"):
        Arena.of([a, a.detach()], ["users", "clicks"])
    Arena.of([a, b], ["a", "b"])
    with pytest.raises(ArenaError, match=r"^a already lies in one memory with the tables of another fused"):
        Arena.of([a, c], ["a", "c"])


def test_no_table_lies_twice() -> None:
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("needs /proc")

    def peak() -> int:
        (kib,) = re.findall(r"VmHWM:\s+(\d+) kB", status.read_text())
        return int(kib) // 1024

    tables = [torch.ones(256 << 18), torch.ones(300)]  # one of 256 MiB
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = peak()
    Arena.of(tables, ["large", "small"])
    assert peak() - before < 80  # MiB: a piece, and what importing takes
    assert all(table.eq(1).all() for table in tables)


def test_memory_that_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    a, b = table(2, 1.0), table(2, 2.0)
    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(ArenaError, match=r"^users, items move into one memory, for which cpu lacks [\d,]+ bytes"):
        Arena.of([a, b], ["users", "items"])


@pytest.mark.parametrize("num_failures", [1, 2])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tables_wait_on_the_host(device: str, num_failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.ones(300, device=device), torch.full((5,), 2.0, device=device)
    alias, empty, failures = a[3:], torch.empty, iter(range(num_failures))

    def lacking(size: int, **options: Any) -> torch.Tensor:
        if size > 300 and next(failures, None) is not None:
            raise torch.OutOfMemoryError("no memory")
        return empty(size, **options)

    monkeypatch.setattr(torch, "empty", lacking)
    monkeypatch.setattr(arena_module, "_can_wait_on_host", lambda device, num_bytes: num_bytes == 1280)
    if num_failures == 1:
        arena = Arena.of([a, b], ["users", "items"])
        assert [each.data_ptr() - arena.flat.data_ptr() for each in (a, alias)] == [0, 12]
    else:
        with pytest.raises(ArenaError, match="lacks 1,280 bytes"):
            Arena.of([a, b], ["users", "items"])
    assert a.eq(1).all()
    assert alias.eq(1).all()
    assert b.eq(2).all()


@pytest.mark.gpu
def test_tables_move_on_a_gpu() -> None:
    a, b = torch.ones(300, device="cuda"), torch.full((5,), 2.0, device="cuda")
    alias = a[3:]
    arena = Arena.of([a, b], ["users", "items"])
    assert [each.data_ptr() - arena.flat.data_ptr() for each in (a, alias)] == [0, 12]
    arena.flat.fill_(3)
    assert all(each.eq(3).all() for each in (a, b, alias))

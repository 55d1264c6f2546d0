"""What was found out about kernels is read by the next process, and not after a change of what it depends on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from graphpasses._torch.exact_kernels import compile_exactly
from graphpasses.fusion import kept
from graphpasses.fusion.kept import keep, read_kept


def test_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "cache_folder", lambda: tmp_path)
    assert read_kept("kernels") == {}
    keep("kernels", {"a": True})
    keep("kernels", {"b": False})
    keep("functions", {"c": True})
    assert read_kept("kernels") == {"a": True, "b": False}
    (path,) = (tmp_path / "kernels").iterdir()
    assert path.suffix == ".json"
    monkeypatch.setattr(kept, "_digest", lambda _: "of another compiler")
    assert read_kept("kernels") == {}


@pytest.mark.slow
def test_a_kernel_has_a_name_by_what_it_computes() -> None:
    x = torch.ones(4, 8)
    functions: list[Callable[..., list[torch.Tensor]]] = [
        lambda x: [x + 1.0],
        lambda x: [x + 1.0],
        lambda x: [x + 2.0],
    ]
    one, same, other = (compile_exactly(function, [x]).name for function in functions)
    assert one == same != other
    assert one is not None

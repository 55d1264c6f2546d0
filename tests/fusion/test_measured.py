"""Functions of half precision are fused where all values have eager's bits, in vectors and in tails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from graphpasses._torch.exact_kernels import compile_exactly
from graphpasses._torch.tested_versions import RELEASE
from graphpasses.fusion import kept, measured
from graphpasses.fusion.exact_operators import MEASURED, measured_functions, run_exactly
from graphpasses.fusion.measured import exact_functions

aten = torch.ops.aten
SILU, EXPM1 = (aten.silu.default, torch.bfloat16, "cpu"), (aten.expm1.default, torch.bfloat16, "cpu")


@pytest.mark.slow
def test_a_function_with_other_bits_is_told_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "cache_folder", lambda: tmp_path)
    # Inductor's is exp(x) - 1 there
    monkeypatch.setitem(MEASURED["cpu"], aten.expm1.default, lambda x: aten.exp.default(x) - 1)
    assert exact_functions({SILU, EXPM1}) == {SILU}
    monkeypatch.delattr(measured, "_compare_halves")  # it is read
    assert exact_functions({SILU, EXPM1}) == {SILU}
    (path,) = (tmp_path / "exact_functions").iterdir()
    assert path.suffix == ".json"


@pytest.mark.slow
def test_a_gradient_is_exact_with_all_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels' exp is another than eager's at some values (AVX-512), which shows with few gradients."""
    monkeypatch.setattr(kept, "cache_folder", lambda: tmp_path)
    target = aten.silu_backward.default
    if not exact_functions({(target, torch.bfloat16, "cpu")}):
        return
    pairs = [(8.816207631167156e-39, -2.265625), (1.3150843049824341e-37, -1.421875)]
    given = torch.tensor(pairs).bfloat16().T.repeat_interleave(32, 1).contiguous().unbind()
    kernel = compile_exactly(lambda *tensors: [run_exactly(target, tensors, {})], given)
    assert torch.equal(*kernel([*given]), target(*given))


@pytest.mark.slow
@pytest.mark.gpu
def test_functions_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "cache_folder", lambda: tmp_path)
    wanted = {each for each in measured_functions() if each[2] == "cuda"}
    exact = exact_functions(wanted)
    missing = sorted(f"{target} {dtype}" for target, dtype, device in wanted - exact)
    # With torch 2.15 five have other bits on an H100, as Triton 3.9 compiles them, and are not fused.
    assert missing == [] or (RELEASE >= (2, 15) and len(missing) <= 5), missing

"""Which dims of a batch may vary from step to step: those of TorchRec's types, and those that the user names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.export import Dim

from graphpasses._torch.symbols import dim_hint
from graphpasses.errors import CaptureError
from graphpasses.graph.batch import Varying, VaryingDim
from graphpasses.graph.batch_structure import BatchStructure

_Leaves = Mapping[str, Any]


def read_dynamic_shapes(structure: BatchStructure, leaves: Sequence[Any], dynamic_shapes: Any) -> Varying:
    """Returns the dims of a batch that may vary; ``dynamic_shapes`` are as :func:`capture_train_step` takes them.

    Those are dim 0 of what TorchRec's jagged and keyed tensors are made of and, unless the user says which, dim 0 of
    tensors beside them that has as many elements as they have samples.
    """
    by_path = dict(zip(structure.paths, leaves, strict=True))
    samples = {_num_samples(each, by_path) for each in _containers(structure)}
    found: dict[str, dict[int, VaryingDim]] = {}
    if dynamic_shapes is None:
        for path, leaf in by_path.items():
            if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.size(0) in samples:
                found[path] = {0: VaryingDim()}
    _read(structure, dynamic_shapes, by_path, found)
    for path, dims in found.items():
        if dims and not by_path[path].is_contiguous():
            raise CaptureError(
                f"{path} has a dim that may vary, and is not contiguous; give {path}.contiguous() at each step"
            )
    return {path: dims for path, dims in found.items() if dims}


def with_sizes_of_its_own(carried: Mapping[str, Any]) -> Varying:
    """Returns all dims of the tensors that a step leaves and the next reads, which follow from those of a batch."""
    tensors = {path: each for path, each in carried.items() if isinstance(each, torch.Tensor) and each.dim()}
    dims = {path: range(each.dim()) for path, each in tensors.items() if each.is_contiguous()}
    return {path: dict.fromkeys(each, VaryingDim()) for path, each in dims.items()}


def _containers(structure: BatchStructure) -> Iterator[BatchStructure]:
    if structure.is_of_library:
        yield structure
    for child in structure.children:
        yield from _containers(child)


def _num_samples(structure: BatchStructure, leaves: _Leaves) -> int:
    parts = {child.path.rpartition(".")[2]: leaves[child.path] for child in structure.children}
    if structure.kind.__name__ == "KeyedTensor":  # type: ignore[union-attr]
        return int(next(iter(parts.values())).size(0))
    number = parts["_lengths"].numel() if "_lengths" in parts else parts["_offsets"].numel() - 1
    is_keyed = structure.kind.__name__ == "KeyedJaggedTensor"  # type: ignore[union-attr]
    num_keys = len(structure.spec.context) if is_keyed else 1  # type: ignore[union-attr]
    return int(number) // max(num_keys, 1)


def _read(structure: BatchStructure, spec: Any, leaves: _Leaves, found: dict[str, dict[int, VaryingDim]]) -> None:
    if structure.kind is None:
        found[structure.path] = dict(_read_leaf(structure.path, spec, leaves[structure.path]))
    elif spec is None:
        for path in (path for container in _containers(structure) for path in container.paths):
            if isinstance(leaves[path], torch.Tensor):
                found[path] = {0: VaryingDim()}
    else:
        for key, child in zip(structure.keys, structure.children, strict=True):
            _read(child, _entries(structure, spec)[key], leaves, found)


def _entries(structure: BatchStructure, spec: Any) -> Mapping[Any, Any]:
    """Returns the entries of a container by its keys."""
    names = [str(key).removeprefix(".") for key in structure.keys]
    if isinstance(spec, Mapping):
        if set(spec) == set(structure.keys):
            return spec
        if set(spec) == set(names):
            return dict(zip(structure.keys, (spec[name] for name in names), strict=True))
    elif isinstance(spec, (list, tuple)) and len(spec) == len(structure.keys):
        return dict(zip(structure.keys, spec, strict=True))
    raise CaptureError(
        f"dynamic_shapes of {structure.path} is {spec!r}; give None, or one entry for each of {', '.join(names)}"
    )


def _read_leaf(path: str, spec: Any, leaf: Any) -> Iterator[tuple[int, VaryingDim]]:
    if spec is None:
        return
    entries, is_tensor = spec if isinstance(spec, Mapping) else None, isinstance(leaf, torch.Tensor)
    if isinstance(spec, (list, tuple)) and is_tensor and len(spec) == leaf.dim():
        entries = dict(enumerate(spec))
    if entries is None or not is_tensor or not set(entries) <= set(range(leaf.dim())):
        what = f"a tensor of {leaf.dim()} dims" if is_tensor else f"a {type(leaf).__name__}"
        raise CaptureError(
            f"dynamic_shapes of {path}, {what}, is {spec!r}; give None, or by number of the dim a torch.export.Dim"
        )
    for index, entry in entries.items():
        if (dim := _varying_dim(f"dim {index} of {path}", entry, leaf.shape[index])) is not None:
            yield index, dim


def _varying_dim(what: str, entry: Any, size: int) -> VaryingDim | None:
    hint = dim_hint(entry)
    if entry is None or entry == size or (hint is not None and hint[0] == "STATIC"):
        return None
    if hint is not None:
        return VaryingDim(min=hint[1] or 0, max=hint[2])
    if type(entry) is Dim:
        return VaryingDim(entry.__name__, entry.min, entry.max if type(entry.max) is int else None)
    raise CaptureError(
        f"dynamic_shapes of {what}, whose size is {size}, is {entry!r}; give a torch.export.Dim of its own, "
        "Dim.AUTO or None"
    )

"""TorchRec's own tests, from a checkout of its sources, so that they run on CPUs and with compiled models."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import unittest
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import graphpasses as gp

__all__ = ["TEST_MODULES", "Compiling", "load_tests"]

TEST_MODULES = (
    *("test_model_parallel_nccl", "test_model_parallel_gloo", "test_model_parallel_hierarchical"),
    *("test_sequence_model_parallel", "test_sequence_model_parallel_hierarchical"),
    *("test_qcomms_embedding_modules", "test_pt2_multiprocess", "test_fp_embeddingbag"),
    *("test_mc_embeddingbag", "test_mc_embedding"),
)
_PACKAGES = ("torchrec.distributed.tests", "torchrec.distributed.test_utils")


class _OnCPU(importlib.machinery.SourceFileLoader):
    """Loads a module of TorchRec's tests with the CPU in the place of the GPU."""

    def get_code(self, fullname: str) -> CodeType:
        source = Path(self.path).read_text().replace('"cuda:0"', '"cpu"').replace('"cuda"', '"cpu"')
        return compile(source, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds TorchRec's tests, which its wheel lacks, in its sources."""

    def __init__(self, sources: Path) -> None:
        self._sources = sources

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(_PACKAGES):
            return None
        place = self._sources.joinpath(*fullname.split("."))
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        folders = [str(place)] if place.is_dir() else None
        return importlib.util.spec_from_file_location(
            fullname, file, loader=_OnCPU(fullname, str(file)), submodule_search_locations=folders
        )


def load_tests(sources: Path) -> Iterator[unittest.TestCase]:
    """Imports TorchRec's multi-rank tests; what they skip where there are too few GPUs, they run.

    Args:
        sources: a checkout of TorchRec, of the version that is installed.

    Yields:
        Its tests.
    """
    import hypothesis

    sys.meta_path.insert(0, _Finder(sources))
    hypothesis.settings.register_profile(
        "upstream",
        derandomize=True,  # the same examples each time
        database=None,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("upstream")
    with mock.patch.object(unittest, "skipIf", _skip_unless_gpu(unittest.skipIf)):
        modules = [importlib.import_module(f"{_PACKAGES[0]}.{name}") for name in TEST_MODULES]
    for module in modules:
        for suite in unittest.defaultTestLoader.loadTestsFromModule(module):
            yield from suite


def _skip_unless_gpu(skip_if: Callable[[object, str], Any]) -> Callable[[object, str], Any]:
    return lambda condition, reason: skip_if(condition and "GPU" not in reason, reason)


class Compiling:
    """While it is entered, the models that TorchRec's tests shard are compiled in place, by :mod:`graphpasses`.

    Args:
        report: what the passes do.
        is_on: whether they are compiled after all.
    """

    def __init__(self, report: gp.CompileReport, *, is_on: bool) -> None:
        self._report = report
        self._depth = 0
        self.is_on = is_on

    def _compile(self, model: Any) -> None:
        if not self.is_on:
            return
        for module in model.modules():
            module._compiled_call_impl = None
        model.compile(backend="graphpasses", options={"inner": "aot_eager", "report": self._report})

    def _compiling(self, make: Callable[..., Any], *, is_init: bool = False) -> Callable[..., Any]:
        """Returns a function that compiles what ``make`` returns, or initialises, unless it is a part of a model."""

        @functools.wraps(make)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                made = make(*args, **kwargs)
            finally:
                self._depth -= 1
            if self._depth == 0:
                self._compile(args[0] if is_init else made)
            return made

        return call

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Compiles the models that are sharded in the block."""
        import torch
        from torchrec.distributed import embeddingbag, fp_embeddingbag, mc_embedding, mc_embeddingbag
        from torchrec.distributed.model_parallel import DistributedModelParallel

        def compile_instead(model: Any, **options: Any) -> Any:
            if not self.is_on:
                return torch.compile(model, **options)
            return gp.compile(model, inner="aot_eager", report=self._report, fullgraph=options["fullgraph"])

        pt2 = sys.modules[f"{_PACKAGES[0]}.test_pt2_multiprocess"]
        torch_of_pt2 = SimpleNamespace(**{**vars(torch), "compile": compile_instead})
        patches = [mock.patch.object(pt2, "torch", torch_of_pt2)]
        # This one compares a model that it compiles with one that it does not.
        patches.append(mock.patch.object(pt2, "DistributedModelParallel", _uncompiled(DistributedModelParallel)))
        init = self._compiling(DistributedModelParallel.__init__, is_init=True)
        patches.append(mock.patch.object(DistributedModelParallel, "__init__", init))
        sharders = (
            embeddingbag.EmbeddingBagCollectionSharder,
            fp_embeddingbag.FeatureProcessedEmbeddingBagCollectionSharder,
            mc_embedding.ManagedCollisionEmbeddingCollectionSharder,
            mc_embeddingbag.ManagedCollisionEmbeddingBagCollectionSharder,
        )
        patches += [mock.patch.object(each, "shard", self._compiling(each.shard)) for each in sharders]
        for name in TEST_MODULES:
            module: Any = sys.modules[f"{_PACKAGES[0]}.{name}"]
            if hasattr(module, "_shard_modules"):
                patches.append(mock.patch.object(module, "_shard_modules", self._compiling(module._shard_modules)))
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in reversed(patches):
                patch.stop()


def _uncompiled(kind: Any) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        model = kind(*args, **kwargs)
        model._compiled_call_impl = None
        return model

    return make


def set_environment() -> None:
    """Sets what TorchRec's process groups read."""
    from torchrec.test_utils import get_free_port

    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = str(get_free_port())

"""The configurations that graph_trainer's own tests train, read from its sources."""

from __future__ import annotations

import importlib
import inspect
import shlex
import sys
import unittest
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any
from unittest import mock

__all__ = ["Configuration", "configurations"]

# Their names in torchtitan's eager trainer, where they are others.
_EAGER = {
    "llama3_debugmodel_sdpa": "llama3_debugmodel",
    "llama3_debugmodel_sdpa_cross_entropy_loss": "llama3_debugmodel",
    "deepseek_v3_debugmodel_eager_pp": "deepseek_v3_debugmodel",
    "qwen3_debugmodel_moe": "qwen3_moe_debug",
}


@dataclass(frozen=True)
class Configuration:
    """What one of graph_trainer's tests trains.

    Args:
        name: of the test; of several that one test trains, with the option in which they differ.
        options: of graph_trainer's command line.
        num_ranks: how many processes it asks for.
        is_disabled: whether upstream does not run it itself.
    """

    name: str
    options: tuple[str, ...]
    num_ranks: int
    is_disabled: bool

    @property
    def eager_options(self) -> tuple[str, ...]:
        """The options with which torchtitan's eager trainer, which shards with FSDP2, trains the same."""
        module, config = (self.options[self.options.index(name) + 1] for name in ("--module", "--config"))
        config = config.removeprefix("graph_trainer_")
        others = [
            option for name, *values in _grouped(self.options) for option in (name, *values) if _is_eagers(name)
        ]
        return (
            "--module",
            module.removeprefix("graph_trainer."),
            "--config",
            _EAGER.get(config, config),
            *others,
        )

    @property
    def chunks(self) -> tuple[str, str] | None:
        """Which modules run on two chunks, and of which dim; None if none do."""
        if "--compile.ep_overlap.enabled" not in self.options:
            return None
        return self._value("--compile.ep_overlap.module_fqn"), self._value("--compile.ep_overlap.chunk_dim")

    @property
    def is_compiled(self) -> bool:
        """Whether Inductor compiles the whole step, and may round otherwise."""
        return self._value("--compile.inductor_compilation") == "full"

    def _value(self, name: str) -> str:
        """Returns the value of an option; ``""`` where it is not there."""
        values = {option: value for option, *value in _grouped(self.options)}
        return " ".join(values.get(name, ()))


def configurations() -> list[Configuration]:
    """Returns what graph_trainer's integration tests train, and what its numerics tests compare with eager.

    Of a test that starts several trainers one after another, the first. What several tests train is there once.
    """
    found: dict[tuple[object, ...], Configuration] = {}
    for each in (*_integration(), *_numerics()):
        found.setdefault((*sorted(_grouped(each.options)), each.num_ranks), each)
    names = Counter(each.name for each in found.values())
    return [
        each if names[each.name] == 1 else replace(each, name=f"{each.name} {each.options[-1]}")
        for each in found.values()
    ]


def _integration() -> Iterator[Configuration]:
    with _definitions():
        tests = _imported("integration_tests")
    suites = (
        tests.build_graph_trainer_test_list,
        tests.build_graph_trainer_h100_test_list,
        tests.build_graph_trainer_autoparallel_test_list,
        tests.build_graph_trainer_autoparallel_h100_test_list,
    )
    for each in (each for suite in suites for each in suite()):
        options = tuple(shlex.split(" ".join(each.override_args[0])))
        yield Configuration(each.test_name or each.test_descr, _split(options), each.ngpu, each.disabled)


def _numerics() -> Iterator[Configuration]:
    tests = _imported("test_numerics")
    calls: list[dict[str, Any]] = []

    def record(**options: Any) -> bool:
        calls.append(options)
        return True

    def record_pipeline(schedule: str) -> bool:
        options = f"{tests.GRAPH_PP_DSV3_TEST_PARALLELISM} --parallelism.pipeline_parallel_schedule={schedule}"
        config = "graph_trainer_deepseek_v3_debugmodel"
        return record(test_module="graph_trainer.deepseek_v3", test_config=config, test_options=options)

    recorded = dict.fromkeys(("run_loss_compare", "run_loss_compare_close"), record)
    recorded["_run_graph_pp_deepseek_v3_loss_compare"] = record_pipeline
    with mock.patch.multiple(tests, **recorded):
        for case in (tests.TestGraphTrainerNumerics, tests.TestGraphTrainerAutoParallelNumerics):
            for name in unittest.TestLoader().getTestCaseNames(case):
                test = getattr(case, name)
                inspect.unwrap(test)(case(name))
                for call in calls:
                    options = shlex.split(call["test_options"])
                    names = ("--module", call["test_module"], "--config", call["test_config"])
                    is_disabled = getattr(test, "__unittest_skip__", False)
                    yield Configuration(name, _split((*names, *options)), call.get("test_ngpus", 8), is_disabled)
                calls.clear()


def _imported(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own testing modules warn when they are imported
        return importlib.import_module(f"torchtitan.experiments.graph_trainer.tests.{name}")


@contextmanager
def _definitions() -> Iterator[None]:
    """Lets graph_trainer's tests import what torchtitan's wheel leaves out: the form of a test, and its runner."""

    @dataclass
    class OverrideDefinitions:
        override_args: list[list[str]]
        test_descr: str = ""
        test_name: str = ""
        ngpu: int = 4
        disabled: bool = False
        skip_rocm_test: bool = False

    tests: Any = ModuleType("tests.integration_tests")
    tests.OverrideDefinitions = OverrideDefinitions
    runner: Any = ModuleType("tests.integration_tests.run_tests")
    runner.run_tests = None
    with mock.patch.dict(sys.modules, {each.__name__: each for each in (tests, runner)}):
        yield


def _split(options: tuple[str, ...]) -> tuple[str, ...]:
    """``--name=value`` as two."""
    return tuple(part for option in options for part in option.split("=", 1))


def _grouped(options: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Each option with its values."""
    groups: list[tuple[str, ...]] = []
    for option in options:
        if option.startswith("--"):
            groups.append((option,))
        else:
            groups[-1] += (option,)
    return groups


def _is_eagers(name: str) -> bool:
    return name not in ("--module", "--config") and not name.startswith("--compile.")

"""Whose code it is: installed in the ways in which people install, and code that raises while it is looked at."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import nn

from graphpasses.capture import capture_train_step
from graphpasses.errors import CaptureError
from graphpasses.state import origin

X = torch.ones(2, 4)
PACKAGE = """
    SCALE, KINDS, GENERIC = 1.0, {"list": list[int]}, list[int]

    def __getattr__(name):
        raise RuntimeError(f"{name} is loaded lazily")

    class Settings:
        @property
        def scale(self):
            raise RuntimeError("not now")

    SETTINGS = Settings()

    def scaled(y):
        return y * SCALE if KINDS and GENERIC else getattr(SETTINGS, "scale")
"""
SITE = "lib/python3.11/site-packages"
# Where package and metadata lie, which metadata these are, and whether the code is the user's.
KINDS = {
    "a virtual environment over this one": (f"venv/{SITE}", f"venv/{SITE}", "dist-info", False),
    "--target": ("target", "target", "dist-info", False),
    "the user's site": (f".local/{SITE}", f".local/{SITE}", "dist-info", False),
    "Debian's": ("dist-packages", "dist-packages", "egg-info", False),
    "editable": ("source", f"venv/{SITE}", "dist-info", True),
    "editable, run in its tree": ("source", "source", "egg-info", True),
    "PYTHONPATH": ("source", "", "", True),
}


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    before = list(sys.path)
    yield
    sys.path[:] = before
    origin._LIBRARIES.clear()
    for each in (origin._is_users, origin._folders, origin._distributions):
        each.cache_clear()


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_installation(kind: str, tmp_path: Path) -> None:
    folder, site, metadata, is_users = KINDS[kind]
    name = f"widgets_{[*KINDS].index(kind)}"
    for each in filter(None, dict.fromkeys((folder, site))):
        (tmp_path / each).mkdir(parents=True)
        sys.path.insert(0, str(tmp_path / each))
    (tmp_path / folder / f"{name}.py").write_text(dedent(PACKAGE))
    if metadata:
        info = tmp_path / site / f"{name}-1.0.{metadata}"
        info.mkdir()
        (info / ("METADATA" if metadata == "dist-info" else "PKG-INFO")).write_text(f"Name: {name}\nVersion: 1.0\n")
        (info / "top_level.txt").write_text(name)
        if metadata == "dist-info":
            (info / "RECORD").write_text(f"{name}.py,,\n")
    importlib.invalidate_caches()
    for cached in (origin._is_users, origin._folders, origin._distributions):
        cached.cache_clear()
    package = importlib.import_module(name)
    assert origin.is_users(package.scaled) is origin.is_users_module(package) is is_users
    model = nn.Linear(4, 4)
    step = capture_train_step(lambda model, x: package.scaled(model(x)).mean(), model, X, recapture=False)
    step(X)
    package.SCALE = 2.0
    if is_users:
        with pytest.raises(CaptureError, match=r"^'SCALE' was 1\.0 when the step was captured, and is 2\.0 now"):
            step(X)
    else:
        step(X)


SCRIPT = """
    import torch
    from torch import nn

    import graphpasses
    from graphpasses.errors import CaptureError

    SCALE = 1.0

    def loss_fn(model, x):
        return nn.functional.mse_loss(model(x) * torch.ops.aten.relu(x), x) * SCALE

    class Model(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.act = torch.nn.functional.gelu

        def forward(self, x):
            return self.act(super().forward(x))

    step = graphpasses.capture_train_step(loss_fn, Model(), torch.ones(2, 4), recapture=False)
    step(torch.ones(2, 4))
    SCALE = 2.0
    try:
        step(torch.ones(2, 4))
    except CaptureError as error:
        print(torch.__file__, error)
"""


def test_torch_from_a_source_tree(tmp_path: Path) -> None:
    """Without metadata torch's code would pass for the user's, and it raises while it is looked at."""
    site = Path(sysconfig.get_path("purelib"))
    (tmp_path / "rest").mkdir()
    (tmp_path / "source").mkdir()
    for each in site.iterdir():
        is_torch = each.name in ("torch", "torchgen", "functorch")
        if not each.name.startswith("torch-") and each.suffix != ".pth":
            (tmp_path / ("source" if is_torch else "rest") / each.name).symlink_to(each)
    paths = [str(tmp_path / "source"), str(tmp_path / "rest"), str(Path(__file__).parents[2])]
    python = getattr(sys, "_base_executable", sys.executable)
    ran = subprocess.run(
        [python, "-c", dedent(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(f"{tmp_path / 'source' / 'torch'}"), ran.stdout
    assert "'SCALE' was 1.0 when the step was captured, and is 2.0 now" in ran.stdout


class Point(NamedTuple):
    x: float


def test_the_constructor_of_a_named_tuple_is_pythons() -> None:
    assert not origin.is_users(Point.__new__)  # else all objects of the process are searched for its functions
    exec("def mine(): ...", made := {"__name__": "mine"})
    assert origin.is_users(made["mine"])


def test_modules_of_the_user_are_found_each_time() -> None:
    """Those of libraries are remembered, the user's not: one may come, and another may have its name."""
    first, second = (ModuleType("mine_of_this_test") for _ in range(2))
    for module in (first, second):
        module.__file__ = "/home/me/mine_of_this_test.py"
        sys.modules[module.__name__] = module
        found = [*origin.users_modules()]
        assert module in found
        assert torch not in found
        assert torch in origin._LIBRARIES
    assert first not in found
    del sys.modules[first.__name__]

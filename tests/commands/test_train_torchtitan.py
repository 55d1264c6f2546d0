"""What the command refuses before it imports torchtitan."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from graphpasses.commands.train_torchtitan import main


@pytest.mark.parametrize("arguments", [["--any-expert-degree"], ["--canonical", "--chunks", "layers.*", "batch"]])
def test_options_that_do_not_go_together(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert "error: " in capsys.readouterr().err


def test_a_torch_too_old_for_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.delattr(dist, "set_timeout", raising=False)
    with pytest.raises(SystemExit):
        main([])
    assert "on a GPU torchtitan 0.3.0 needs torch 2.14 or newer" in capsys.readouterr().err

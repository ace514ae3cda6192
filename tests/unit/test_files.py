"""Checkpoint files are whole or not there."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_chimera.files import WholeFiles


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_save_that_fails_leaves_what_was_there_and_no_part(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: BaseException
) -> None:
    path = tmp_path / "last.ckpt"
    WholeFiles().save_checkpoint({"global_step": 1}, path)

    def write(_checkpoint: Any, file: Any) -> None:
        file.write(b"half of it")
        raise error

    monkeypatch.setattr(torch, "save", write)
    with pytest.raises(type(error)):
        WholeFiles().save_checkpoint({"global_step": 2}, path)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert torch.load(path, weights_only=True) == {"global_step": 1}

"""Checkpoint files that are either whole or not there, and the newest of them."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from typing_extensions import override


class WholeFiles(TorchCheckpointIO):
    """Writes a local file beside its place and renames it, so that a run that is killed leaves no half of one.

    Lightning's own goes by the folder for temporary files; from another disk a file is copied, not renamed.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.part")
        try:
            with part.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        except BaseException:
            with suppress(OSError):
                part.unlink()  # which would keep the last bytes of a full disk
            raise


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint in a folder, or below it, that was written last."""
    files = [path for path in folder.rglob("*.ckpt") if path.is_file()]
    return max(files, key=lambda path: (path.stat().st_mtime_ns, path.name), default=None)

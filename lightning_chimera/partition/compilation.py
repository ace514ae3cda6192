"""Compiles the blocks of this rank's stages, each by itself and in its place."""

import os
import shutil
from collections.abc import Iterable

import torch
from torch import nn

_COMPILERS = ("g++", "clang++")


def check_compile_blocks(compile_blocks: bool | str) -> str | None:
    """The backend to compile with, if blocks are to be compiled.

    Raises:
        ValueError: There is no such backend.
    """
    if compile_blocks is False or compile_blocks is None:
        return None
    if compile_blocks is True:
        return "inductor"
    known = torch._dynamo.list_backends(exclude_tags=())
    if compile_blocks not in known:
        raise ValueError(
            f"compile_blocks={compile_blocks!r}: give True to compile the blocks by inductor, or the name of a backend"
            f" of torch.compile: {', '.join(known)}."
        )
    return compile_blocks


def check_compiler(backend: str | None, device: torch.device) -> None:
    """Refuses inductor on a CPU without a compiler of C++, which it would only find missing in the first step.

    Raises:
        RuntimeError: There is none.
    """
    wanted = (os.environ.get("CXX") or "", *_COMPILERS)
    if backend == "inductor" and device.type == "cpu" and not any(name and shutil.which(name) for name in wanted):
        raise RuntimeError(
            "compile_blocks=True compiles by inductor, which needs a compiler of C++ on the CPU, and there is none on"
            f" this machine ({', '.join(_COMPILERS)}, or what CXX names). Install one, or leave compile_blocks out."
        )


def check_whole_backward(schedule: str, *, is_split: bool, is_compiled: bool) -> None:
    """Refuses compiled blocks where the backward is split inside of them.

    Raises:
        ValueError: It is.
    """
    if is_compiled and is_split:
        raise ValueError(
            f"compile_blocks, or blocks that are compiled already, with the schedule {schedule!r}: it splits the"
            " backward at the linear layers inside of blocks, which a compiled block does not have any more. Leave"
            " compiling out, or use a schedule with whole backwards (chimera, 1f1b, gpipe, interleaved, ...)."
        )


def is_compiled(block: nn.Module) -> bool:
    """Whether a block runs compiled."""
    return block._compiled_call_impl is not None or type(block).__name__ == "OptimizedModule"


class CompiledBlocks:
    """Blocks that run compiled until they are released; names, hooks and parameters stay as they are.

    Args:
        blocks: The blocks. One that was compiled before stays as it is.
        backend: The backend of torch.compile; ``None`` compiles nothing.
    """

    def __init__(self, blocks: Iterable[nn.Module], backend: str | None) -> None:
        self._blocks = [block for block in blocks if backend is not None and not is_compiled(block)]
        for block in self._blocks:
            block.compile(backend=backend)

    def release(self) -> None:
        """Has the blocks run as they did before."""
        for block in self._blocks:
            block._compiled_call_impl = None
        self._blocks = []

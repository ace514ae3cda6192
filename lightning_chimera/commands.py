"""What runs this program once more, for the other ranks of its node."""

import os
import sys
from collections.abc import Sequence
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.imports import _IS_INTERACTIVE


def check_system(num_ranks: int) -> None:
    """Refuses a run of several processes where they could not look after each other.

    Raises:
        MisconfigurationException: This is not Linux.
    """
    if num_ranks > 1 and sys.platform != "linux":
        raise MisconfigurationException(
            f"A run of {num_ranks} processes needs Linux, by whose means ranks hand over and look after each other, and"
            f" this is {sys.platform!r}. Here a single process trains (devices=1, with a schedule such as '1f1b'), and"
            " `lightning-chimera` shows schedules."
        )


def check_session(start_method: str, num_processes: int) -> None:
    """Refuses to start ranks from a notebook or a prompt but by a fork.

    Raises:
        MisconfigurationException: They are to be started otherwise.
    """
    if _IS_INTERACTIVE and start_method != "fork" and (start_method != "popen" or num_processes > 1):
        raise MisconfigurationException(
            f"start_method={start_method!r} starts ranks that find what they need in a script, and this is a notebook"
            " or an interactive Python. Here use Trainer(strategy=lightning_chimera.ChimeraStrategy("
            f"start_method='fork'), devices={num_processes})."
        )


def check_program() -> None:
    """Refuses a program that can't be run once more.

    Raises:
        MisconfigurationException: It is no file and no module.
    """
    if _program() is None:
        raise MisconfigurationException(
            "start_method='popen' runs this program once more for each other rank, and there is no file of it: it was"
            " started with python -c, or came through a pipe. Put it into a file, or use"
            " ChimeraStrategy(start_method='fork')."
        )


def name_of_job() -> str | None:
    """The job of a Hydra sweep that runs in this process now; ``None`` outside of sweeps."""
    hydra_config = sys.modules.get("hydra.core.hydra_config")
    if hydra_config is None or not hydra_config.HydraConfig.initialized():
        return None
    config = hydra_config.HydraConfig.get()
    return str(config.runtime.output_dir) if config.mode is not None and config.mode.name == "MULTIRUN" else None


def command(local_rank: int) -> tuple[list[str], str | None]:
    """What runs this program once more for another rank, and where."""
    program = _program()
    assert program is not None
    hydra_config = sys.modules.get("hydra.core.hydra_config")
    if hydra_config is None or not hydra_config.HydraConfig.initialized():
        return [sys.executable, *program, *sys.argv[1:]], None
    from hydra.utils import get_original_cwd

    config = hydra_config.HydraConfig.get()
    return [
        sys.executable,
        *program,
        *_arguments(sys.argv[1:], config),
        f'hydra.run.dir="{config.runtime.output_dir}"',
        f"hydra.job.name=train_ddp_process_{local_rank}",
        "hydra.output_subdir=null",
        "hydra.mode=RUN",  # also where the config itself asks for a sweep
    ], get_original_cwd()


def _program() -> list[str] | None:
    """This program as Python takes it: the path of a script, or a module; ``None`` if it is neither."""
    main = sys.modules["__main__"]
    module, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    started = os.path.abspath(sys.argv[0])
    if module is None:  # Python has made the path absolute; sys.argv[0] may be relative to an earlier folder
        return [os.path.abspath(path)] if path is not None and os.path.isfile(path) else None
    if module.name == "__main__":  # a folder or an archive
        return [started]
    if os.path.isfile(started) and started != module.origin:  # a script under another program, as in python -m cProfile
        return [started]
    return ["-m", module.name.removesuffix(".__main__")]


def _arguments(given: Sequence[str], config: Any) -> list[str]:
    """The arguments of a Hydra script for one job: in a sweep those of its own, instead of all."""
    if name_of_job() is None:
        return list(given)
    from hydra._internal.utils import get_args_parser

    swept = set(get_args_parser().parse_args(list(given)).overrides)
    kept = [argument for argument in given if argument not in swept and argument not in ("-m", "--multirun")]
    own = [override for override in config.overrides.hydra if not override.startswith(("hydra.mode=", "hydra.sweep"))]
    return [*kept, *own, *config.overrides.task]

"""The end of a run that a signal asks for: agreed on, saved, requeued where that is wanted, and left by all alike."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.distributed import ProcessGroup

from lightning_chimera import slurm
from lightning_chimera.signals import Interrupted, Signals

_FILE = "interrupted.ckpt"
"""Where a run that is not requeued is saved, in the Trainer's ``default_root_dir``."""

_REQUEUED_FILES = "hpc_ckpt_*.ckpt"
"""Where a job that is requeued is saved there; Lightning resumes from them if no other checkpoint is given."""


class Interruption:
    """The signals that have come to any rank, on which all act together.

    Args:
        environment: Where the processes have been started.
        saves: Whether the last step is saved though the job is not requeued.
    """

    def __init__(self, environment: ClusterEnvironment | None, *, saves: bool) -> None:
        self._requeue: signal.Signals | None = None
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            self._requeue = environment.requeue_signal
        self._saves = saves
        self._signals = Signals(self._requeue)
        self._told: signal.Signals | None = None

    def begin(self, trainer: Trainer) -> None:
        """Takes the signals, at the start of a run."""
        self._told = None
        self._signals.install(trainer)

    def check_resumed(self, trainer: Trainer) -> None:
        """Warns of a requeued job that goes on from an older checkpoint than the one that it has saved itself."""
        folder, path = str(trainer.default_root_dir), str(trainer.ckpt_path or "")
        if self._requeue is None or not path or trainer.state.fn != TrainerFn.FITTING or "://" in folder + path:
            return
        given = os.path.getmtime(path)
        newer = [file for file in Path(folder).glob(_REQUEUED_FILES) if file.stat().st_mtime > given]
        if newer:
            rank_zero_warn(
                f"{newer[0]} was saved when a job was requeued, and this one goes on from the older ckpt_path={path!r}:"
                " what was trained in between is lost. Give ckpt_path=None where SLURM_RESTART_COUNT is set, so that"
                " Lightning finds that file; a job that is to begin with another one needs another default_root_dir."
            )

    def end(self, *, deliver: bool) -> None:
        """Gives the signals back.

        Args:
            deliver: Whether one that was noted, but not acted on, is sent again.
        """
        self._signals.remove(deliver=deliver)

    def agree(self, decision: bool, group: ProcessGroup) -> bool:
        """Whether something holds on any rank of a group; notes the signals that have come to any as well."""
        votes = torch.tensor([int(decision), *self._signals.received])
        dist.all_reduce(votes, group=group)
        decided, *received = votes.tolist()
        self._told = self._signals.take(received) or self._told
        return bool(decided)

    def act(self, trainer: Trainer, of_rank_zero: Callable[[Any], Any]) -> None:
        """Ends the run if a signal asks for it. Every rank calls it, after the same batch.

        Args:
            trainer: The Trainer.
            of_rank_zero: The value of global rank 0.

        Raises:
            Interrupted: A signal has come to a rank.
        """
        if self._told is not None:
            requeues = self._requeue is not None and self._told in (self._requeue, signal.SIGTERM)
            _interrupt(trainer, self._told, requeues=requeues, saves=self._saves, of_rank_zero=of_rank_zero)


def _interrupt(
    trainer: Trainer, kind: signal.Signals, *, requeues: bool, saves: bool, of_rank_zero: Callable[[Any], Any]
) -> NoReturn:
    rank_zero_info(f"{kind.name} ends the run after step {trainer.global_step}.")
    if (requeues or saves) and trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
        _save(trainer, requeues=requeues)
    for logger in trainer.loggers:
        logger.save()
    trainer._signal_connector.received_sigterm = kind == signal.SIGTERM  # for callbacks that ask the Trainer
    code = 128 + kind
    if requeues:
        outcome = of_rank_zero(_requeue(kind) if trainer.is_global_zero else None)
        rank_zero_info(outcome)
        if outcome == _REQUEUED:
            code = 0
    raise Interrupted(kind, code)


_REQUEUED = "The job has been requeued, and this run ends."


def _requeue(kind: signal.Signals) -> str:
    """Requeues the job, and says what came of it."""
    try:
        # Slurm sends SIGTERM to a job that is preempted, and also to one that is cancelled or has been requeued.
        if kind == signal.SIGTERM and not slurm.is_running():
            return "The job is not requeued, since Slurm has ended it by itself."
        slurm.requeue()
    except RuntimeError as error:
        return f"The job could not be requeued, and this run ends: {error}"
    return _REQUEUED


def _save(trainer: Trainer, *, requeues: bool) -> None:
    """Saves where the next run of this job looks, and removes what an earlier run of it has saved there."""
    folder = str(trainer.default_root_dir)
    path = trainer._checkpoint_connector.hpc_save_path(folder) if requeues else os.path.join(folder, _FILE)
    trainer.save_checkpoint(path)
    rank_zero_info(f"Saved step {trainer.global_step} to {path}")
    if trainer.is_global_zero and requeues and "://" not in folder:
        for old in Path(folder).glob(_REQUEUED_FILES):
            if old != Path(path):
                try:
                    old.unlink()
                except OSError as error:
                    rank_zero_warn(f"{old} could not be removed: {error}")

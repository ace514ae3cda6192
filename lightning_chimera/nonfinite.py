"""Losses and gradients that are not finite: all ranks raise, or skip the step, alike.

Whether they are is known from the loss, which every rank has, and from one look at the gradients before the optimizer's
step. Where it began is noted on the way: one sum of each tensor that leaves a stage, read only if it is asked for.
"""

import math
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_chimera.engine import Engine
from lightning_chimera.schedules import Kind

Nonfinite = Literal["ignore", "raise", "skip"]


class _Place(NamedTuple):
    """Where a tensor left a stage; the least of all places is where it began.

    Attributes:
        batch: Number of the batch in its accumulation window.
        is_backward: Whether it is a gradient.
        microbatch: Its microbatch.
        order: Of the stages that it passes, which this one is.
        stage: The stage.
        rank: The global rank.
        replica: The replica of the pipeline.
    """

    batch: int
    is_backward: bool
    microbatch: int
    order: int
    stage: int
    rank: int
    replica: int


class NonfiniteGuard:
    """Looks at the losses and gradients of one fit; every rank has one.

    Args:
        mode: ``raise`` or ``skip``.
        engine: The stages on this rank.
        scales: Whether a scaler looks at the gradients already, and skips a step if they overflow.
    """

    def __init__(self, mode: Literal["raise", "skip"], engine: Engine, *, scales: bool) -> None:
        self._mode = mode
        self._engine = engine
        self._scales = scales
        self._sums: list[tuple[_Place, Tensor]] = []
        self._batch = 0
        self._losses: list[float] = []
        engine.pipeline.look = self._look

    def _look(self, kind: Kind, stage: int, microbatch: int, tensor: Tensor) -> None:
        """Notes the sum of what leaves a stage: it is finite where all entries are."""
        topology, is_backward = self._engine.topology, kind is not Kind.FORWARD
        order = -stage if is_backward else stage
        place = _Place(self._batch, is_backward, microbatch, order, stage, topology.global_rank, topology.replica)
        self._sums.append((place, tensor.detach().sum(dtype=torch.promote_types(tensor.dtype, torch.float32))))

    def after_step(self, loss: Any, step: int) -> None:
        """Looks at the loss of a batch, which is the same on every rank.

        Raises:
            FloatingPointError: It is not finite, and that is to be an error.
        """
        self._batch += 1
        value = float(loss) if isinstance(loss, Tensor) else 0.0
        if math.isfinite(value):
            return
        self._losses.append(value)
        if self._mode == "raise":
            raise FloatingPointError(self._say(f"The loss of a batch after step {step} is {value}.", []))

    def before_optimizer(self, step: int) -> None:
        """Looks at the gradients when they are whole, and takes them away if the step is to be skipped.

        Raises:
            FloatingPointError: They are not finite, and that is to be an error.
        """
        gradients = [parameter.grad for parameter in self._engine.ownership.held() if parameter.grad is not None]
        here = not self._scales and not _are_finite(gradients)
        anywhere = torch.tensor(int(here))
        if not self._scales:
            dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=self._engine.groups.world)
        if anywhere or self._losses:
            named = dict(self._engine.module.named_parameters())
            spoiled = _spoiled(named) if here else []
            what = "The gradients" if anywhere else f"The loss ({self._losses[0]})"
            said = self._say(f"{what} of the step after step {step} {'are' if anywhere else 'is'} not finite.", spoiled)
            if self._mode == "raise":
                raise FloatingPointError(said)
            if not self._scales:  # a scaler must see them
                rank_zero_warn(f"{said} The step is skipped on all ranks.")
                for parameter in named.values():
                    parameter.grad = None
        self._sums, self._losses, self._batch = [], [], 0

    def _say(self, what: str, spoiled: list[str]) -> str:
        """Says where it began; every rank must call it."""
        own = min((place for place, total in self._sums if not total.isfinite()), default=None)
        gathered: list[Any] = [None] * self._engine.topology.world_size
        dist.all_gather_object(gathered, (own, spoiled[-1:]), group=self._engine.groups.world)
        first = min((place for place, _ in gathered if place is not None), default=None)
        order = [name for name, _ in self._engine.module.named_parameters()]
        names = [(order.index(name), rank, name) for rank, (_, names) in enumerate(gathered) for name in names]
        if first is not None:
            noun = "the gradient that left" if first.is_backward else "what left"
            return (
                f"{what} It began in {noun} stage {first.stage} (global rank {first.rank}) for microbatch"
                f" {first.microbatch} of replica {first.replica}, in batch {first.batch} of those of this step."
            )
        if names:
            _, rank, name = max(names)  # the last one, where a backward comes first
            return f"{what} What left the stages was finite; the gradient of {name!r} (global rank {rank}) is not."
        return f"{what} What left the stages, and all gradients, are finite: no label of the batch counts, perhaps."


def _are_finite(gradients: list[Tensor]) -> bool:
    """Whether all entries are finite, which is read from the device once."""
    if not gradients:
        return True
    # A norm is finite only where all entries are, and costs a fraction of a look at each. That of large ones overflows.
    norms = torch._foreach_norm(gradients)
    return bool(torch.stack([norm.float() for norm in norms]).sum().isfinite()) or all(map(_is_finite, gradients))


def _is_finite(gradient: Tensor) -> bool:
    return bool(torch.linalg.vector_norm(gradient, float("inf")).isfinite())


def _spoiled(named: dict[str, torch.nn.Parameter]) -> list[str]:
    """The names of the parameters on this rank whose gradients are not finite."""
    held = ((name, parameter.grad) for name, parameter in named.items() if not parameter.is_meta)
    return [name for name, gradient in held if gradient is not None and not _is_finite(gradient)]

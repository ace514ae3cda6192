"""One pipeline group at work: trains and evaluates batches by a schedule."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_chimera.partition.stage import HeadCall, Passage, StageRunner
from lightning_chimera.runtime.executor import Executor, Incoming
from lightning_chimera.runtime.links import Boundary, Links
from lightning_chimera.runtime.microbatches import Microbatch
from lightning_chimera.runtime.randomness import keyed, mix, reseed
from lightning_chimera.schedules import Action, Lowered, Schedule, forward_only, lower


@dataclass(frozen=True)
class Call:
    """How to call the user's step.

    Attributes:
        step: Takes the rows of one microbatch.
        context: Entered around each forward (autocast).
        key: What the random draws of this batch depend on.
    """

    step: Callable[[Any], Any]
    context: Callable[[], AbstractContextManager[Any]]
    key: tuple[int, ...]


@dataclass(frozen=True)
class TrainingCall(Call):
    """How to call the training step, and what to do with its result.

    Attributes:
        finish: Given the microbatch's number, the step's result and the head's call, returns the loss to run backward
            from; ``None`` for a microbatch that counts nothing.
        backward: Runs backward from a loss.
    """

    finish: Callable[[int, Any, HeadCall], Tensor | None]
    backward: Callable[[Tensor], None]


class Pipeline:
    """The stages of this rank, their messages, and the schedules for every number of microbatches.

    Args:
        runner: Runs a stage.
        links: Sends and receives.
        position: This rank's place in the schedules.
        build: Makes the training schedule for a number of microbatches.
        seed: What all random draws depend on.
    """

    def __init__(
        self, runner: StageRunner, links: Links, position: int, build: Callable[[int], Schedule], seed: tuple[int, ...]
    ) -> None:
        self._runner = runner
        self._build = build
        self._position = position
        self._executor = Executor(links, position)
        self._seed = seed
        self._boundaries: dict[tuple[Any, ...], Boundary] = {}
        self._training: dict[int, Lowered] = {}
        self._evaluation: dict[int, Lowered] = {}
        self.peak_activations = 0
        """Most stage activations held at one time in the last training step."""

    @property
    def executor(self) -> Executor:
        """Runs the rows; it knows when the actions of the last one ran."""
        return self._executor

    def schedule(self, num_microbatches: int) -> Schedule:
        """The training schedule for a number of microbatches."""
        return self._lowered(num_microbatches).schedule

    def train(self, microbatches: Sequence[Microbatch], call: TrainingCall) -> None:
        """Runs forward and backward of all microbatches; gradients are added to ``.grad`` of this rank's parameters."""
        work = _Training(self._runner, self._boundaries, microbatches, self._seed, call)
        self._executor.run(self._lowered(len(microbatches)).rows[self._position], work)
        self.peak_activations = work.peak

    def evaluate(self, batch: Any, microbatches: Sequence[Microbatch], call: Call) -> Any:
        """Runs the user's step once on the whole batch, the model's stages in microbatches.

        Returns:
            The step's result on the rank of the last stage, ``None`` elsewhere.
        """
        count = len(microbatches)
        if count not in self._evaluation:
            self._evaluation[count] = lower(forward_only(self._runner.num_stages, count))
        work = _Evaluation(self._runner, self._boundaries, microbatches, self._seed, call, batch=batch)
        self._executor.run(self._evaluation[count].rows[self._position], work)
        return work.result

    def _lowered(self, num_microbatches: int) -> Lowered:
        if num_microbatches not in self._training:
            self._training[num_microbatches] = lower(self._build(num_microbatches))
        return self._training[num_microbatches]


@dataclass
class _Passes:
    """Passes of microbatches through stages: what training and evaluation have in common."""

    runner: StageRunner
    boundaries: dict[tuple[Any, ...], Boundary]
    microbatches: Sequence[Microbatch]
    seed: tuple[int, ...]
    call: Call

    def __post_init__(self) -> None:
        self.signatures = [microbatch.signature() for microbatch in self.microbatches]

    def boundary(self, microbatch: int) -> Boundary | None:
        """Shape and type of a microbatch's boundary tensors, once a batch of the same shapes has been seen."""
        return self.boundaries.get(self.signatures[microbatch])

    def settle(self, microbatch: int, shape: torch.Size) -> Boundary:
        """Notes the boundary of a microbatch as the model sees it.

        Raises:
            RuntimeError: A microbatch of the same shapes had another one, which the other ranks still expect.
        """
        seen = Boundary(shape, self.runner.anatomy.dtype)
        known = self.boundaries.setdefault(self.signatures[microbatch], seen)
        if known != seen:
            raise RuntimeError(
                f"The model's input gives hidden states of {tuple(seen.shape)} {seen.dtype}, but a batch of the same"
                f" shapes gave {tuple(known.shape)} {known.dtype} before. What the step hands to the model must follow"
                " from the shapes of the batch: crop or pad in the data loader, not in the step."
            )
        return seen

    def run(self, stage: int, number: int, data: Any, receive: Any, on_shape: Any) -> Passage:
        """One pass under its own random draws."""
        key = (*self.seed, *self.call.key, number)
        with keyed(*key), self.call.context():
            return self.runner.run(
                stage,
                lambda: self.call.step(data),
                receive=receive,
                reseed=lambda layer: reseed(mix(*key), layer),
                on_shape=on_shape,
            )


@dataclass
class _Training(_Passes):
    """The work of a training step."""

    call: TrainingCall
    held: dict[tuple[int, int], tuple[Tensor | None, Tensor | None]] = field(default_factory=dict)
    """By stage and microbatch: what entered, and what backward runs from."""
    peak: int = 0

    def forward(self, action: Action, incoming: Incoming) -> Tensor | None:
        """Runs a stage and keeps what its backward needs."""
        number = action.microbatch

        def receive(shape: torch.Size, dtype: torch.dtype) -> Tensor:
            return incoming(Boundary(shape, dtype)).requires_grad_()

        passage = self.run(
            action.stage, number, self.microbatches[number].data, receive, lambda shape: self.settle(number, shape)
        )
        is_last = action.stage == self.runner.num_stages - 1
        left = self.call.finish(number, passage.left, passage.head) if is_last else passage.left
        self.held[action.stage, number] = (passage.entered, left)
        self.peak = max(self.peak, len(self.held))
        return None if is_last else left

    def backward(self, action: Action, incoming: Incoming) -> Tensor | None:
        """Runs the backward of a stage."""
        entered, left = self.held.pop((action.stage, action.microbatch))
        if action.stage == self.runner.num_stages - 1:
            if left is not None:
                self.call.backward(left)
        else:
            boundary = self.boundary(action.microbatch)
            assert boundary is not None
            assert left is not None
            gradient = incoming(boundary)
            if left.requires_grad:  # not where all before is frozen; the gradient is sent all the same
                torch.autograd.backward(left, gradient)
        if entered is None:
            return None
        return torch.zeros_like(entered) if entered.grad is None else entered.grad


@dataclass
class _Evaluation(_Passes):
    """The work of an evaluated batch: the last stage waits for all microbatches and runs the user's step once."""

    batch: Any = None
    result: Any = None
    waiting: list[Incoming] = field(default_factory=list)

    def forward(self, action: Action, incoming: Incoming) -> Tensor | None:
        """Runs a stage on one microbatch, or the last stage on the whole batch."""
        number = action.microbatch
        if action.stage < self.runner.num_stages - 1:
            passage = self.run(
                action.stage,
                number,
                self.microbatches[number].data,
                lambda shape, dtype: incoming(Boundary(shape, dtype)),
                lambda shape: self.settle(number, shape),
            )
            assert isinstance(passage.left, Tensor)
            return passage.left
        self.waiting.append(incoming)
        if len(self.waiting) == len(self.microbatches):
            self.result = self.run(action.stage, -1, self.batch, self._join, lambda _shape: None).left
        return None

    def backward(self, action: Action, incoming: Incoming) -> Tensor | None:
        """Never called: there is no backward in a forward-only schedule."""
        raise AssertionError(action, incoming)

    def _join(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Receives the hidden states of all microbatches as those of one batch."""
        rows = sum(microbatch.rows for microbatch in self.microbatches)
        parts = []
        for number, (microbatch, incoming) in enumerate(zip(self.microbatches, self.waiting, strict=True)):
            part = self.settle(number, torch.Size((shape[0] * microbatch.rows // rows, *shape[1:])))
            parts.append(incoming(part._replace(dtype=dtype)))
        return torch.cat(parts)

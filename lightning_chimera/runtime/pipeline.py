"""One pipeline group at work: trains and evaluates batches by a schedule."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_chimera.partition.heads import Scales
from lightning_chimera.partition.stage import HeadCall, Part, StageRunner
from lightning_chimera.runtime.executor import Executor, Incoming
from lightning_chimera.runtime.links import Boundary, Links
from lightning_chimera.runtime.microbatches import Microbatch, cut, row_ranges
from lightning_chimera.runtime.randomness import keyed, mix, reseed
from lightning_chimera.schedules import Action, Lowered, Schedule, forward_only, lower
from lightning_chimera.timeline import Span


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
        scales: What each term of a microbatch's loss counts for, if its head has several.
        finish: Given the microbatch's number, the step's result and the head's call, returns the loss to run backward
            from; ``None`` for a microbatch that counts nothing.
        backward: Runs backward from a loss.
    """

    scales: Callable[[int], Scales | None]
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
        self.spans: list[Span] = []
        """When the actions of the last training step ran."""
        self.peak_activations = 0
        """Most stage activations held at one time in the last training step."""

    def train(self, microbatches: Sequence[Microbatch], call: TrainingCall) -> None:
        """Runs forward and backward of all microbatches; gradients are added to ``.grad`` of this rank's parameters."""
        work = _Training(self._runner, self._boundaries, microbatches, self._seed, call)
        self._executor.run(self._lowered(len(microbatches)).rows[self._position], work)
        self.spans = self._executor.spans
        self.peak_activations = work.peak

    def evaluate(self, batch: Any, call: Call, num_microbatches: int) -> Any:
        """Runs the user's step once on the whole batch; the rows that it gives to the model go through in parts.

        Returns:
            The step's result on the rank of the last stage, ``None`` elsewhere.
        """
        stage = self._position  # one down pipe has stage s on position s
        key = (*self._seed, *call.key)

        def through(given: dict[str, Any], rows: int, shape: torch.Size, part: Part) -> Tensor | None:
            ranges = row_ranges(rows, num_microbatches)
            if len(ranges) not in self._evaluation:
                self._evaluation[len(ranges)] = lower(forward_only(self._runner.num_stages, len(ranges)))
            work = _Evaluation(
                given, rows, shape, self._runner.anatomy.dtype, ranges, part, self._runner.num_stages - 1
            )
            self._executor.run(self._evaluation[len(ranges)].rows[stage], work)
            return torch.cat(work.joined) if work.joined else None

        with keyed(*key), call.context():
            passage = self._runner.run_whole(
                stage, lambda: call.step(batch), through=through, reseed=lambda layer: reseed(mix(*key), layer)
            )
        return passage.left

    def _lowered(self, num_microbatches: int) -> Lowered:
        if num_microbatches not in self._training:
            self._training[num_microbatches] = lower(self._build(num_microbatches))
        return self._training[num_microbatches]


@dataclass
class _Training:
    """The work of a training step."""

    runner: StageRunner
    boundaries: dict[tuple[Any, ...], Boundary]
    microbatches: Sequence[Microbatch]
    seed: tuple[int, ...]
    call: TrainingCall
    held: dict[tuple[int, int], tuple[Tensor | None, Tensor | None]] = field(default_factory=dict)
    """By stage and microbatch: what entered, and what backward runs from."""
    peak: int = 0

    def __post_init__(self) -> None:
        self.signatures = [microbatch.signature() for microbatch in self.microbatches]
        self.settled: dict[int, Boundary] = {}

    def boundary(self, microbatch: int) -> Boundary | None:
        """Shape and type of a microbatch's boundary tensors, once it or one of the same shapes has been seen."""
        return self.settled.get(microbatch) or self.boundaries.get(self.signatures[microbatch])

    def forward(self, action: Action, incoming: Incoming) -> Tensor | None:
        """Runs a stage and keeps what its backward needs."""
        number = action.microbatch
        key = (*self.seed, *self.call.key, number)
        is_last = action.stage == self.runner.num_stages - 1

        def receive(shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
            boundary = self._settle(number, Boundary(shape, dtype))
            return incoming(boundary).requires_grad_() if action.stage > 0 else None

        with keyed(*key), self.call.context():
            passage = self.runner.run(
                action.stage,
                lambda: self.call.step(self.microbatches[number].data),
                receive=receive,
                reseed=lambda layer: reseed(mix(*key), layer),
                scales=self.call.scales(number) if is_last else None,
            )
        left = self.call.finish(number, passage.left, passage.head) if is_last else passage.left
        self.held[action.stage, number] = (passage.entered, left)
        self.peak = max(self.peak, len(self.held))
        return None if is_last else left

    def _settle(self, microbatch: int, seen: Boundary) -> Boundary:
        """Notes the boundary of a microbatch as the model sees it.

        Raises:
            RuntimeError: A microbatch of the same shapes had another one, which the other ranks still expect.
        """
        self.settled[microbatch] = seen
        # Nothing follows from a batch without tensors, and a single stage has no boundary.
        if not any(self.signatures[microbatch]) or self.runner.num_stages == 1:
            return seen
        known = self.boundaries.setdefault(self.signatures[microbatch], seen)
        if known != seen:
            raise RuntimeError(
                f"The model's input gives hidden states of {tuple(seen.shape)} {seen.dtype}, but a batch of the same"
                f" shapes gave {tuple(known.shape)} {known.dtype} before. What the step hands to the model must follow"
                " from the shapes of the batch: crop or pad in the data loader, not in the step."
            )
        return seen

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
class _Evaluation:
    """The work of an evaluated batch: the rows that the step has given to the model, in parts."""

    given: dict[str, Any]
    rows: int
    shape: torch.Size
    dtype: torch.dtype
    ranges: list[tuple[int, int]]
    part: Part
    last_stage: int
    joined: list[Tensor] = field(default_factory=list)
    """What has come out of the last stage."""

    def boundary(self, microbatch: int) -> Boundary:
        """Shape and type of the hidden states of some rows."""
        start, end = self.ranges[microbatch]
        texts = self.shape[0] // self.rows  # of a row, each with hidden states of its own
        return Boundary(torch.Size(((end - start) * texts, *self.shape[1:])), self.dtype)

    def forward(self, action: Action, incoming: Incoming) -> Tensor | None:
        """Runs the stage on some rows."""
        rows = cut(self.given, self.rows, *self.ranges[action.microbatch])
        entered = incoming(self.boundary(action.microbatch)) if action.stage > 0 else None
        hidden = self.part(rows, entered)
        if action.stage < self.last_stage:
            return hidden
        self.joined.append(hidden)
        return None

    def backward(self, action: Action, incoming: Incoming) -> Tensor | None:
        """Never called: there is no backward in a forward-only schedule."""
        raise AssertionError(action, incoming)

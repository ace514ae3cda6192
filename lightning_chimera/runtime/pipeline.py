"""One pipeline group at work: trains and evaluates batches by a schedule."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from lightning_chimera.partition.deferral import Splitter, WeightGradients
from lightning_chimera.partition.heads import Weighing
from lightning_chimera.partition.stage import HeadCall, Part, Passage, Receive, StageExit, StageRunner
from lightning_chimera.runtime.boundary import Boundary
from lightning_chimera.runtime.executor import Executor, Incoming
from lightning_chimera.runtime.gradients import GradientSync
from lightning_chimera.runtime.links import Links
from lightning_chimera.runtime.microbatches import Microbatch, cut, row_ranges, signature_of
from lightning_chimera.runtime.randomness import keyed, mix, preserved, reseed, seed_by
from lightning_chimera.schedules import Action, Kind, Lowered, Schedule, forward_only, lower
from lightning_chimera.timeline import Span, sync_places

_NOTHING = nullcontext()

_Passing = tuple[int, tuple[Any, ...]]
"""A pipe, and the shapes of what goes through it."""

Look = Callable[[Kind, int, int, Tensor], None]
"""Told what leaves a stage: forward or backward, stage, microbatch, tensor."""


@dataclass(frozen=True)
class Recompute:
    """What runs once more in the backward instead of being kept.

    Attributes:
        stages: The stages of which only the input is kept. The last one, in which the user's step goes on behind the
            model, keeps the inputs of its blocks.
        blocks: Whether all others keep the inputs of their blocks.
    """

    stages: frozenset[int] = frozenset()
    blocks: bool = False


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
        weighing: How the means of a microbatch's head are weighed, if they are.
        finish: Given the microbatch's number, the step's result and the head's call, returns the loss to run backward
            from; ``None`` for a microbatch that counts nothing.
        backward: Runs backward from a loss.
    """

    weighing: Callable[[int], Weighing | None]
    finish: Callable[[int, Any, HeadCall], Tensor | None]
    backward: Callable[[Tensor], None]


class Pipeline:
    """The stages of this rank, their messages, and the schedules for every number of microbatches.

    Args:
        runner: Runs a stage.
        links: Sends and receives.
        position: This rank's place in the schedules.
        build: Makes the training schedule for a number of microbatches.
        usual: The training schedule of a batch with enough rows; all others place the stages alike.
        splitters: Split the backward of each stage on this rank, where a schedule does.
        recompute: What is recomputed.
        seed: What all random draws depend on.
        order: The stages whose gradients are summed within the schedule, in order.
    """

    def __init__(
        self,
        runner: StageRunner,
        links: Links,
        position: int,
        build: Callable[[int], Schedule],
        usual: Schedule,
        splitters: Mapping[int, Splitter],
        recompute: Recompute,
        seed: tuple[int, ...],
        order: Sequence[int] = (),
    ) -> None:
        self._runner = runner
        self._build = build
        self._position = position
        self._placement = usual.placement
        self._splitters = splitters
        self._recompute = recompute
        self._links = links
        self._executor = Executor(links, position)
        self._seed = seed
        self._boundaries: dict[tuple[Any, ...], Boundary] = {}
        self._halves = usual.halved_backward
        self._order = order
        self._training: dict[tuple[int, bool], tuple[Lowered, Mapping[Action, int]]] = {}
        self._evaluation: dict[int, Lowered] = {}
        self._passed: set[_Passing] = set()
        """What has gone through in finished steps, the same on all ranks: those that the pipe passes have seen it."""
        self._evaluated: set[tuple[Any, ...]] = set()
        self.schedule = usual
        """That of the last training step; a batch of few rows has one of its own."""
        self.spans: list[Span] = []
        """When the actions of the last training step ran."""
        self.hidden: list[torch.Size] = []
        """The shapes of the hidden states of its microbatches."""
        self._peak = 0, 1
        """Most parts held at one time in the last training step, and how many there are of a microbatch."""
        self.look: Look | None = None
        """Told what leaves a stage for another in training, and the losses."""
        self._work: _Training | None = None

    @property
    def is_training(self) -> bool:
        """Whether a training step runs, or has failed."""
        return self._work is not None

    @property
    def peak_activations(self) -> float:
        """Most activations held at one time in the last training step, in the unit of ``Schedule.peak_activations``."""
        held, parts = self._peak
        return float(held * self._placement.share / parts)

    @property
    def in_flight(self) -> tuple[float, list[Tensor | Node]]:
        """How many activations a training step holds now, and what keeps them: tensors, and the ends of graphs."""
        if self._work is None:
            return 0.0, []
        held = list(self._work.held.values())
        keepers = [keeper for one in held for keeper in (one.entered, one.end) if keeper is not None]
        return float(len(held) * self._placement.share / self._work.parts), keepers

    def train(self, microbatches: Sequence[Microbatch], call: TrainingCall, sync: GradientSync | None = None) -> None:
        """Runs forward and backward of all microbatches; gradients are added to ``.grad`` of this rank's parameters.

        Args:
            microbatches: The microbatches, or their halves where the schedule runs backwards in halves.
            call: The user's step.
            sync: Starts the sums of the stages' gradients that are placed within the schedule, if they are final with
                this step.
        """
        # Parts that do not pair up, of a batch with few rows say, run as microbatches with whole backwards.
        parts = 2 if self._halves and _pair_up(microbatches) else 1
        lowered, places = self._lowered(len(microbatches) // parts, halves=parts == 2)
        splitters = self._splitters if lowered.schedule.split_backward else {}
        work = _Training(
            self._runner, self._boundaries, microbatches, parts, splitters, self._recompute, self._seed, call, self.look
        )
        self._work = work
        passing = [(lowered.schedule.pipe_of(part // parts), shapes) for part, shapes in enumerate(work.signatures)]
        new = {part // parts for part, one in enumerate(passing) if not any(one[1]) or one not in self._passed}
        with preserved():  # once for all actions, each of which seeds the generators
            if sync is None or not places:
                self._executor.run(lowered, work, new=new)
            else:
                self._executor.run(lowered, work, lambda action: sync.start(places.get(action, 0)), new)
        self._passed.update(passing)
        self._work = None  # not if it fails: what it holds may be the reason
        self.schedule, self.spans = lowered.schedule, self._executor.spans
        self.hidden = [boundary.shape for boundary in work.known if boundary is not None]
        self._peak = work.peak, parts

    def evaluate(self, batch: Any, call: Call, num_microbatches: int) -> Any:
        """Runs the user's step once on the whole batch; the rows that it gives to the model go through in parts.

        Returns:
            The step's result on the rank of the last stage, ``None`` elsewhere.
        """
        key = (*self._seed, *call.key)
        last = self._runner.num_stages - 1
        is_last = self._placement.rank_of(last) == self._position
        signature = signature_of(batch)
        is_new = not any(signature) or signature not in self._evaluated

        def through(given: dict[str, Any], rows: int, shape: torch.Size, part: Part) -> Tensor | None:
            ranges = row_ranges(rows, num_microbatches)
            if len(ranges) not in self._evaluation:
                self._evaluation[len(ranges)] = lower(forward_only(self._placement, len(ranges)))
            work = _Evaluation(given, rows, shape, self._runner.anatomy.dtype, ranges, part, last)
            self._executor.run(self._evaluation[len(ranges)], work, new=range(len(ranges) if is_new else 0))
            return torch.cat(work.joined) if work.joined else None

        mixed = mix(*key)
        with keyed(*key), call.context():
            passage = self._runner.run_whole(
                lambda: call.step(batch),
                is_last=is_last,
                through=through,
                reseed=partial(reseed, mixed),
            )
        self._evaluated.add(signature)
        return passage.left

    def release(self, *, links: bool) -> None:
        """Lets go of what a failed step has left.

        Args:
            links: Whether no message will be sent any more, so that the memory of links is let go as well.
        """
        self._work = self.look = None
        if links:
            self._links.close()

    def _lowered(self, num_microbatches: int, *, halves: bool) -> tuple[Lowered, Mapping[Action, int]]:
        """The schedule with its messages, and where sums of gradients start."""
        if (num_microbatches, halves) not in self._training:
            schedule = self._build(num_microbatches)
            lowered = lower(schedule if halves else schedule.with_whole_backwards())
            places = sync_places(lowered.schedule, self._position, self._order)
            self._training[num_microbatches, halves] = lowered, places
        return self._training[num_microbatches, halves]


@dataclass
class _Training:
    """The work of a training step.

    A schedule's microbatch is one part of the batch, or two where backwards run in halves: then a forward runs both,
    one after the other, so that each has a graph of its own.
    """

    runner: StageRunner
    boundaries: dict[tuple[Any, ...], Boundary]
    microbatches: Sequence[Microbatch]
    parts: int
    splitters: Mapping[int, Splitter]
    recompute: Recompute
    seed: tuple[int, ...]
    call: TrainingCall
    look: "Look | None" = None
    held: dict[tuple[int, int], "_Held"] = field(default_factory=dict)
    """By stage and part: what backward needs."""
    peak: int = 0

    def __post_init__(self) -> None:
        self.dtype = self.runner.anatomy.dtype
        self.signatures = [microbatch.signature() for microbatch in self.microbatches]
        self.known = [self.boundaries.get(signature) for signature in self.signatures]
        """The boundary of each part, as far as it is known."""

    def parts_of(self, action: Action) -> Sequence[int]:
        """The parts of the batch that an action works on."""
        if self.parts == 1:
            return (action.microbatch,)
        first = action.microbatch * self.parts
        return (first + "ab".index(action.half),) if action.half else range(first, first + self.parts)

    # ---------------------------------------------------------------------------------------------- boundaries

    def boundary(self, action: Action) -> Boundary | None:
        """Shape and type of an action's boundary tensors, once those of its parts or of the same shapes were seen."""
        if self.parts == 1:
            return self._known(action.microbatch)
        known = [self._known(part) for part in self.parts_of(action)]
        seen = [boundary for boundary in known if boundary is not None]
        if len(seen) < len(known):
            return None
        rows = sum(boundary.shape[0] for boundary in seen)
        return Boundary(torch.Size((rows, *seen[0].shape[1:])), self.dtype)

    def demand(self, action: Action) -> Boundary:
        """The same; the step is called up to the model where they have not been seen."""
        for part in self.parts_of(action):
            self._demanded(part)
        boundary = self.boundary(action)
        assert boundary is not None
        return boundary

    def _demanded(self, part: int) -> Boundary:
        if self._known(part) is None:
            self._look(part)
        known = self._known(part)
        assert known is not None
        return known

    def _known(self, part: int) -> Boundary | None:
        known = self.known[part]
        if known is None:  # another part of the same shapes may have been seen since
            known = self.known[part] = self.boundaries.get(self.signatures[part])
        return known

    def _look(self, part: int) -> None:
        """Calls the step of a part up to the model, to see what it hands over."""

        def receive(shape: torch.Size) -> Tensor | None:
            self._settle(part, shape)
            raise StageExit(None)

        self._pass(0, part, receive)

    def _settle(self, part: int, shape: torch.Size) -> Boundary:
        """Notes the boundary of a part as the model sees it.

        Raises:
            RuntimeError: A part of the same shapes had another one, which the other ranks still expect.
        """
        seen, known = Boundary(shape, self.dtype), self._known(part)
        if known == seen:
            return seen
        self.known[part] = seen
        # Nothing follows from a batch without tensors, and a single stage has no boundary.
        if not any(self.signatures[part]) or self.runner.num_stages == 1:
            return seen
        if known is None:
            self.boundaries[self.signatures[part]] = seen
        else:
            raise RuntimeError(
                f"The model's input gives hidden states of {seen}, but a batch of the same shapes gave {known} before."
                " What the step hands to the model must follow from the shapes of the batch: crop or pad in the data"
                " loader, not in the step."
            )
        return seen

    # ------------------------------------------------------------------------------------------------- actions

    def run(self, action: Action, incoming: Incoming) -> Tensor | None:
        """Runs an action."""
        if action.kind is Kind.FORWARD:
            return self._forward(action, incoming)
        if action.kind is Kind.WEIGHT:
            self._finish_backward(action)
            return None
        output = self._backward(action, incoming)
        if action.kind is Kind.BACKWARD:
            self._finish_backward(action)
        return output

    def _forward(self, action: Action, incoming: Incoming) -> Tensor | None:
        """Runs a stage and keeps what its backward needs."""
        pieces = self._pieces(action, incoming, enters=action.stage > 0)
        left = _joined([self._forward_part(action.stage, part, piece) for part, piece in pieces])
        self.peak = max(self.peak, len(self.held))
        return left

    def _pieces(self, action: Action, incoming: Incoming, *, enters: bool) -> list[tuple[int, Incoming]]:
        """The parts of an action, and for each what brings its input: one message is for all of them."""
        parts = self.parts_of(action)
        if len(parts) == 1 or not enters:
            return [(part, incoming) for part in parts]
        sizes = [self._demanded(part).shape[0] for part in parts]
        pieces = torch.split(incoming(self.demand(action)), sizes)
        return [(part, partial(_given, piece.detach())) for part, piece in zip(parts, pieces, strict=True)]

    def _forward_part(self, stage: int, part: int, incoming: Incoming) -> Tensor | None:
        is_last = stage == self.runner.num_stages - 1

        def receive(shape: torch.Size) -> Tensor | None:
            boundary = self._settle(part, shape)
            return incoming(boundary).requires_grad_() if stage > 0 else None

        again = stage in self.recompute.stages and not is_last
        later = WeightGradients()
        with torch.no_grad() if again else _NOTHING, self._splitting(stage, later):
            passage = self._pass(stage, part, receive, self.call.weighing(part) if is_last else None)
        left = self.call.finish(part, passage.left, passage.head) if is_last else passage.left
        root = None if again or left is None else left if is_last else _Root(left)
        self.held[stage, part] = _Held(passage.entered, root, later)
        self._show(Kind.FORWARD, stage, part, left)
        return None if is_last else left

    def _forward_again(self, stage: int, part: int, entered: Tensor | None) -> Tensor:
        """Runs the forward of a stage that has kept its input only."""
        left: Tensor = self._pass(stage, part, lambda _shape: entered).left
        return left

    def _pass(
        self,
        stage: int,
        part: int,
        receive: Receive,
        weighing: Weighing | None = None,
    ) -> Passage:
        """Calls the user's step for a part, as a stage sees it."""
        key = mix(*self._key(part))
        seed_by(key)
        with self.call.context():
            return self.runner.run(
                stage,
                lambda: self.call.step(self.microbatches[part].data),
                receive=receive,
                reseed=partial(reseed, key),
                weighing=weighing,
                recompute=self._recomputes_blocks(stage),
            )

    def _key(self, part: int) -> tuple[int, ...]:
        return (*self.seed, *self.call.key, part)

    def _recomputes_blocks(self, stage: int) -> bool:
        if stage in self.recompute.stages:
            return stage == self.runner.num_stages - 1
        return self.recompute.blocks

    def _backward(self, action: Action, incoming: Incoming) -> Tensor | None:
        """Runs the backward of a stage, or its first half; returns the gradient for the stage before."""
        pieces = self._pieces(action, incoming, enters=action.stage < self.runner.num_stages - 1)
        return _joined([self._backward_part(action.stage, part, piece) for part, piece in pieces])

    def _backward_part(self, stage: int, part: int, incoming: Incoming) -> Tensor | None:
        held = self.held[stage, part]
        entered, root = held.entered, held.root
        if self._recomputes_blocks(stage):
            seed_by(mix(*self._key(part)))
        with self._splitting(stage, held.later):
            if stage == self.runner.num_stages - 1:
                if isinstance(root, Tensor):
                    self.call.backward(root)
            else:
                gradient = incoming(self._demanded(part))
                root = _Root(self._forward_again(stage, part, entered)) if root is None else root
                assert isinstance(root, _Root)
                root.backward(gradient)
        held.entered = held.root = root = None  # the graph goes; what is left is in `later`
        if entered is None:
            return None
        self._show(Kind.BACKWARD, stage, part, entered.grad)
        return torch.zeros_like(entered) if entered.grad is None else entered.grad

    def _show(self, kind: Kind, stage: int, part: int, tensor: Tensor | None) -> None:
        if self.look is not None and tensor is not None:
            self.look(kind, stage, part // self.parts, tensor)

    def _finish_backward(self, action: Action) -> None:
        """The second half of a backward: the gradients of weights."""
        for part in self.parts_of(action):
            self.held.pop((action.stage, part)).later.accumulate()

    def _splitting(self, stage: int, later: WeightGradients) -> AbstractContextManager[None]:
        return self.splitters[stage].into(later) if self.splitters else _NOTHING


@dataclass
class _Held:
    """What a stage keeps of a part between its forward and the end of its backward.

    Attributes:
        entered: The activation that entered.
        root: What backward runs from: the loss, or the end of the graph that has given the activation that left.
        later: The gradients of weights that the first half of the backward has left.
    """

    entered: Tensor | None
    root: "Tensor | _Root | None"
    later: WeightGradients

    @property
    def end(self) -> Tensor | Node | None:
        """What has the graph, if there is one."""
        return self.root.end if isinstance(self.root, _Root) else self.root


class _Root:
    """The end of a stage's graph, without the activation that left there: it goes when it has been sent.

    Args:
        left: The activation. It has no graph where all that comes before is frozen.
    """

    def __init__(self, left: Tensor) -> None:
        # The node of a view: it has no tensor, and keeps the graph even if the activation's own is one of Python.
        self.end: Node | None = left.view_as(left).grad_fn if left.requires_grad else None

    def backward(self, gradient: Tensor) -> None:
        """Runs backward from the gradient of the activation."""
        if self.end is not None:
            torch.autograd.backward((GradientEdge(self.end, 0),), (gradient,))


def _pair_up(microbatches: Sequence[Microbatch]) -> bool:
    """Whether every two parts can be one message: they differ in nothing but their rows, not in their length say."""
    shapes = [
        [None if known is None else (known[0][1:], known[1]) for known in microbatch.signature()]
        for microbatch in microbatches
    ]
    return shapes[::2] == shapes[1::2]


def _given(tensor: Tensor, _boundary: Boundary) -> Tensor:
    """A tensor that is there already, in the place of one to wait for."""
    return tensor


def _joined(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """What leaves an action, of all its parts."""
    given = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(given) if len(given) > 1 else given[0] if given else None


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

    def boundary(self, action: Action) -> Boundary:
        """Shape and type of the hidden states of some rows."""
        start, end = self.ranges[action.microbatch]
        texts = self.shape[0] // self.rows  # of a row, each with hidden states of its own
        return Boundary(torch.Size(((end - start) * texts, *self.shape[1:])), self.dtype)

    demand = boundary

    def run(self, action: Action, incoming: Incoming) -> Tensor | None:
        """Runs a stage on some rows."""
        rows = cut(self.given, self.rows, *self.ranges[action.microbatch])
        entered = incoming(self.boundary(action)) if action.stage > 0 else None
        hidden = self.part(action.stage, rows, entered)
        if action.stage < self.last_stage:
            return hidden
        self.joined.append(hidden)
        return None

"""Judges whether a schedule can run: complete, in order, one queue per link, free of deadlock, within memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from lightning_chimera.schedules.action import Action, Kind, Schedule, count_activations, plain, render_grid

Cell = tuple[int, int]


class ScheduleError(ValueError):
    """A schedule cannot run.

    Attributes:
        rank: the rank of the first bad cell; None where no single rank is to blame.
        index: the position of that cell in the rank's row; None where the cell is missing from the row.
    """

    def __init__(
        self, schedule: Schedule, problem: str, rule: str, *, rank: int | None = None, index: int | None = None
    ) -> None:
        """Compose the message: where and what, the rule, and the grid with the bad cell marked."""
        self.rank = rank
        self.index = index
        bad = None if rank is None or index is None else (rank, index)
        where = f", rank {rank}, position {index}" if bad else ""
        grid = render_grid(schedule, bad)
        super().__init__(f"Schedule {schedule.name}{where}: {problem}\n{rule}\n{grid}")


def validate(
    schedule: Schedule, *, max_activations: float | Sequence[float] | None = None, in_order: bool = False
) -> None:
    """Check that a schedule is complete and runs without deadlock at any message size and any timing.

    Messages between two ranks form one queue per direction. A message may start when the one before it in its queue was
    matched. Receives are posted in that order, by the time of the first compute that needs a later message, and a
    compute waits only for its own receive, never for a send.

    Args:
        schedule: the schedule to judge.
        max_activations: most activations, as ``Schedule.peak_activations`` counts them: one bound for all ranks, or one
            for each.
        in_order: whether, besides, each queue must be consumed in the order in which it is produced.

    Raises:
        ScheduleError: if a check fails; it names the first bad cell and prints the grid with that cell marked.
        ValueError: if ``max_activations`` is a sequence of the wrong length.
    """
    _check_cells(schedule)
    _check_complete(schedule)
    cells = {action: (rank, index) for rank, index, action in _cells(schedule)}
    _check_order(schedule, cells)
    if in_order:
        _check_links(schedule, cells)
    _check_progress(schedule, cells)
    if max_activations is not None:
        _check_activations(schedule, max_activations)


def _cells(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    for rank, row in enumerate(schedule.rows):
        for index, action in enumerate(row):
            yield rank, index, action


def _check_cells(schedule: Schedule) -> None:
    """Check each cell by itself: its numbers exist, it stands on the rank of its stage, and it stands there once."""
    seen: set[Action] = set()
    for rank, index, action in _cells(schedule):
        problem = _misplaced(schedule, action, rank)
        if action in seen:
            problem = f"{action} runs a second time."
        if problem:
            rule = "A rank runs each action of its own stages exactly once, and nothing else."
            raise ScheduleError(schedule, problem, rule, rank=rank, index=index)
        seen.add(action)


def _misplaced(schedule: Schedule, action: Action, rank: int) -> str | None:
    limits = {"stage": schedule.num_stages, "microbatch": schedule.num_microbatches, "pipe": schedule.num_pipes}
    for noun, limit in limits.items():
        number = getattr(action, noun)
        if not 0 <= number < limit:
            return f"{action} is of {noun} {number}, but there are {limit}, numbered from 0."
    owner = schedule.placement.rank_of(action.stage, action.pipe)
    if owner != rank:
        return f"{action} is on rank {rank}, but stage {action.stage} of pipe {action.pipe} is on rank {owner}."
    return None


def _check_complete(schedule: Schedule) -> None:
    """Check that each microbatch runs in one pipe, through all of its stages, forward and (if at all) backward."""
    rule = (
        "Each microbatch runs in exactly one pipe: one forward on each of its stages and, in training, one backward,"
        " whole (B), in parts (I and W), or in halves on all stages (Ba and Bb)."
    )
    pipes: dict[int, int] = {}
    halved: dict[int, bool] = {}
    for rank, index, action in _cells(schedule):
        pipe = pipes.setdefault(action.microbatch, action.pipe)
        problem = None
        if pipe != action.pipe:
            problem = f"{action} runs in pipe {action.pipe}, but its microbatch already runs in pipe {pipe}."
        elif action.kind is not Kind.FORWARD and halved.setdefault(action.microbatch, bool(action.half)) != bool(
            action.half
        ):
            problem = f"{action} is {'a half' if action.half else 'whole'}, but its microbatch runs otherwise before."
        if problem:
            raise ScheduleError(schedule, problem, rule, rank=rank, index=index)
    present = {action: (rank, index) for rank, index, action in _cells(schedule)}
    for microbatch in range(schedule.num_microbatches):
        if microbatch not in pipes:
            raise ScheduleError(schedule, f"no action runs microbatch {microbatch}.", rule)
        for stage in range(schedule.num_stages):
            forward = Action(stage, Kind.FORWARD, microbatch, pipes[microbatch])
            for action in [forward] if schedule.forward_only else [forward, *_backward(forward, present)]:
                if action not in present:
                    rank = schedule.placement.rank_of(stage, action.pipe)
                    raise ScheduleError(schedule, f"{action} is missing from rank {rank}.", rule, rank=rank)
            extra = forward._replace(kind=Kind.BACKWARD)
            part = forward._replace(kind=Kind.WEIGHT)
            if extra in present and part in present:
                rank, index = present[part]
                problem = f"{part} is a part of {extra}, which runs whole."
                raise ScheduleError(schedule, problem, rule, rank=rank, index=index)


def _backward(forward: Action, present: Mapping[Action, Cell]) -> tuple[Action, ...]:
    """Return the actions of the backward that belongs to a forward: in the form of which any is present, else whole."""
    whole, grad_input, grad_weight = (forward._replace(kind=kind) for kind in (Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT))
    halves = (whole._replace(half="a"), whole._replace(half="b"))
    for form in ((grad_input, grad_weight), halves):
        if any(action in present for action in form):
            return form
    return (whole,)


def _check_order(schedule: Schedule, cells: dict[Action, Cell]) -> None:
    rule = "A stage runs the backward of a microbatch after its forward, and of its parts the input gradient (I) first."
    for rank, index, action in _cells(schedule):
        before = Kind.INPUT if action.kind is Kind.WEIGHT else Kind.FORWARD
        earlier = action._replace(kind=before, half="")
        if action.kind is not Kind.FORWARD and cells[earlier][1] > index:
            raise ScheduleError(schedule, f"{action} runs before {earlier}.", rule, rank=rank, index=index)


def _check_links(schedule: Schedule, cells: dict[Action, Cell]) -> None:
    """Check that on each directed link the receiver consumes messages in the order the sender produces them."""
    consumed: dict[tuple[int, int], list[Action]] = {}
    for rank, _, action in _cells(schedule):
        producer = schedule.producers.get(action)
        if producer is not None and cells[producer][0] != rank:
            consumed.setdefault((cells[producer][0], rank), []).append(action)
    problems: list[tuple[int, int, str]] = []
    for (source, target), actions in consumed.items():
        # On one link a producer names its consumer, so sorting by the producer's position is the sending order.
        sent = sorted((cells[schedule.producers[action]][1], action) for action in actions)
        for action, (_, expected) in zip(actions, sent, strict=True):
            if action != expected:
                problem = (
                    f"{action} takes its input from rank {source}, which sends the input of {expected} before that."
                )
                problems.append((cells[action][1], target, problem))
                break
    if problems:
        index, rank, problem = min(problems)
        rule = "Messages from one rank to another form one queue: they are consumed in the order they are produced."
        raise ScheduleError(schedule, problem, rule, rank=rank, index=index)


def _check_progress(schedule: Schedule, cells: dict[Action, Cell]) -> None:
    """Step all ranks until every row is done or nobody can move.

    All messages before one in its queue are posted when its receive is, and a compute never waits for a send. So when a
    rank reaches a compute, its receive can only wait for the producer.
    """
    done = [0] * schedule.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            while done[rank] < len(row) and _awaited(schedule, cells, done, row[done[rank]]) is None:
                done[rank] += 1
                moved = True
    if any(count < len(row) for count, row in zip(done, schedule.rows, strict=True)):
        raise _deadlock(schedule, cells, done)


def _awaited(schedule: Schedule, cells: dict[Action, Cell], done: list[int], action: Action) -> Action | None:
    """Return the action that must still run before this one has its input; None if the input is there."""
    producer = schedule.producers.get(action)
    if producer is None:
        return None
    rank, index = cells[producer]
    return None if index < done[rank] else producer


def _deadlock(schedule: Schedule, cells: dict[Action, Cell], done: list[int]) -> ScheduleError:
    """Name the earliest blocked cell of a circle of ranks that wait for each other."""
    waits: dict[int, Action] = {}
    for rank, row in enumerate(schedule.rows):
        producer = _awaited(schedule, cells, done, row[done[rank]]) if done[rank] < len(row) else None
        if producer is not None:
            waits[rank] = producer
    rank = min(waits)
    circle: list[int] = []
    while rank not in circle:
        circle.append(rank)
        rank = cells[waits[rank]][0]
    circle = circle[circle.index(rank) :]
    start = min(range(len(circle)), key=lambda place: (done[circle[place]], circle[place]))
    lines = [
        f"{schedule.rows[rank][done[rank]]} on rank {rank} waits for {waits[rank]} on rank {cells[waits[rank]][0]}"
        for rank in circle[start:] + circle[:start]
    ]
    problem = "the ranks wait for each other: " + ", ".join(lines) + "."
    rule = "Every order of a rank must let the inputs arrive that it waits for."
    return ScheduleError(schedule, problem, rule, rank=circle[start], index=done[circle[start]])


def _check_activations(schedule: Schedule, max_activations: float | Sequence[float]) -> None:
    bounds = list(max_activations) if isinstance(max_activations, Sequence) else [max_activations] * schedule.num_ranks
    if len(bounds) != schedule.num_ranks:
        raise ValueError(
            f"{len(bounds)} activation bounds for {schedule.num_ranks} ranks: give one, or one for each rank."
        )
    share = schedule.placement.share
    for rank, (bound, row) in enumerate(zip(bounds, schedule.rows, strict=True)):
        for index, held in enumerate(count_activations(row)):
            if plain(held * share) > bound:
                problem = f"{row[index]} makes {plain(held * share):g} microbatches whose backward has not run yet."
                rule = f"Rank {rank} may hold at most {bound:g}."
                raise ScheduleError(schedule, problem, rule, rank=rank, index=index)

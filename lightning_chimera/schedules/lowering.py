"""Lowers a schedule to what an executor runs: computes with the sends and receives between them.

1F1B with two stages and two microbatches, receives posted one compute ahead:

    rank 0                            rank 1
    compute 0F0                       post    0F0 -> 1F0
    send    0F0 -> 1F0                compute 1F0
    post    1B0 -> 0B0                post    0F1 -> 1F1
    compute 0F1                       compute 1B0
    send    0F1 -> 1F1                send    1B0 -> 0B0
    post    1B1 -> 0B1                compute 1F1
    compute 0B0                       compute 1B1
    release 0F0 -> 1F0                send    1B1 -> 0B1
    compute 0B1                       release 1B0 -> 0B0
    release 0F1 -> 1F1                release 1B1 -> 0B1

Rank 0 gives the send of 0F0 back when 1B0 has arrived: rank 1 can only have made that after taking 0F0. So a release
never blocks, except at the end of a row, where the rank has nothing left to do.
"""

from __future__ import annotations

import bisect
import enum
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lightning_chimera.schedules.action import Action, Schedule
from lightning_chimera.schedules.validate import validate

Link = tuple[int, int]


class Message(NamedTuple):
    """What one compute hands to another on a different rank.

    Attributes:
        source: the sending rank.
        target: the receiving rank.
        index: the message's place in the queue from source to target, from 0.
        producer: the action whose output is sent.
        consumer: the action that takes it as its input.
    """

    source: int
    target: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which a message has no use for
    producer: Action
    consumer: Action

    def __str__(self) -> str:
        """Return both actions and the place in the link's queue, such as ``0F2 -> 1F2 (0 -> 1, #2)``."""
        return f"{self.producer} -> {self.consumer} ({self.source} -> {self.target}, #{self.index})"


class Operation(enum.Enum):
    """What an executor does at one instruction."""

    POST = "post"
    """Start a receive without waiting for it."""
    COMPUTE = "compute"
    """Wait for the action's own receive, if it has one, then run the action."""
    SEND = "send"
    """Start a send without waiting for it."""
    RELEASE = "release"
    """Give back what a send held; except at the end of a row, the peer has provably taken it by now."""


class Instruction(NamedTuple):
    """One step of an executor; the subject is an action for COMPUTE and a message otherwise."""

    operation: Operation
    subject: Action | Message

    def __str__(self) -> str:
        """Return the operation and its subject, such as ``compute 0F2``."""
        return f"{self.operation.value} {self.subject}"


@dataclass(frozen=True)
class Lowered:
    """A schedule with its communication: ``rows[rank]`` holds the instructions of a rank in order."""

    schedule: Schedule
    rows: tuple[tuple[Instruction, ...], ...]

    @functools.cached_property
    def received(self) -> Mapping[Action, Message]:
        """For each action whose input is made on another rank, the message that brings it."""
        posts = (subject for row in self.rows for operation, subject in row if operation is Operation.POST)
        return {message.consumer: message for message in posts if isinstance(message, Message)}


def lower(schedule: Schedule, *, lookahead: int = 1) -> Lowered:
    """Add the sends and receives to a schedule.

    A send directly follows the compute that produced it. A receive is posted ``lookahead`` computes before the one that
    consumes it, or earlier where its link asks for that: the receives of a link are posted in the order of its sends. A
    send is released directly after the first compute whose receive proves that the peer has taken it, or at the end of
    the row where no receive does.

    Args:
        schedule: a schedule that ``validate`` accepts.
        lookahead: computes between the start of a receive and its use; 0 posts directly before the use.

    Raises:
        ScheduleError: if the schedule is not valid.
        ValueError: if the lookahead is negative.
    """
    if lookahead < 0:
        raise ValueError(f"A receive cannot be posted after its use: lookahead must be 0 or more; got {lookahead}.")
    validate(schedule)
    links = _links(schedule)
    positions = {action: index for row in schedule.rows for index, action in enumerate(row)}
    rows = tuple(_row(row, rank, links, positions, lookahead) for rank, row in enumerate(schedule.rows))
    return Lowered(schedule, rows)


def _links(schedule: Schedule) -> dict[Link, list[Message]]:
    """Return the queue of every directed link."""
    links: dict[Link, list[Message]] = {}
    consumers = {producer: consumer for consumer, producer in schedule.producers.items()}
    for source, row in enumerate(schedule.rows):
        for producer in row:
            consumer = consumers.get(producer)
            target = source if consumer is None else schedule.placement.rank_of(consumer.stage, consumer.pipe)
            if consumer is not None and target != source:
                queue = links.setdefault((source, target), [])
                queue.append(Message(source, target, len(queue), producer, consumer))
    return links


def _row(
    row: tuple[Action, ...], rank: int, links: dict[Link, list[Message]], positions: dict[Action, int], lookahead: int
) -> tuple[Instruction, ...]:
    """Return the instructions of one rank."""
    sent = {message.producer: message for (source, _), queue in links.items() if source == rank for message in queue}
    posts = _posts(rank, links, positions, lookahead)
    releases: dict[int, list[Message]] = {}
    for action in row:
        if action in sent:
            answers = links.get((sent[action].target, rank), [])
            releases.setdefault(_proof(sent[action], answers, positions, len(row)), []).append(sent[action])

    instructions: list[Instruction] = []
    for index, action in enumerate(row):
        instructions += [Instruction(Operation.POST, message) for message in posts.get(index, [])]
        instructions.append(Instruction(Operation.COMPUTE, action))
        # The send comes before the releases, since the peer may be waiting for it.
        instructions += [Instruction(Operation.SEND, sent[action])] if action in sent else []
        instructions += [Instruction(Operation.RELEASE, message) for message in releases.get(index, [])]
    instructions += [Instruction(Operation.RELEASE, message) for message in releases.get(len(row), [])]
    return tuple(instructions)


def _posts(
    rank: int, links: dict[Link, list[Message]], positions: dict[Action, int], lookahead: int
) -> dict[int, list[Message]]:
    """Return the receives of a rank by the compute before which they are posted.

    A link's receives are posted in the order of its sends. One that is needed later than a message behind it in the
    queue is posted with that message and waits in its buffer.
    """
    needed: list[tuple[int, Message]] = []
    for (_, target), queue in links.items():
        if target == rank:
            place = len(positions)
            for message in reversed(queue):
                place = min(place, positions[message.consumer])
                needed.append((place, message))
    # At the start of a row several are due: those that are needed first come first, on a link those sent first.
    needed.sort(key=lambda item: (item[0], item[1].source, item[1].index))
    posts: dict[int, list[Message]] = {}
    for place, message in needed:
        posts.setdefault(max(0, place - lookahead), []).append(message)
    return posts


def _proof(message: Message, answers: list[Message], positions: dict[Action, int], end: int) -> int:
    """Return the sender's first position whose receive proves that a message was taken, or the row's end.

    Args:
        message: the message to prove taken.
        answers: the queue in the other direction. Any answer that the peer produced with or after the consumer of the
            message is a proof.
        positions: the place of each action in its row.
        end: the length of the sender's row.
    """
    first = bisect.bisect_left(answers, positions[message.consumer], key=lambda answer: positions[answer.producer])
    return min((positions[answer.consumer] for answer in answers[first:]), default=end)

"""Runs one rank's row of a lowered schedule: one interpreter for every schedule."""

from collections.abc import Callable, Container
from time import perf_counter
from typing import Protocol

from torch import Tensor

from lightning_chimera.runtime.boundary import Boundary
from lightning_chimera.runtime.links import Links
from lightning_chimera.runtime.progress import PROGRESS
from lightning_chimera.schedules import Action, Lowered, Message, Operation
from lightning_chimera.timeline import Span

Incoming = Callable[[Boundary], Tensor]
"""Waits for an action's input, given its shape and type."""


class Work(Protocol):
    """What the actions of a row do; the executor knows only their order and their messages."""

    def boundary(self, action: Action) -> Boundary | None:
        """Shape and type of what enters or leaves an action, where they are known yet."""

    def demand(self, action: Action) -> Boundary:
        """The same, found out now where they are not."""

    def run(self, action: Action, incoming: Incoming) -> Tensor | None:
        """Runs an action; returns what a neighbour stage takes from it, if one does."""


class Executor:
    """Walks through instructions in order.

    Args:
        links: Sends and receives.
        position: This rank's place in the schedule.
    """

    def __init__(self, links: Links, position: int) -> None:
        self._links = links
        self._position = position
        self.spans: list[Span] = []
        """When each action of the last row ran, in seconds of ``perf_counter``; waiting for its input not included."""

    def run(
        self,
        lowered: Lowered,
        work: Work,
        before: Callable[[Action], None] | None = None,
        new: Container[int] = (),
    ) -> None:
        """Runs this rank's row to its end.

        Args:
            lowered: The schedule with its messages.
            work: What to do at each action.
            before: Called before each action, and before it waits for its input.
            new: The microbatches of shapes that no rank has seen before, the same on all ranks.
        """
        self._links.begin(new)
        self.spans = []
        producers, received = lowered.schedule.producers, lowered.received
        outputs: dict[Action, Tensor] = {}
        """What has left an action and was not taken yet, by a message or by the next stage on this rank."""

        def demand(message: Message) -> Boundary:
            return work.demand(message.consumer)

        def handed(action: Action) -> Tensor:
            return outputs.pop(producers[action])

        for operation, subject in lowered.rows[self._position]:
            if isinstance(subject, Action):
                PROGRESS.action = subject
                if before is not None:
                    before(subject)
                message = received.get(subject)
                if message is not None:
                    self._links.catch_up(message, demand)
                output = self._compute(subject, message, handed, work)
                if output is not None:
                    outputs[subject] = output
            elif operation is Operation.POST:
                self._links.post(subject, work.boundary(subject.consumer))
            elif operation is Operation.SEND:
                boundary = work.boundary(subject.producer)
                assert boundary is not None
                self._links.send(subject, outputs.pop(subject.producer), boundary)
            else:
                PROGRESS.awaited = subject.target
                self._links.release(subject)
                PROGRESS.awaited = None
        PROGRESS.action = None

    def _compute(
        self, action: Action, message: Message | None, handed: Callable[[Action], Tensor], work: Work
    ) -> Tensor | None:
        """Runs one action and notes when it ran.

        Args:
            action: The action.
            message: What brings its input, if another rank has it.
            handed: Gives its input, where it was made on this rank.
            work: What to do.
        """
        start = perf_counter()

        def incoming(boundary: Boundary) -> Tensor:
            nonlocal start
            if message is None:
                tensor = handed(action).detach()
            else:
                PROGRESS.awaited = message.source
                tensor = self._links.receive(message, boundary)
                PROGRESS.awaited = None
            start = perf_counter()
            return tensor

        output = work.run(action, incoming)
        self.spans.append(Span(self._position, action, start, perf_counter()))
        return output

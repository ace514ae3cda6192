"""Runs one rank's row of a lowered schedule: one interpreter for every schedule."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Protocol

from torch import Tensor

from lightning_chimera.runtime.links import Boundary, Links
from lightning_chimera.schedules import Action, Instruction, Kind, Message, Operation
from lightning_chimera.timeline import Span

Incoming = Callable[[Boundary], Tensor]
"""Waits for an action's input, given its shape and type."""


class Work(Protocol):
    """What the actions of a row do; the executor knows only their order and their messages."""

    def boundary(self, microbatch: int) -> Boundary | None:
        """Shape and type of a microbatch's boundary tensors, where they are known yet."""

    def forward(self, action: Action, incoming: Incoming) -> Tensor | None:
        """Runs a forward; returns the activation for the next stage, if there is one."""

    def backward(self, action: Action, incoming: Incoming) -> Tensor | None:
        """Runs a backward; returns the gradient for the previous stage, if there is one."""


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

    def run(self, row: Sequence[Instruction], work: Work) -> None:
        """Runs a row to its end.

        Args:
            row: The instructions.
            work: What to do at each action.
        """
        self._links.begin()
        self.spans = []
        inputs = {
            instruction.subject.consumer: instruction.subject
            for instruction in row
            if isinstance(instruction.subject, Message) and instruction.operation is Operation.POST
        }
        outputs: dict[Action, Tensor] = {}
        for operation, subject in row:
            if isinstance(subject, Action):
                output = self._compute(subject, inputs.get(subject), work)
                if output is not None:
                    outputs[subject] = output
            elif operation is Operation.POST:
                self._links.post(subject, work.boundary(subject.consumer.microbatch))
            elif operation is Operation.SEND:
                boundary = work.boundary(subject.producer.microbatch)
                assert boundary is not None
                self._links.send(subject, outputs.pop(subject.producer), boundary)
            else:
                self._links.release(subject)

    def _compute(self, action: Action, message: Message | None, work: Work) -> Tensor | None:
        """Runs one action and notes when it ran."""
        start = perf_counter()

        def incoming(boundary: Boundary) -> Tensor:
            nonlocal start
            assert message is not None
            tensor = self._links.receive(message, boundary)
            start = perf_counter()
            return tensor

        output = {Kind.FORWARD: work.forward, Kind.BACKWARD: work.backward}[action.kind](action, incoming)
        self.spans.append(Span(self._position, action, start, perf_counter()))
        return output

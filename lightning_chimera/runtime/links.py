"""Point-to-point messages between neighbouring positions.

One two-rank group per directed link carries that link's messages in the order in which they are sent: receives are
posted in that order, as NCCL needs, whatever the order in which they are used. Where the backend has tags (gloo) each
message has its own. A send is only ever waited for
when its buffer is given back, a receive when its tensor is used.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from lightning_chimera.runtime.topology import Topology
from lightning_chimera.schedules import Message


class Boundary(NamedTuple):
    """Shape and type of the tensors that cross the stage boundaries for one microbatch, both ways."""

    shape: torch.Size
    dtype: torch.dtype


class Links:
    """The messages of one rank.

    Args:
        topology: Turns positions into global ranks.
        groups: One group per directed link of this rank's pipeline group.
        device: Where received tensors are put.
    """

    def __init__(
        self, topology: Topology, groups: Mapping[tuple[int, int], ProcessGroup], device: torch.device
    ) -> None:
        self._topology = topology
        self._groups = groups
        self._device = device
        self._waiting: defaultdict[int, deque[Message]] = defaultdict(deque)
        self._posted: dict[Message, tuple[Work, Tensor]] = {}
        self._sent: dict[Message, tuple[Work, Tensor]] = {}

    def warm_up(self) -> None:
        """Sends a first message over every link, in one order, so that no connection is made within a schedule.

        NCCL makes its communicators at the first message, and then waits for both ends.
        """
        for (source, target), group in sorted(self._groups.items()):
            token = torch.zeros(1, device=self._device)
            if source == self._topology.position:
                dist.send(token, self._topology.at(target), group=group)
            elif target == self._topology.position:
                dist.recv(token, self._topology.at(source), group=group)

    def post(self, message: Message, boundary: Boundary | None) -> None:
        """Starts a receive, if its shape is known and all earlier messages of its link have been posted.

        Otherwise it waits for its turn: a link's receives are posted in the order of its sends.
        """
        waiting = self._waiting[message.source]
        if boundary is None or waiting:
            waiting.append(message)
        else:
            self._receive_into_buffer(message, boundary)

    def catch_up(self, message: Message, demand: Callable[[Message], Boundary]) -> None:
        """Posts what waits in front of a message that is needed now.

        Args:
            message: The message.
            demand: Finds out the shape and type of an earlier one.
        """
        waiting = self._waiting[message.source]
        while waiting and waiting[0].index < message.index:
            earlier = waiting.popleft()
            self._receive_into_buffer(earlier, demand(earlier))

    def receive(self, message: Message, boundary: Boundary) -> Tensor:
        """Waits for a message; nothing waits in front of it (see :meth:`catch_up`).

        Raises:
            RuntimeError: A receive was posted for another shape than is expected now.
        """
        if message not in self._posted:
            first = self._waiting[message.source].popleft()
            assert first == message
            self._receive_into_buffer(message, boundary)
        work, buffer = self._posted.pop(message)
        if (buffer.shape, buffer.dtype) != (boundary.shape, boundary.dtype):
            raise RuntimeError(
                f"Message {message} was expected as {tuple(buffer.shape)} {buffer.dtype}, as for earlier batches of the"
                f" same shapes, but this microbatch needs {tuple(boundary.shape)} {boundary.dtype}. The shape of the"
                " model's input must follow from the shapes of the batch."
            )
        work.wait()
        return buffer

    def _receive_into_buffer(self, message: Message, boundary: Boundary) -> None:
        buffer = torch.empty(boundary.shape, dtype=boundary.dtype, device=self._device)
        work = dist.irecv(
            buffer,
            src=self._topology.at(message.source),
            group=self._groups[message.source, message.target],
            tag=message.index,
        )
        assert work is not None
        self._posted[message] = (work, buffer)

    def send(self, message: Message, tensor: Tensor, boundary: Boundary) -> None:
        """Starts a send and keeps the tensor until it is released.

        Raises:
            RuntimeError: The tensor is not what the receiver expects.
        """
        if (tensor.shape, tensor.dtype) != (boundary.shape, boundary.dtype):
            raise RuntimeError(
                f"Message {message} is {tuple(tensor.shape)} {tensor.dtype}, but the receiving stage expects"
                f" {tuple(boundary.shape)} {boundary.dtype}: rows x length x hidden size of the model's input, in the"
                " type of the model's parameters."
            )
        tensor = tensor.detach().contiguous()
        work = dist.isend(
            tensor,
            dst=self._topology.at(message.target),
            group=self._groups[message.source, message.target],
            tag=message.index,
        )
        assert work is not None
        self._sent[message] = (work, tensor)

    def release(self, message: Message) -> None:
        """Waits until a send is taken and gives its tensor back."""
        work, _ = self._sent.pop(message)
        work.wait()

    def begin(self) -> None:
        """Starts the queues of a new step."""
        self._waiting.clear()

"""Point-to-point messages between neighbouring positions.

One two-rank group per directed link carries that link's messages in the order in which they are sent: receives are
posted in that order, as NCCL needs, whatever the order in which they are used. Where the backend has tags (gloo) each
message has its own. A send is only ever waited for when its buffer is given back, a receive when its tensor is used.

A message of shapes that no batch had before is introduced: what it is goes in front of it, since a receive of another
size than was sent ends the process in gloo, and hangs in NCCL.

On the CPU, messages between two processes of one host go through memory that both see, where that can be had. Nothing
is posted there, and nothing is waited for but what is used.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from lightning_chimera.runtime.boundary import NUM_NUMBERS, Boundary
from lightning_chimera.runtime.shared_memory import OFFER_LENGTH, BoundaryError, Inbox, LinkError, Outbox
from lightning_chimera.runtime.topology import Topology
from lightning_chimera.schedules import Message

_INTRODUCTIONS = 1 << 16
"""The tag of a message's introduction is its own and this."""


class Links:
    """The messages of one rank.

    Args:
        topology: Turns positions into global ranks.
        groups: One group per directed link of this rank's pipeline group.
        device: Where received tensors are put.
        timeout: Bound on every wait.
        shared_memory: Whether messages go through memory where both ends see the same.
    """

    def __init__(
        self,
        topology: Topology,
        groups: Mapping[tuple[int, int], ProcessGroup],
        device: torch.device,
        timeout: timedelta,
        *,
        shared_memory: bool = True,
    ) -> None:
        self._topology = topology
        self._groups = groups
        self._device = device
        self._timeout = timeout
        self._shares = shared_memory
        self._outboxes: dict[int, Outbox] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._waiting: defaultdict[int, deque[Message]] = defaultdict(deque)
        self._posted: dict[Message, tuple[Work, Tensor]] = {}
        self._sent: dict[Message, list[tuple[Work, Tensor]]] = {}
        self._new: Container[int] = ()

    @property
    def shared(self) -> tuple[tuple[int, int], ...]:
        """The links of this rank that go through memory, from and to which position."""
        here = self._topology.position
        return tuple(sorted([(here, at) for at in self._outboxes] + [(at, here) for at in self._inboxes]))

    def connect(self) -> None:
        """Connects both ends of every link, in one order, so that no connection is made within a schedule.

        NCCL makes its communicators at the first message, and then waits for both ends.
        """
        for (source, target), group in sorted(self._groups.items()):
            if source == self._topology.position:
                self._connect_to(target, group)
            elif target == self._topology.position:
                self._connect_from(source, group)

    def _connect_to(self, target: int, group: ProcessGroup) -> None:
        """Sends a first message, which offers shared memory, and takes the answer."""
        peer, outbox = self._topology.at(target), None
        if self._shares and self._device.type == "cpu":
            with suppress(OSError, AttributeError):  # there is no room; the system has no memory of that kind
                outbox = Outbox(self._timeout)
        offer = torch.tensor(outbox.offer if outbox else [0] * OFFER_LENGTH, device=self._device)
        dist.send(offer, peer, group=group)
        if self._device.type == "cpu":
            dist.recv(offer, peer, group=group)
        if outbox and offer[0]:
            outbox.settle()
            self._outboxes[target] = outbox

    def _connect_from(self, source: int, group: ProcessGroup) -> None:
        """Takes the first message, opens the memory that it offers, and answers whether it can."""
        peer = self._topology.at(source)
        offer = torch.zeros(OFFER_LENGTH, dtype=torch.int64, device=self._device)
        dist.recv(offer, peer, group=group)
        if self._device.type != "cpu":
            return
        if self._shares and offer[0]:
            with suppress(OSError):  # the other end is on another host, or in another container
                self._inboxes[source] = Inbox(offer.tolist(), self._timeout)
        dist.send(torch.full_like(offer, source in self._inboxes), peer, group=group)

    def post(self, message: Message, boundary: Boundary | None) -> None:
        """Starts a receive, if its shape is known and all earlier messages of its link have been posted.

        Otherwise it waits for its turn: a link's receives are posted in the order of its sends. Through shared memory
        messages come by themselves.
        """
        if message.source in self._inboxes:
            return
        waiting = self._waiting[message.source]
        if boundary is None or waiting or message.consumer.microbatch in self._new:
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
            RuntimeError: A receive was posted for another shape than is expected now, another was sent, or nothing
                comes.
        """
        if message.source in self._inboxes:
            return self._received_in_memory(message, boundary)
        if message not in self._posted:
            first = self._waiting[message.source].popleft()
            assert first == message
            self._receive_into_buffer(message, boundary)
        work, buffer = self._posted.pop(message)
        posted = Boundary(buffer.shape, buffer.dtype)
        if posted != boundary:
            raise RuntimeError(
                f"Message {message} was expected as {posted}, as for earlier batches of the same shapes, but this"
                f" microbatch needs {boundary}. The shape of the model's input must follow from the shapes of the"
                " batch."
            )
        work.wait()
        return buffer

    def _received_in_memory(self, message: Message, boundary: Boundary) -> Tensor:
        try:
            tensor = self._inboxes[message.source].receive(message.index, boundary)
        except BoundaryError as error:
            self._refuse(message, boundary, error.sent)
        except LinkError as error:
            peer = self._topology.at(message.source)
            raise RuntimeError(f"Message {message} was expected from rank {peer} as {boundary}: {error}.") from error
        if tensor is None:
            self._receive_into_buffer(message, boundary)
            work, tensor = self._posted.pop(message)
            work.wait()
        return tensor

    def _refuse(self, message: Message, expected: Boundary, sent: Boundary) -> NoReturn:
        source, target = self._topology.at(message.source), self._topology.at(message.target)
        raise RuntimeError(
            f"Rank {source} has sent {sent}, but rank {target} expects {expected}, as message {message}. In a pipeline"
            " the step runs on every rank, each for its stages, and must give the model input of the same shape on all"
            " of them: nothing that decides the shape, such as a crop, may depend on the rank."
        )

    def _is_introduced(self, message: Message) -> bool:
        """Whether what a message is goes in front of it; in shared memory it always does."""
        is_shared = message.source in self._inboxes or message.target in self._outboxes
        return not is_shared and message.consumer.microbatch in self._new

    def _receive_into_buffer(self, message: Message, boundary: Boundary) -> None:
        if self._is_introduced(message):
            group, tag = self._groups[message.source, message.target], _INTRODUCTIONS + message.index
            numbers = torch.zeros(NUM_NUMBERS, dtype=torch.int64, device=self._device)
            dist.recv(numbers, self._topology.at(message.source), group=group, tag=tag)
            sent = Boundary.of_numbers(numbers.tolist())
            if sent != boundary:
                self._refuse(message, boundary, sent)
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
            RuntimeError: The tensor is not what the receiver expects, or the receiver has gone.
        """
        given = Boundary(tensor.shape, tensor.dtype)
        if given != boundary:
            raise RuntimeError(
                f"Message {message} is {given}, but the receiving stage expects {boundary}: rows x length x hidden size"
                " of the model's input, in the type of the model's parameters."
            )
        tensor = tensor.detach()
        if message.target in self._outboxes and self._sent_in_memory(message, tensor):
            return
        if self._is_introduced(message):
            numbers = torch.tensor(given.as_numbers(), device=self._device)
            self._start_send(message, numbers, _INTRODUCTIONS + message.index)
        self._start_send(message, tensor.contiguous(), message.index)

    def _start_send(self, message: Message, tensor: Tensor, tag: int) -> None:
        work = dist.isend(
            tensor,
            dst=self._topology.at(message.target),
            group=self._groups[message.source, message.target],
            tag=tag,
        )
        assert work is not None
        self._sent.setdefault(message, []).append((work, tensor))

    def _sent_in_memory(self, message: Message, tensor: Tensor) -> bool:
        try:
            return self._outboxes[message.target].send(message.index, tensor)
        except LinkError as error:
            peer = self._topology.at(message.target)
            raise RuntimeError(f"Message {message} can't be sent to rank {peer}: {error}.") from error

    def release(self, message: Message) -> None:
        """Waits until a send is taken and gives its tensor back, if it was kept."""
        for work, _ in self._sent.pop(message, ()):
            work.wait()

    def close(self) -> None:
        """Gives up the memory of both ends that are here."""
        self._outboxes.clear()
        self._inboxes.clear()

    def begin(self, new: Container[int] = ()) -> None:
        """Starts the queues of a new step.

        Args:
            new: The microbatches of shapes that no rank has seen before, the same on all ranks.
        """
        self._waiting.clear()
        self._new = new

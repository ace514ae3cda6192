"""Who is where: global ranks, positions in a pipeline group, replicas of the group, and their process groups.

A position is what a schedule calls a rank. Positions run against the global ranks, so that the last stage of a
one-directional pipeline is on global rank 0, where people look for prints, loggers and predictions:

    global rank   0  1  2  3   4  5  6  7
    replica       0  0  0  0   1  1  1  1
    position      3  2  1  0   3  2  1  0

Where a pipe ends on position 0, as one in the shape of a V does, positions run with the global ranks for that reason.

Ranks that follow each other share a node as long as there is room. So they are the positions of a group, or, where sums
of gradients cost more than messages between stages, the replicas of a position:

    global rank   0  1  2  3   4  5  6  7
    replica       0  1  0  1   0  1  0  1
    position      3  3  2  2   1  1  0  0
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_chimera.schedules import Placement


@dataclass(frozen=True)
class Topology:
    """The map between global ranks and (replica, position), for one rank.

    Attributes:
        num_positions: Ranks of one pipeline group.
        num_replicas: Copies of the group.
        global_rank: This rank.
        ascending: Whether positions run with the global ranks.
        replicas_innermost: Whether the ranks that follow each other are the replicas of a position.
    """

    num_positions: int
    num_replicas: int
    global_rank: int
    ascending: bool = False
    replicas_innermost: bool = False

    @classmethod
    def of_world(
        cls,
        world_size: int,
        num_positions: int,
        global_rank: int,
        *,
        ascending: bool = False,
        replicas_innermost: bool = False,
    ) -> "Topology":
        """Divides a world into pipeline groups.

        Raises:
            ValueError: The world is not a multiple of the group.
        """
        if num_positions < 1 or world_size % num_positions:
            raise ValueError(
                f"num_stages={num_positions} does not divide the {world_size} processes of this run"
                f" (devices x num_nodes). Every pipeline group needs {num_positions} of them: use a multiple of"
                f" {num_positions} processes, or a num_stages that divides {world_size}."
            )
        return cls(num_positions, world_size // num_positions, global_rank, ascending, replicas_innermost)

    @property
    def world_size(self) -> int:
        """Number of global ranks."""
        return self.num_positions * self.num_replicas

    @property
    def replica(self) -> int:
        """The replica of this rank."""
        return self._coordinates[0]

    @property
    def position(self) -> int:
        """The position of this rank in its group."""
        return self._place(self._coordinates[1])

    @property
    def leader(self) -> int:
        """The lowest global rank of this rank's group: it draws the data and holds the last stage of pipe 0."""
        return self._rank(self.replica, 0)

    @property
    def is_leader(self) -> bool:
        """Whether this rank leads its group."""
        return self.global_rank == self.leader

    def at(self, position: int, replica: int | None = None) -> int:
        """The global rank at a position, in this rank's replica unless another is given."""
        return self._rank(self.replica if replica is None else replica, self._place(position))

    @property
    def _coordinates(self) -> tuple[int, int]:
        """The replica of this rank, and its number in its group."""
        if self.replicas_innermost:
            number, replica = divmod(self.global_rank, self.num_replicas)
            return replica, number
        return divmod(self.global_rank, self.num_positions)

    def _rank(self, replica: int, number: int) -> int:
        """The global rank of a number in a group."""
        if self.replicas_innermost:
            return number * self.num_replicas + replica
        return replica * self.num_positions + number

    def _place(self, number: int) -> int:
        """A position of a rank of the group, and the rank of a position."""
        return number if self.ascending else self.num_positions - 1 - number

    def group(self, replica: int | None = None) -> tuple[int, ...]:
        """The global ranks of a pipeline group, ascending."""
        return tuple(sorted(self.at(position, replica) for position in range(self.num_positions)))

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The global ranks of every pipeline group, by replica."""
        return tuple(self.group(replica) for replica in range(self.num_replicas))

    def leaders(self) -> tuple[int, ...]:
        """The leaders of all groups."""
        return tuple(self._rank(replica, 0) for replica in range(self.num_replicas))

    def peers(self) -> tuple[int, ...]:
        """The ranks at this rank's position in all replicas."""
        return tuple(self.at(self.position, replica) for replica in range(self.num_replicas))

    def holders(self, placement: Placement, stages: Iterable[int]) -> tuple[int, ...]:
        """The global ranks, over all replicas, that hold a copy of any of some stages."""
        positions = {pipe[stage] for pipe in placement.ranks for stage in stages}
        return tuple(
            sorted(self.at(position, replica) for position in positions for replica in range(self.num_replicas))
        )


class Groups:
    """The process groups of a run, each made by all ranks in one order.

    Control messages (batches, logs, decisions, checkpoints) travel over gloo groups on the CPU, apart from Lightning's
    own messages on the world group; activations and gradients over groups of the run's backend.

    Args:
        topology: The map of ranks.
        placement: Where the stages are; its neighbours are linked.
        holder_sets: The sets of global ranks that share a parameter.
        timeout: Bound on every wait.

    Attributes:
        world: All ranks, for control messages.
        pipeline: The ranks of this rank's pipeline group, for control messages.
        peers: The ranks at this position in all replicas, for control messages.
        leaders: The leaders of all groups, for control messages.
        links: One two-rank group per directed link of this rank's pipeline group, by (source, target) position.
        holders: One group per set of ranks that share parameters.
    """

    def __init__(
        self, topology: Topology, placement: Placement, holder_sets: Iterable[tuple[int, ...]], timeout: timedelta
    ) -> None:
        self._key = (topology, placement, _shared(holder_sets))
        self._control: dict[tuple[int, ...], ProcessGroup] = {}
        self._timeout = timeout
        replicas, positions = range(topology.num_replicas), range(topology.num_positions)
        self.world = self._control_group(tuple(range(topology.world_size)))
        self.pipeline = [self._control_group(topology.group(replica)) for replica in replicas][topology.replica]
        self.peers = [
            self._control_group(tuple(topology.at(position, replica) for replica in replicas)) for position in positions
        ][topology.position]
        self.leaders = self._control_group(topology.leaders())
        self.links = {
            (source, target): [
                self._new((topology.at(source, replica), topology.at(target, replica))) for replica in replicas
            ][topology.replica]
            for source, target in sorted(_neighbours(placement))
        }
        self.holders = {ranks: self._new(ranks) for ranks in _shared(holder_sets)}

    @classmethod
    def reuse(
        cls,
        made: "Groups | None",
        topology: Topology,
        placement: Placement,
        holder_sets: Iterable[tuple[int, ...]],
        timeout: timedelta,
    ) -> "Groups":
        """Groups that were made before, if they are what is needed now, else new ones."""
        if made is not None and made._key == (topology, placement, _shared(holder_sets)):
            return made
        return cls(topology, placement, holder_sets, timeout)

    def _control_group(self, ranks: tuple[int, ...]) -> ProcessGroup:
        """A gloo group, one for each set of ranks."""
        if ranks not in self._control:
            self._control[ranks] = self._new(ranks, backend="gloo")
        return self._control[ranks]

    def _new(self, ranks: tuple[int, ...], backend: str | None = None) -> ProcessGroup:
        group: ProcessGroup = dist.new_group(list(ranks), timeout=self._timeout, backend=backend)
        return group


def _shared(holder_sets: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """The sets of more than one holder, in one order."""
    return tuple(sorted(ranks for ranks in set(holder_sets) if len(ranks) > 1))


def _neighbours(placement: Placement) -> set[tuple[int, int]]:
    """The directed links between positions: activations go one way, their gradients the other."""
    links = {(source, target) for pipe in placement.ranks for source, target in pairwise(pipe) if source != target}
    return links | {(target, source) for source, target in links}

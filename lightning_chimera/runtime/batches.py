"""One draw of the data per pipeline group.

The leader of a group draws from the user's own loader and hands each batch to the other ranks of its group, so they all
see the same rows whatever shuffles, collates or augments. With several replicas, replica r takes every W-th batch of
the user's own order; samplers are never replaced. A loader that gives a replica's own share already (by the user's word
or by its ``DistributedSampler``) is taken as it is.
"""

import copy
import enum
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, Sampler

from lightning_chimera.runtime.exchange import Broadcast
from lightning_chimera.runtime.meeting import meeting
from lightning_chimera.runtime.microbatches import check_dense, leaves
from lightning_chimera.runtime.randomness import States, get_states, set_states
from lightning_chimera.runtime.topology import Groups, Topology


class Ending(enum.Enum):
    """When a loader ends, where replicas have different numbers of batches."""

    SHORTEST = "training: with the first replica that has no batch left, so that all steps are whole"
    LONGEST = "evaluation: when every row has been seen"
    OWN = "prediction: each replica on its own"


class GroupLoader:
    """A user's loader, seen by one rank of a pipeline group.

    Anything it does not know itself (``dataset``, ``sampler``, ``batch_size``, ...) is asked of the user's loader.

    Args:
        loader: The user's loader: a ``DataLoader`` or any iterable.
        topology: Where this rank is.
        groups: Control groups.
        ending: When to end.
        warn: Told once if rows are left out.
        deals: Whether the loader's batches are to be dealt to the replicas; if not, each takes its own loader as it is.
    """

    def __init__(
        self,
        loader: Any,
        topology: Topology,
        groups: Groups,
        ending: Ending,
        warn: Callable[[str], None],
        *,
        deals: bool = True,
    ) -> None:
        self._deals = not _is_share(loader, topology) and deals and topology.num_replicas > 1
        self._loader = _shard(loader, topology, groups) if self._deals else loader
        self._own_share = not self._deals or self._loader is not loader
        self._lengths = [] if self._deals or topology.num_replicas == 1 else _lengths(loader, topology, groups)
        self._topology = topology
        self._groups = groups
        self._ending = ending
        self._warn = warn
        self._share_batch = Broadcast(groups.pipeline, topology.leader, is_source=topology.is_leader)
        self._surplus_from: int | None = None
        self.handed = 0
        """Batches of this epoch that have been handed to a step; a fetcher may have drawn more."""

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not set yet: being unpickled or copied
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property
    def _iterator(self) -> Any:
        """The running iterator of the user's loader, which Lightning resets at the end of a run."""
        return getattr(self._loader, "_iterator", None)

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self._loader._iterator = iterator

    def __len__(self) -> int:
        """Number of batches that this replica will see.

        Raises:
            TypeError: The user's loader has no length.
        """
        replicas, replica = self._topology.num_replicas, self._topology.replica
        if not self._deals:
            return self._own_length()
        count = getattr(self._loader, "num_all_batches", None) if self._own_share else None
        count = len(self._loader) if count is None else count
        if self._ending is Ending.SHORTEST:
            return int(count // replicas)
        return -(-(count - (0 if self._ending is Ending.LONGEST else replica)) // replicas)

    def _own_length(self) -> int:
        """Number of batches where each replica takes its own loader as it is."""
        known = [length for length in self._lengths if length is not None]
        if not known or len(known) < len(self._lengths):
            return len(self._loader)
        ends = {Ending.SHORTEST: min(known), Ending.LONGEST: max(known)}
        return ends.get(self._ending, known[self._topology.replica])

    def hand_over(self) -> None:
        """Notes that the next batch goes to a step."""
        self.handed += 1

    @property
    def is_surplus(self) -> bool:
        """Whether the last batch that was handed over was lent only to keep step with others, and must not count."""
        return self._surplus_from is not None and self.handed > self._surplus_from

    def __iter__(self) -> Iterator[Any]:
        """Draws the batches of one epoch, or receives them."""
        self._surplus_from = None
        self.handed = 0
        own = self._draw() if self._topology.is_leader else None
        sampler: Any = getattr(self._loader, "batch_sampler", None)
        if _is_tracked(sampler) and own is None:
            sampler.seen_batch_indices = []
        indices = getattr(sampler, "seen_batch_indices", None)
        number = 0
        while True:
            with meeting("the next batch"):
                status, batch, rows = self._share_batch(self._next(own, indices, number) if own is not None else None)
            if status == "end":
                return
            if status == "none":
                raise TypeError(
                    f"The data loader yields None instead of batch {number} on some of the"
                    f" {self._topology.num_replicas} replicas only: the others would wait for a step that these leave"
                    " out. Leave such batches out in the data set or the sampler, or yield None on all replicas alike."
                )
            if status == "surplus" and self._surplus_from is None:
                self._surplus_from = number
            if rows is not None and indices is not None and own is None:
                indices.append(rows)
            yield batch
            number += 1

    def _draw(self) -> Iterator[Any]:
        """This replica's batches, on the leader."""
        if self._own_share:
            return iter(self._loader)
        return islice(iter(self._loader), self._topology.replica, None, self._topology.num_replicas)

    def _next(self, own: Iterator[Any], indices: Any, number: int) -> tuple[str, Any, Any]:
        """What the leader hands out: how it stands, the batch, and the indices of its rows if someone collects them."""
        batch, has = _try_next(own)
        if has and self._topology.num_positions > 1:
            for leaf in leaves(batch):
                check_dense(leaf)
        if self._topology.num_replicas > 1 and self._ending is not Ending.OWN:
            status, batch = self._agree(batch, has=has)
        else:
            status = "batch" if has else "end"
        rows = indices[number] if indices is not None and status == "batch" and number < len(indices) else None
        return status, batch, rows

    def _agree(self, batch: Any, *, has: bool) -> tuple[str, Any]:
        """Settles between the leaders of all replicas whether to go on, and lends a batch to those that have none."""
        nobody, is_none = self._topology.world_size, has and batch is None
        is_some = has and not is_none
        votes = torch.tensor([int(has), self._topology.leader if has else nobody, int(not is_none), int(not is_some)])
        dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=self._groups.leaders)
        everyone, lender, nowhere_none, all_none = votes.tolist()
        someone = lender < nobody
        if not nowhere_none and not all_none:
            return "none", None
        if everyone:
            return "batch", batch
        if not someone or self._ending is Ending.SHORTEST:
            if someone and has:
                self._warn(
                    f"The {self._topology.num_replicas} replicas do not have equally many batches: the last ones of"
                    " each epoch are left out of training, so that every step has a batch from every replica."
                )
            return "end", None
        lent = [batch]
        dist.broadcast_object_list(lent, lender, group=self._groups.leaders)
        return ("batch", batch) if has else ("surplus", lent[0])


def hand_over(batches: Sequence[Any], loaders: Sequence[Any], mode: str) -> tuple[list[Any], bool]:
    """Notes that batches that several loaders gave at once go to a step, and leaves out what must not count.

    Args:
        batches: One of each loader; ``None`` for one that has ended.
        loaders: The loaders.
        mode: How they are combined: ``min_size``, ``max_size`` or ``max_size_cycle``.

    Returns:
        The batches, of ``max_size`` without those that are lent, and whether they count.

    Raises:
        RuntimeError: Of the longest loaders some have lent a batch and some have not.
    """
    given = [index for index, batch in enumerate(batches) if batch is not None]
    known = [index for index in given if isinstance(loaders[index], GroupLoader)]
    for index in known:
        loaders[index].hand_over()
    surplus = {index for index in known if loaders[index].is_surplus}
    if not surplus or mode == "min_size":  # which ends with the first that has no batch left
        return list(batches), not surplus
    if len(surplus) == len(given):
        return list(batches), False
    if mode == "max_size":
        return [None if index in surplus else batch for index, batch in enumerate(batches)], True
    lengths = {index: _length(loaders[index]) for index in known}
    longest = [index for index in known if lengths[index] == max(lengths.values())]
    lent = [index in surplus for index in longest]
    if any(lent) and not all(lent):
        raise RuntimeError(
            f"{len(lent)} loaders of a CombinedLoader of mode 'max_size_cycle' are equally long, and of some of them"
            " only this replica has no batch left, so rows would count twice. Give loaders whose numbers of batches the"
            " number of replicas divides, or the mode 'max_size' or 'sequential'."
        )
    return list(batches), not all(lent)


def _try_next(iterator: Iterator[Any]) -> tuple[Any, bool]:
    try:
        return next(iterator), True
    except StopIteration:
        return None, False


def _length(loader: Any) -> float:
    try:
        return len(loader)
    except TypeError:
        return math.inf


def _lengths(loader: Any, topology: Topology, groups: Groups) -> list[int | None]:
    """The length of each replica's loader, by what its leader says; every rank must call it."""
    try:
        own: int | None = len(loader)
    except TypeError:
        own = None
    gathered: list[int | None] = [None] * topology.world_size
    dist.all_gather_object(gathered, own, group=groups.world)
    return [gathered[leader] for leader in topology.leaders()]


def _is_share(loader: Any, topology: Topology) -> bool:
    """Whether a loader's sampler or data set gives this replica's share of the rows.

    Raises:
        ValueError: It gives a share, but not this replica's.
    """
    wanted = (topology.num_replicas, topology.replica)
    shares = list(_shares(loader))
    for name, count, rank in shares:
        if (count, rank) != wanted:
            raise ValueError(
                f"The data loader's {name} gives share {rank} of {count}, but this rank belongs to replica {wanted[1]}"
                f" of {wanted[0]}: the {topology.num_positions} ranks of a pipeline train on the same rows, so rows are"
                " shared between replicas, not ranks. Leave the sampler out, since the batches of any loader are dealt"
                " to the replicas; or make the share by **trainer.strategy.distributed_sampler_kwargs."
            )
    return bool(shares)


def _shares(loader: Any) -> Iterator[tuple[str, int, int]]:
    """The distributed samplers of a loader, however deep in other samplers, and its data set if it is a node's share.

    They are known by what torch's, and those made after it, have; a HuggingFace stream split by node has the same.
    """
    split: Any = getattr(getattr(loader, "dataset", None), "_distributed", None)
    if hasattr(split, "world_size") and hasattr(split, "rank"):
        yield type(loader.dataset).__name__, split.world_size, split.rank
    parts, seen = [getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)], set()
    while parts:
        part = parts.pop()
        if id(part) in seen or not hasattr(part, "__dict__"):
            continue
        seen.add(id(part))
        values = vars(part)
        if isinstance(values.get("num_replicas"), int) and isinstance(values.get("rank"), int):
            yield type(part).__name__, values["num_replicas"], values["rank"]
        parts += [value for name, value in values.items() if isinstance(value, Sampler) or "sampler" in name]


def _is_tracked(sampler: Any) -> bool:
    """Whether a batch sampler is Lightning's wrapper of the user's, which notes what it draws."""
    return type(sampler).__name__ == "_IndexBatchSamplerWrapper"  # by its name, since the runtime knows no Trainer


def _shard(loader: Any, topology: Topology, groups: Groups) -> Any:
    """A loader that fetches only this replica's batches, if the user's loader has a batch sampler to take them from."""
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or sampler is None or isinstance(loader.dataset, IterableDataset):
        return loader  # the batch sampler of an iterable data set only says how many rows to take
    tracked = _is_tracked(sampler)
    own = _ReplicaBatchSampler(sampler._batch_sampler if tracked else sampler, topology, groups)
    # A copy, not a new DataLoader: that would need the constructor of the user's class.
    sharded = copy.copy(loader)
    sharded.__dict__["batch_sampler"] = type(sampler)(own) if tracked else own
    sharded.__dict__["num_all_batches"] = len(loader) if hasattr(sampler, "__len__") else None
    return sharded


class _ReplicaBatchSampler:
    """Every W-th batch of a user's batch sampler.

    All replicas walk through the whole order, so they must draw the same random numbers for it: the generators' states
    of global rank 0 are taken over at the start of an epoch and used for the sampler only.
    """

    def __init__(self, sampler: Any, topology: Topology, groups: Groups) -> None:
        self.__dict__.update(getattr(sampler, "__dict__", {}))  # any iterable will do, a list of batches for one
        self._user_sampler = sampler
        self._topology = topology
        self._groups = groups

    def __iter__(self) -> Iterator[Any]:
        states = [get_states()]
        dist.broadcast_object_list(states, 0, group=self._groups.leaders)
        shared = _Generators(states[0])
        with shared:
            iterator = iter(self._user_sampler)
        for number in range(2**63):
            with shared:
                batch, has = _try_next(iterator)
            if not has:
                return
            if number % self._topology.num_replicas == self._topology.replica:
                yield batch

    def __len__(self) -> int:
        replicas, replica = self._topology.num_replicas, self._topology.replica
        return -(-(len(self._user_sampler) - replica) // replicas)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_groups"}


class _Generators:
    """Global generators of another epoch, put in force for a while and carried on from where they were left."""

    def __init__(self, states: States) -> None:
        self._inside = states

    def __enter__(self) -> None:
        self._outside = get_states()
        set_states(self._inside)

    def __exit__(self, *_: object) -> None:
        self._inside = get_states()
        set_states(self._outside)

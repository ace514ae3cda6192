"""Lightning's collectives where a pipeline group counts as one process: values are reduced over the replicas."""

from abc import abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.fabric.utilities.distributed import _distributed_is_initialized
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from typing_extensions import override

from lightning_chimera.engine import Engine
from lightning_chimera.reporting import check_group
from lightning_chimera.runtime.agreement import check_in_group, describe
from lightning_chimera.runtime.meeting import met
from lightning_chimera.runtime.topology import Groups, Topology


class ReplicaCollectives(ParallelStrategy):
    """The part of a strategy in which Lightning, callbacks and users let ranks meet; refused inside a step."""

    _engine: Engine | None = None

    @property
    @abstractmethod
    def topology(self) -> Topology:
        """Where this rank is."""

    @property
    def engine(self) -> Engine:
        """The stages on this rank.

        Raises:
            RuntimeError: No run has been set up.
        """
        if self._engine is None:
            raise RuntimeError(
                "ChimeraStrategy has no stages before the Trainer has set it up (in fit, validate, ...)."
            )
        return self._engine

    @property
    def _groups(self) -> Groups | None:
        return None if self._engine is None else self._engine.groups

    def _refuse_in_step(self, what: str) -> None:
        if self._engine is not None and self._engine.in_step:
            raise RuntimeError(
                f"{what} was called inside a step. There each rank runs its own part of the pipeline, so the ranks"
                " can't meet: log values with self.log, which is equal on all ranks, or call it in a hook around the"
                " step."
            )

    @override
    @met("strategy.barrier()")
    def barrier(self, name: str | None = None) -> None:
        self._refuse_in_step("strategy.barrier()")
        if _distributed_is_initialized():
            dist.barrier(group=self._groups.world if self._groups is not None else None)

    @override
    @met("strategy.broadcast()")
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self._refuse_in_step("strategy.broadcast()")
        if not _distributed_is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def _of_rank_zero(self, value: Any) -> Any:
        """Global rank 0's value, on this rank's device."""
        return move_data_to_device(self.broadcast(move_data_to_device(value, torch.device("cpu"))), self.root_device)

    @override
    @met("strategy.reduce() or self.log(sync_dist=True)")
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a value over the replicas; inside a pipeline group it is the same everywhere."""
        self._refuse_in_step("strategy.reduce()")
        check_group(group)
        if not isinstance(tensor, Tensor) or self._groups is None or self.topology.num_replicas == 1:
            return tensor
        self._check_call("strategy.reduce() or self.log(sync_dist=True)", tensor)
        shared = tensor.detach().cpu().clone()
        is_mean = str(reduce_op).lower() in ("mean", "avg", "redoptype.avg")
        op = dist.ReduceOp.SUM if is_mean else getattr(dist.ReduceOp, str(reduce_op).rpartition(".")[2].upper())
        dist.all_reduce(shared, op=op, group=self._groups.peers)
        if is_mean:
            shared = shared / self.topology.num_replicas
        return tensor.copy_(shared) if shared.dtype == tensor.dtype else shared.to(tensor.device)

    @override
    @met("self.all_gather()")
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gathers a tensor over the replicas."""
        self._refuse_in_step("self.all_gather()")
        check_group(group)
        if self._groups is None or self.topology.num_replicas == 1:
            return tensor
        self._check_call("self.all_gather()", tensor)
        gathered: list[Any] = [None] * self.topology.num_replicas
        dist.all_gather_object(gathered, tensor.detach().cpu(), group=self._groups.peers)
        return torch.stack(gathered).to(tensor.device)

    def _check_call(self, call: str, tensor: Tensor) -> None:
        """Refuses a call that meets another one on another replica, since a replica has left one out."""
        assert self.lightning_module is not None
        assert self._groups is not None
        hook = self.lightning_module._current_fx_name or "no hook of the module"
        step = self.lightning_module.trainer.global_step
        facts = {"call": f"{call} in {hook} after step {step}", **describe(tensor, "the tensor given to it")}
        check_in_group(facts, "in a call that all replicas must make", self._groups.peers)

    @override
    @met("strategy.reduce_boolean_decision()")
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Agrees on a decision over the whole world, since one rank's refusal must stop all."""
        self._refuse_in_step("strategy.reduce_boolean_decision()")
        if self._groups is None:
            return decision
        votes = torch.tensor(int(decision))
        dist.all_reduce(votes, group=self._groups.world)
        return int(votes) == self.world_size if all else bool(votes)

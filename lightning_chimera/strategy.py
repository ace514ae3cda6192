"""ChimeraStrategy: Lightning's hooks, and nothing else; the work is done in the rooms below."""

import atexit
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
)
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from lightning_utilities.core.rank_zero import rank_zero_only as utils_rank_zero_only
from rich.console import Console
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_chimera import checkpoint
from lightning_chimera.launch import ScriptLauncher
from lightning_chimera.partition.anatomy import Anatomy, find_anatomy
from lightning_chimera.partition.balance import balance, check_cuts, layer_costs
from lightning_chimera.partition.ownership import Ownership
from lightning_chimera.partition.stage import HeadCall, StageRunner
from lightning_chimera.plan import plan_table
from lightning_chimera.reporting import MetricSync, Report, combine, recording, replay, weighted_mean
from lightning_chimera.runtime.batches import Ending, GroupLoader
from lightning_chimera.runtime.gradients import GradientSync, clip_by_norm
from lightning_chimera.runtime.links import Links
from lightning_chimera.runtime.microbatches import split
from lightning_chimera.runtime.packing import Broadcast
from lightning_chimera.runtime.pipeline import Call, Pipeline, TrainingCall
from lightning_chimera.runtime.randomness import keyed, mix
from lightning_chimera.runtime.topology import Groups, Topology
from lightning_chimera.runtime.weights import LossWeights
from lightning_chimera.schedules import Schedule, default_num_microbatches, get_family, validate
from lightning_chimera.timeline import Timeline

Builder = Callable[[int, int], Schedule]
"""Makes a schedule from a number of stages and a number of microbatches."""


class ChimeraStrategy(ParallelStrategy):
    """Trains an unchanged LightningModule around a HuggingFace model as a pipeline.

    Args:
        schedule: A name (``chimera``, ``gpipe``, ``1f1b``), a function of (stages, microbatches), or a Schedule.
        num_stages: Stages of the pipeline, one position each; all processes by default. With more processes than stages
            the group is replicated.
        num_microbatches: Parts of a batch; by default one per stage for Chimera and two per stage else.
        cuts: First block of each stage but the first; balanced by estimated cost by default.
        timeout: Bound in seconds on every wait for another rank.
        start_method: How the processes of a node are started if nobody else does.
        print_plan: Whether global rank 0 prints the plan at the start.
        process_group_backend: ``gloo`` on the CPU and ``nccl`` on CUDA by default.
        accelerator: As in Lightning's strategies, like all that follow.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer.
        checkpoint_io: Set by the Trainer.
        precision_plugin: Set by the Trainer.

    Raises:
        ValueError: An argument is out of its range.
    """

    def __init__(
        self,
        schedule: str | Builder | Schedule = "chimera",
        num_stages: int | None = None,
        num_microbatches: int | None = None,
        cuts: Sequence[int] | None = None,
        timeout: float | timedelta = 300.0,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        print_plan: bool = True,
        process_group_backend: str | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        for name, value in (("num_stages", num_stages), ("num_microbatches", num_microbatches)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value!r}: it must be a whole number of at least 1.")
        self._timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        if self._timeout <= timedelta(0):
            raise ValueError(f"timeout={timeout!r}: it must be a positive number of seconds.")
        methods = ("popen", "spawn", "fork", "forkserver")
        if start_method not in methods:
            raise ValueError(f"start_method={start_method!r}: it must be one of {', '.join(methods)}.")
        self._schedule = schedule
        self._num_stages = num_stages
        self._num_microbatches = num_microbatches
        self._cuts = cuts
        self._start_method = start_method
        self._print_plan = print_plan
        self._process_group_backend = process_group_backend
        self._num_nodes = 1
        self._build, self._fixed = _builder(schedule)
        if self._fixed is not None:
            self._num_stages, self._num_microbatches = _fixed_sizes(self._fixed, num_stages, num_microbatches)
        self._forget_run()

    def _forget_run(self) -> None:
        """Drops what belongs to one run of the Trainer."""
        self._topology: Topology | None = None
        self._groups: Groups | None = None
        self._ownership: Ownership | None = None
        self._pipeline: Pipeline | None = None
        self._gradient_sync: GradientSync | None = None
        self._metric_sync: MetricSync | None = None
        self._share_result: Broadcast | None = None
        self._pending: list[tuple[nn.Parameter, Tensor | None]] = []
        self._seed = 0
        self._in_step = False
        self._is_cut = False

    # ---------------------------------------------------------------------------------------------- environment

    @property
    def is_distributed(self) -> bool:
        """Whether there are replicas; read by Lightning where it shares values between them."""
        return self._resolve_topology().num_replicas > 1

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """Number of nodes; set by the Trainer."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Number of processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def process_group_backend(self) -> str | None:
        """The backend of gradients and activations."""
        return self._process_group_backend

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        topology = self._resolve_topology()
        return {"num_replicas": topology.num_replicas, "rank": topology.replica}

    @property
    def topology(self) -> Topology:
        """Where this rank is."""
        return self._resolve_topology()

    def _resolve_topology(self) -> Topology:
        if self._topology is None or self._topology.global_rank != self.global_rank:
            world = self.num_nodes * self.num_processes
            self._topology = Topology.of_world(world, self._num_stages or world, self.global_rank)
        return self._topology

    @override
    def _configure_launcher(self) -> None:
        self._check_sizes()
        assert self.cluster_environment is not None
        if self._start_method == "popen":
            self._launcher = ScriptLauncher(
                self._check_module, self.cluster_environment, self.num_processes, self.num_nodes
            )
        else:
            self._launcher = _MultiProcessingLauncher(self, start_method=self._start_method)

    def _check_sizes(self) -> None:
        """Refuses sizes that do not fit, before any process is started."""
        topology = self._resolve_topology()
        validate(self._build(topology.num_positions, self._microbatches()))

    def _microbatches(self) -> int:
        """Number of microbatches of a batch with enough rows."""
        if self._num_microbatches is not None:
            return self._num_microbatches
        stages = self._resolve_topology().num_positions
        return default_num_microbatches(self._schedule, stages) if isinstance(self._schedule, str) else 2 * stages

    def _check_module(self, module: LightningModule) -> None:
        """Refuses a module that can't be trained."""
        if not module.automatic_optimization:
            raise MisconfigurationException(
                f"{type(module).__name__} sets automatic_optimization=False. A pipeline runs forward and backward of all"
                " microbatches inside one training step, so it needs automatic optimization: return the loss from"
                " training_step and remove manual_backward."
            )
        if self._layer_sync is not None:
            raise MisconfigurationException("Trainer(sync_batchnorm=True) is not supported by ChimeraStrategy.")
        if any(isinstance(part, nn.Module) for part in module.children()) and not _defines(module, "configure_model"):
            self._choose_cuts(module, find_anatomy(module))

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        self._process_group_backend = self._process_group_backend or _get_default_process_group_backend_for_device(
            self.root_device
        )
        assert self.cluster_environment is not None
        if not _distributed_is_initialized():
            _init_dist_connection(self.cluster_environment, self._process_group_backend, timeout=self._timeout)
            atexit.register(_leave_process_group)

    def set_world_ranks(self) -> None:
        """Tells the environment the ranks that follow from the numbers of nodes and devices."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = utils_rank_zero_only.rank = self.global_rank

    # ---------------------------------------------------------------------------------------------- set-up

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        self._check_module(self.lightning_module)
        # The group's leader draws from the user's own loader; see runtime/batches.py. There is no public switch for it.
        trainer._accelerator_connector.use_distributed_sampler = False
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        self._cut(self.lightning_module)
        if trainer.state.fn == TrainerFn.FITTING:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
            self._check_optimizers()
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _choose_cuts(self, module: nn.Module, anatomy: Anatomy) -> tuple[int, ...]:
        stages = self._resolve_topology().num_positions
        if self._cuts is not None:
            return check_cuts(self._cuts, anatomy.num_blocks, stages)
        paired = self._build(stages, self._microbatches()).num_pipes > 1
        return balance(layer_costs(module, anatomy), stages, paired=paired)

    def _cut(self, module: LightningModule) -> None:
        """Keeps this rank's stages of a whole module, and makes the pipeline that runs them."""
        topology = self._resolve_topology()
        anatomy = find_anatomy(module)
        runner = StageRunner(anatomy, self._choose_cuts(module, anatomy))
        schedule = self._build(topology.num_positions, self._microbatches())
        ownership = Ownership(
            module, runner, lambda stages: topology.holders(schedule.placement, stages), self.global_rank
        )
        if self._print_plan and self.is_global_zero:
            self._print(module, schedule, runner)
        if self._groups is None:
            self._groups = Groups(topology, schedule.placement, ownership.holder_sets(), self._timeout)
        self._ownership = ownership
        ownership.drop()
        self._is_cut = True
        self.model_to_device()
        self._synchronize(module)
        links = Links(topology, self._groups.links, self.root_device)
        self._pipeline = Pipeline(
            runner,
            links,
            topology.position,
            lambda count: self._build(topology.num_positions, count),
            (self._seed, topology.replica),
        )
        self._gradient_sync = GradientSync(ownership, self._groups.holders)
        self._metric_sync = MetricSync(module, self._groups.world)
        self._share_result = Broadcast(self._groups.pipeline, topology.leader, is_source=topology.is_leader)

    def _print(self, module: nn.Module, schedule: Schedule, runner: StageRunner) -> None:
        """Prints the plan, once."""
        costs, parameters = [0] * runner.num_stages, [0] * runner.num_stages
        for layer, cost in enumerate(layer_costs(module, runner.anatomy)):
            costs[runner.stage_of(layer)] += cost
        for name, parameter in module.named_parameters():
            layer = runner.anatomy.layer_of(name)
            if layer is not None:
                parameters[runner.stage_of(layer)] += parameter.numel()
        Console().print(plan_table(schedule, self.topology, runner, costs, parameters))
        self._print_plan = False

    def _synchronize(self, module: nn.Module) -> None:
        """Makes all copies of a stage equal: those of the lowest holder win, and the buffers of global rank 0."""
        assert self._ownership is not None and self._groups is not None
        for parameter in self._ownership.held():
            ranks = self._ownership.holders[parameter]
            if len(ranks) > 1:
                dist.broadcast(parameter.detach(), ranks[0], group=self._groups.holders[ranks])
        for buffer in module.buffers():
            if buffer.numel() and not buffer.is_meta:
                shared = buffer.detach().cpu().contiguous()
                dist.broadcast(shared, 0, group=self._groups.world)
                buffer.detach().copy_(shared)
        seed = [int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed()))]
        dist.broadcast_object_list(seed, 0, group=self._groups.world)
        self._seed = seed[0]

    def _check_optimizers(self) -> None:
        """Refuses optimizers that call the step more than once."""
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in self.optimizers):
            raise MisconfigurationException(
                "LBFGS evaluates the step several times per optimizer step, which a pipeline does not support."
                " Use a first-order optimizer."
            )

    @override
    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()

        def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
            assert self._ownership is not None and self._groups is not None
            parameters = self.precision_plugin.main_params(optimizer)
            clip_by_norm(parameters, clip_val, self._ownership, self._groups.world)

        # On the instance: the plugin's class name is the key of its state in checkpoints.
        self.precision_plugin.__dict__["clip_grad_by_norm"] = clip_grad_by_norm

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            if not tensor.is_meta:
                tensor.data = tensor.data.to(self.root_device)

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # Not on the device: the whole model would not fit there.
        with torch.device("meta") if empty_init else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    # ---------------------------------------------------------------------------------------------- data

    @override
    def process_dataloader(self, dataloader: object) -> object:
        assert self._groups is not None and self.lightning_module is not None
        stage = self.lightning_module.trainer.state.stage
        ending = {RunningStage.TRAINING: Ending.SHORTEST, RunningStage.PREDICTING: Ending.OWN}.get(
            stage, Ending.LONGEST
        )
        return GroupLoader(dataloader, self.topology, self._groups, ending, rank_zero_warn)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        with keyed(self._seed, self.topology.replica, *self._step_key(), dataloader_idx):
            return super().batch_to_device(batch, device, dataloader_idx)

    def _step_key(self) -> tuple[int, ...]:
        """What the random draws of this step depend on."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        return (trainer.global_step, trainer.fit_loop.total_batch_idx)

    # ---------------------------------------------------------------------------------------------- steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._pipeline is not None and self._ownership is not None and self._groups is not None
        module, groups = self.lightning_module, self._groups
        assert module is not None
        batch, *rest = args
        microbatches = split(batch, self._microbatches())
        weights = LossWeights(
            microbatches,
            find_head_loss(self._pipeline),
            getattr(module, "microbatch_weight", None),
            groups.peers,
        )
        losses: list[tuple[float, Tensor]] = []
        reports: list[Report] = []
        latest: list[Any] = []

        def step(data: Any) -> Any:
            with recording(module) as calls:
                latest[:] = [calls]
                return module.training_step(data, *rest, **kwargs)

        def finish(number: int, result: Any, head: HeadCall) -> Tensor | None:
            loss = _loss_of(result, module)
            share = weights.share(number, own_loss=loss is head.loss, labels=head.labels)
            losses.append((share, loss.detach()))
            reports.append(Report(share, latest[0]))
            return loss * (share / module.trainer.accumulate_grad_batches) if share else None

        call = TrainingCall(step, self.precision_plugin.train_step_context, self._step_key(), finish, module.backward)
        with self._stepping(), self._apart():
            self._pipeline.train(microbatches, call)
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, (losses, reports), group=groups.world)
        all_losses = [entry for own, _ in gathered for entry in own]
        replay(module, combine([report for _, own in gathered for report in own]), weights.total_rows)
        shares, values = zip(*all_losses, strict=True)
        total = weighted_mean(shares, torch.stack([value.cpu().double() for value in values]))
        return {"loss": total.to(self.root_device, values[0].dtype)}

    @contextmanager
    def _apart(self) -> Generator[None, None, None]:
        """Sets the gradients of this step apart.

        Lightning calls zero_grad between the step and its backward, so they are put in place by ``backward``.
        """
        assert self._ownership is not None
        held = self._ownership.held()
        before = [parameter.grad for parameter in held]
        for parameter in held:
            parameter.grad = None
        yield
        self._pending = [(parameter, parameter.grad) for parameter in held]
        for parameter, gradient in zip(held, before, strict=True):
            parameter.grad = gradient

    @contextmanager
    def _stepping(self) -> Generator[None, None, None]:
        """Marks the time in which the ranks do different things, so that a collective of the user can't work."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        assert self.lightning_module is not None
        # The base class's hook calls only: mixed precision would scale a loss whose backward has run already.
        Precision.pre_backward(self.precision_plugin, closure_loss, self.lightning_module)
        for parameter, gradient in self._pending:
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._pending = []
        return self.precision_plugin.post_backward(closure_loss, self.lightning_module)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        def synchronized() -> Any:
            loss = closure()
            assert self._gradient_sync is not None
            self._gradient_sync.reduce()
            return loss

        return super().optimizer_step(optimizer, synchronized, model, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", self.precision_plugin.val_step_context, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", self.precision_plugin.test_step_context, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", self.precision_plugin.predict_step_context, args, kwargs)

    def _evaluate(self, name: str, context: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the user's step once per batch on the group's leader, and shares what it logged and returned."""
        assert self._pipeline is not None and self._groups is not None and self._share_result is not None
        module = self.lightning_module
        assert module is not None
        batch, *rest = args
        microbatches = split(batch, self._microbatches())
        rows = sum(microbatch.rows for microbatch in microbatches)
        counts = not self._is_surplus(name, rest)
        grown: dict[str, list[Any]] = {}
        logged: list[Any] = []

        def step(data: Any) -> Any:
            lengths = {key: len(value) for key, value in vars(module).items() if type(value) is list}
            with recording(module) as calls:
                result = getattr(module, name)(data, *rest, **kwargs)
            logged[:] = calls
            grown.update({key: vars(module)[key][length:] for key, length in lengths.items()})
            return result

        result = None
        if counts:
            with self._stepping():
                result = self._pipeline.evaluate(batch, microbatches, Call(step, context, self._step_key()))
            result, grown = self._share_result((result, {k: v for k, v in grown.items() if v}))
            if not self.topology.is_leader:
                for key, values in grown.items():
                    vars(module)[key].extend(values)
        if name != "predict_step":
            own = Report(float(rows), logged) if counts and self.topology.is_leader else None
            gathered: list[Any] = [None] * self.world_size
            dist.all_gather_object(gathered, own, group=self._groups.world)
            reports = [report for report in gathered if report is not None]
            replay(module, combine(reports), int(sum(report.share for report in reports)))
        return result

    def _is_surplus(self, name: str, rest: Sequence[Any]) -> bool:
        """Whether a batch was lent to this replica only to keep step; see runtime/batches.py."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        loaders = {
            "validation_step": trainer.val_dataloaders,
            "test_step": trainer.test_dataloaders,
            "predict_step": trainer.predict_dataloaders,
        }[name]
        flat = torch.utils._pytree.tree_leaves(loaders)
        batch_index, loader_index = (*rest, 0, 0)[:2] if rest else (0, 0)
        loader = flat[loader_index] if loader_index < len(flat) else None
        return isinstance(loader, GroupLoader) and loader.is_surplus(batch_index)

    def timeline(self) -> Timeline | None:
        """When the actions of the last training step ran, over this pipeline group, on global rank 0.

        Every rank must call it.
        """
        assert self._pipeline is not None and self._groups is not None
        gathered: list[Any] = [None] * dist.get_world_size(self._groups.pipeline)
        dist.all_gather_object(gathered, self._pipeline.executor.spans, group=self._groups.pipeline)
        spans = [span for own in gathered for span in own]
        if not spans:
            return None
        start = min(span.start for span in spans)
        moved = tuple(span._replace(start=span.start - start, end=span.end - start) for span in spans)
        return Timeline("measured", self.topology.num_positions, moved)

    # ---------------------------------------------------------------------------------------------- collectives

    def _refuse_in_step(self, what: str) -> None:
        if self._in_step:
            raise RuntimeError(
                f"{what} was called inside a step. There each rank runs its own part of the pipeline, so the ranks can't"
                " meet: log values with self.log, which is equal on all ranks, or call it in a hook around the step."
            )

    @override
    def barrier(self, name: str | None = None) -> None:
        self._refuse_in_step("strategy.barrier()")
        if _distributed_is_initialized():
            dist.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self._refuse_in_step("strategy.broadcast()")
        if not _distributed_is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a value over the replicas; inside a pipeline group it is the same everywhere."""
        self._refuse_in_step("strategy.reduce()")
        if not isinstance(tensor, Tensor) or self._groups is None or self.topology.num_replicas == 1:
            return tensor
        shared = tensor.detach().cpu().clone()
        is_mean = str(reduce_op).lower() in ("mean", "avg", "redoptype.avg")
        op = dist.ReduceOp.SUM if is_mean else getattr(dist.ReduceOp, str(reduce_op).rpartition(".")[2].upper())
        dist.all_reduce(shared, op=op, group=self._groups.peers)
        if is_mean:
            shared = shared / self.topology.num_replicas
        return tensor.copy_(shared) if shared.dtype == tensor.dtype else shared.to(tensor.device)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gathers a tensor over the replicas."""
        self._refuse_in_step("self.all_gather()")
        if self._groups is None or self.topology.num_replicas == 1:
            return tensor
        gathered: list[Any] = [None] * self.topology.num_replicas
        dist.all_gather_object(gathered, tensor.detach().cpu(), group=self._groups.peers)
        return torch.stack(gathered).to(tensor.device)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Agrees on a decision over the whole world, since one rank's refusal must stop all."""
        self._refuse_in_step("strategy.reduce_boolean_decision()")
        if self._groups is None:
            return decision
        votes = torch.tensor(int(decision))
        dist.all_reduce(votes, group=self._groups.world)
        return int(votes) == self.world_size if all else bool(votes)

    # ---------------------------------------------------------------------------------------------- checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        if not self._is_cut:
            return self.lightning_module.state_dict() if self.is_global_zero else {}
        assert self._ownership is not None and self._groups is not None
        return checkpoint.module_state(self.lightning_module, self._ownership, self._groups.world)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self._ownership is not None and self._groups is not None
        plain = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return checkpoint.optimizer_state(plain, self._ownership, self._groups.world)

    @override
    def load_optimizer_state_dict(self, checkpoint_: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint_["optimizer_states"], strict=True):
            checkpoint.load_optimizer_state(optimizer, state)
            _optimizers_to_device([optimizer], self.root_device)

    # ---------------------------------------------------------------------------------------------- end

    @override
    def teardown(self) -> None:
        """Makes the module whole again on every rank, unless the run has failed, and leaves the groups for a next run."""
        module = self.lightning_module
        failed = module is not None and module._trainer is not None and _has_failed(module.trainer)
        if module is not None and self._is_cut and not failed:
            assert self._ownership is not None and self._groups is not None
            cpu = torch.device("cpu")
            self._ownership.fill(checkpoint.spread_parameters(module, self._ownership, self._groups.world, cpu))
            self._is_cut = False
            module.cpu()
        if self._metric_sync is not None:
            self._metric_sync.remove()
        self.precision_plugin.__dict__.pop("clip_grad_by_norm", None)
        _optimizers_to_device(self.optimizers, torch.device("cpu"))
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what belongs to one process: the spawn launcher pickles the strategy."""
        state = super().__getstate__()
        for name in ("_groups", "_ownership", "_pipeline", "_gradient_sync", "_metric_sync", "_share_result"):
            state[name] = None
        return state


def _builder(schedule: str | Builder | Schedule) -> tuple[Builder, Schedule | None]:
    """A function that makes the schedule, and the schedule itself if it is a fixed one."""
    if isinstance(schedule, str):
        return get_family(schedule).build, None
    if isinstance(schedule, Schedule):
        validate(schedule)
        return lambda _stages, _microbatches: schedule, schedule
    if callable(schedule):
        return schedule, None
    raise ValueError(
        f"schedule={schedule!r}: it must be the name of a schedule, a function of (stages, microbatches), or a Schedule."
    )


def _fixed_sizes(schedule: Schedule, num_stages: int | None, num_microbatches: int | None) -> tuple[int, int]:
    """The sizes of a fixed schedule, which the other arguments may repeat but not contradict."""
    for name, given, own in (
        ("num_stages", num_stages, schedule.num_ranks),
        ("num_microbatches", num_microbatches, schedule.num_microbatches),
    ):
        if given is not None and given != own:
            raise ValueError(f"{name}={given}, but the schedule {schedule.name!r} has {own}. Leave {name} out.")
    return schedule.num_ranks, schedule.num_microbatches


def find_head_loss(pipeline: Pipeline) -> Any:
    """The table entry of the pipeline's head."""
    return pipeline._runner.anatomy.head_loss


def _loss_of(result: Any, module: LightningModule) -> Tensor:
    """The loss that a training step returned.

    Raises:
        RuntimeError: There is none.
    """
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        raise RuntimeError(
            f"{type(module).__name__}.training_step returned {type(result).__name__} without a loss. In a pipeline every"
            " step must return the loss, as a tensor or under the key 'loss'; skipping a batch by returning None is"
            " refused by Lightning on more than one process too."
        )
    return loss


def _defines(module: LightningModule, hook: str) -> bool:
    """Whether a user's module overrides a hook."""
    return getattr(type(module), hook) is not getattr(LightningModule, hook)


def _has_failed(trainer: Trainer) -> bool:
    return trainer.state.status == TrainerStatus.INTERRUPTED


def _leave_process_group() -> None:
    """Closes the connections at the end of the process; Lightning does so for NCCL only."""
    if _distributed_is_initialized():
        dist.destroy_process_group()

"""ChimeraStrategy: Lightning's hooks; the work is done by the engine and the rooms below it."""

import atexit
import os
import signal
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from itertools import chain
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.apply_func import move_data_to_device
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
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.utils._pytree import TreeSpec, tree_structure, tree_unflatten
from typing_extensions import override

from lightning_chimera import slurm
from lightning_chimera.checkpoint import load_optimizer_state
from lightning_chimera.checks import (
    check_backend,
    check_callbacks,
    check_choice,
    check_cuts_type,
    check_evaluations,
    check_fixed_schedule,
    check_hyperparameters,
    check_metrics,
    check_module,
    check_optimizers,
    check_recompute,
    check_sizes,
    check_timeout,
    check_trainer,
    one_optimizer,
    recomputed_stages,
)
from lightning_chimera.decisions import Decisions
from lightning_chimera.engine import Batch, Engine, Layout
from lightning_chimera.facts import facts_of_optimizers, facts_of_run
from lightning_chimera.files import WholeFiles
from lightning_chimera.interruption import interrupt
from lightning_chimera.launch import FunctionLauncher, ScriptLauncher, leave_earlier_job
from lightning_chimera.memory import explain, is_out_of_memory
from lightning_chimera.nonfinite import Nonfinite, NonfiniteGuard
from lightning_chimera.partition.anatomy import Anatomy, find_anatomy, holds_a_model
from lightning_chimera.partition.balance import balance, check_cuts, layer_costs
from lightning_chimera.partition.compilation import (
    CompiledBlocks,
    check_compile_blocks,
    check_compiler,
    check_whole_backward,
    is_compiled,
)
from lightning_chimera.partition.stage import StageRunner
from lightning_chimera.plan import plan_table, print_whole, share_nodes
from lightning_chimera.reporting import check_group
from lightning_chimera.runtime.agreement import check_at_start, check_in_group, describe
from lightning_chimera.runtime.batches import Ending, GroupLoader, hand_over
from lightning_chimera.runtime.failures import all_fail_alike
from lightning_chimera.runtime.meeting import meeting, met
from lightning_chimera.runtime.progress import PROGRESS
from lightning_chimera.runtime.randomness import keyed
from lightning_chimera.runtime.topology import Groups, Topology
from lightning_chimera.runtime.watch import begin_watching, end_watching, stop_watching, tell_failure
from lightning_chimera.schedules import Builder, Schedule, select
from lightning_chimera.signals import Interrupted, Signals
from lightning_chimera.stock import StockCallbacks, log_graphs
from lightning_chimera.threads import Threads
from lightning_chimera.timeline import SyncPolicy, Timeline

_ENDINGS: dict[RunningStage | None, Ending] = {
    RunningStage.TRAINING: Ending.SHORTEST,
    RunningStage.PREDICTING: Ending.OWN,
}


_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class ChimeraStrategy(ParallelStrategy):
    """Trains an unchanged LightningModule around a HuggingFace model as a pipeline.

    Args:
        schedule: A name (``chimera``, ``1f1b``, ``zb_v``, ... as in ``lightning_chimera.schedules.SCHEDULES``), the
            path of a .csv or .txt file, a function of (ranks, microbatches), or a Schedule.
        num_stages: Ranks of a pipeline group, each of which runs one stage of a pipe unless the schedule gives it
            several; all processes by default. With more processes the group is replicated.
        num_microbatches: Parts of a batch; by default one per stage for Chimera and two per stage else.
        recompute: What runs once more in the backward instead of being kept: ``"blocks"`` keeps the inputs of blocks,
            ``"stages"`` those of stages, a list those of some stages.
        pipes: Pipes of the schedules that have several.
        chunks: Stages of a rank, for the schedules that give it several.
        cuts: First block of each stage but the first; balanced by estimated cost by default.
        gradient_sync: When the copies of a stage start to sum their gradients: ``"eager"`` as soon as the last one is
            there, ``"eager-opt"`` so for the stages beyond the middle one, ``"hidden"`` where the schedule leaves time
            for it, and ``"lazy"`` at the end of a rank's actions, as all others do for the rest.
        timeout: Bound in seconds on every wait for another rank that is alive.
        stall_timeout: A rank that has given no sign of life for this many seconds has stalled, and the run ends.
        nonfinite: What happens if a loss or a gradient is not finite: training goes on as in a plain Trainer
            (``"ignore"``), all ranks raise and say where it began (``"raise"``), or all skip the step (``"skip"``).
        shared_memory: Whether ranks of one host that compute on the CPU hand over through memory that both see.
        save_on_signal: Whether the last step is saved if SIGINT or SIGTERM ends the run, as ``interrupted.ckpt`` in
            the Trainer's ``default_root_dir``. A Slurm job that is requeued is always saved.
        start_method: How the processes of a node are started if nobody else does.
        compile_blocks: Whether ``torch.compile`` runs on each block by itself; or the name of its backend.
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
        schedule: str | os.PathLike[str] | Builder | Schedule = "chimera",
        num_stages: int | None = None,
        num_microbatches: int | None = None,
        recompute: Literal["blocks", "stages"] | Sequence[int] | None = None,
        pipes: int | None = None,
        chunks: int | None = None,
        cuts: Sequence[int] | None = None,
        gradient_sync: Literal["eager", "eager-opt", "hidden", "lazy"] = "hidden",
        timeout: float | timedelta = 1800.0,
        stall_timeout: float | timedelta = 120.0,
        nonfinite: Nonfinite = "ignore",
        shared_memory: bool = True,
        save_on_signal: bool = False,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        compile_blocks: bool | str = False,
        print_plan: bool = True,
        process_group_backend: str | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        leave_earlier_job()
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io or WholeFiles(),
            precision_plugin=precision_plugin,
        )
        check_sizes(num_stages=num_stages, num_microbatches=num_microbatches, pipes=pipes, chunks=chunks)
        check_choice("start_method", start_method, ("popen", "spawn", "fork", "forkserver"))
        check_choice("gradient_sync", gradient_sync, tuple(SyncPolicy))
        self._gradient_sync = SyncPolicy(gradient_sync)
        check_choice("nonfinite", nonfinite, ("ignore", "raise", "skip"))
        check_cuts_type(cuts)
        check_backend(process_group_backend)
        self._timeout = check_timeout(timeout)
        self._stall_timeout = check_timeout(stall_timeout, "stall_timeout")
        check_recompute(recompute)
        self._recompute = recompute
        self._shared_memory = shared_memory
        self._compile_backend = check_compile_blocks(compile_blocks)
        self._compiled: CompiledBlocks | None = None
        self._threads = Threads()
        self._selection = select(schedule, pipes=pipes, chunks=chunks)
        fixed = self._selection.fixed
        if fixed is not None:
            check_fixed_schedule(fixed, num_stages, num_microbatches)
            num_stages, num_microbatches = fixed.num_ranks, fixed.num_microbatches
        self._num_stages = num_stages
        self._num_microbatches = num_microbatches
        self._cuts = cuts
        self._nonfinite = nonfinite
        self._start_method = start_method
        self._print_plan = print_plan
        self._process_group_backend = process_group_backend
        self._num_nodes = 1
        self._ascending: dict[int, bool] = {}
        self._deals: bool | None = None
        self._engine: Engine | None = None
        self._decisions: Decisions | None = None
        self._guard: NonfiniteGuard | None = None
        self._loader: GroupLoader | None = None
        self._structure: TreeSpec | None = None
        self._counts = True
        self._callbacks: StockCallbacks | None = None
        self._num_runs = 0
        self._can_save: bool | None = None
        self._failure: BaseException | None = None
        self._is_stepping = False
        self._save_on_signal = save_on_signal
        self._signals: Signals | None = None
        self._told: signal.Signals | None = None

    # ---------------------------------------------------------------------------------------------- environment

    @property
    def is_distributed(self) -> bool:
        """Whether there are replicas; read by Lightning where it shares values between them."""
        return self.topology.num_replicas > 1

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
        topology = self.topology
        return {"num_replicas": topology.num_replicas, "rank": topology.replica}

    @property
    def topology(self) -> Topology:
        """Where this rank is.

        Raises:
            ValueError: The number of processes is no multiple of the number of stages.
        """
        world = self.num_nodes * self.num_processes
        fixed = self._selection.fixed
        if fixed is not None and world % fixed.num_ranks:
            raise ValueError(
                f"The schedule {fixed.name!r} is for {fixed.num_ranks} ranks, and this run has {world} processes"
                f" (devices x num_nodes). Use a multiple of {fixed.num_ranks}, or a schedule by name."
            )
        num_positions = self._num_stages or world
        return Topology.of_world(world, num_positions, self.global_rank, ascending=self._ascends(num_positions))

    def _ascends(self, num_positions: int) -> bool:
        """Whether positions run with the global ranks, so that the last stage is on the first rank."""
        if num_positions not in self._ascending:
            schedule = self._selection.build(num_positions, self._num_microbatches_of(num_positions))
            ends = schedule.placement.rank_of(schedule.num_stages - 1) if isinstance(schedule, Schedule) else None
            self._ascending[num_positions] = num_positions > 1 and ends == 0
        return self._ascending[num_positions]

    def _num_microbatches_of(self, num_positions: int) -> int:
        return self._num_microbatches or self._selection.microbatches_per_stage * num_positions

    @property
    def layout(self) -> Layout:
        """How the run is laid out."""
        topology = self.topology
        return Layout(
            topology,
            self._selection.build,
            self._num_microbatches_of(topology.num_positions),
            self._selection.short,
            self._recompute,
            self._gradient_sync,
            self._shared_memory,
        )

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

    @override
    def _configure_launcher(self) -> None:
        # Sizes that do not fit are refused before any process is started.
        schedule = self.layout.schedule()
        recomputed_stages(self._recompute, schedule.num_stages)
        compiles = self._compile_backend is not None
        check_whole_backward(schedule.name, is_split=schedule.split_backward, is_compiled=compiles)
        assert self.cluster_environment is not None
        slurm.check_tasks(self.cluster_environment, self.num_processes, self.num_nodes)
        if isinstance(self.cluster_environment, SLURMEnvironment):
            slurm.choose_port()
        if self._start_method == "popen":
            patience = self._timeout.total_seconds()
            self._launcher = ScriptLauncher(
                self._check_module,
                self._threads,
                patience,
                self.cluster_environment,
                self.num_processes,
                self.num_nodes,
            )
        else:
            self._launcher = FunctionLauncher(
                self._check_module, self._threads, self.num_processes, self, self._start_method
            )

    def _check_module(self, module: LightningModule, trainer: Trainer) -> None:
        """Refuses what can't be trained, before a process is started for it."""
        check_module(module)
        check_callbacks(trainer.callbacks)  # type: ignore[attr-defined]
        check_metrics(module)
        if trainer.checkpoint_callbacks:
            check_hyperparameters(module)
        check_trainer(self.precision_plugin, sync_batchnorm=self._layer_sync is not None)
        is_made_later = is_overridden("setup", module) and not holds_a_model(module)
        if not is_made_later and not is_overridden("configure_model", module):
            self._choose_cuts(module, find_anatomy(module))

    @override
    def setup_environment(self) -> None:
        assert self.lightning_module is not None
        self._take_signals(self.lightning_module.trainer)
        super().setup_environment()
        if self._start_method in ("spawn", "forkserver"):
            reset_seed()  # a new process; elsewhere the generators are where a single process's would be
        self.set_world_ranks()
        self._process_group_backend = self._process_group_backend or _get_default_process_group_backend_for_device(
            self.root_device
        )
        assert self.cluster_environment is not None
        if not _distributed_is_initialized():
            _init_dist_connection(self.cluster_environment, self._process_group_backend, timeout=self._timeout)
            atexit.register(_leave_process_group)
        begin_watching(self._stall_timeout, self._where, self.topology.at, self._finalize_loggers)

    def _finalize_loggers(self) -> None:
        module = self.lightning_module
        for logger in [] if module is None or module._trainer is None else module._trainer.loggers:
            logger.finalize("failed")

    def _where(self) -> str:
        """Where in a run this is, for whoever reads of an error; asked from another thread at any time."""
        module = self.lightning_module
        if module is None or module._trainer is None:
            return ""
        trainer = module._trainer
        stage = "" if trainer.state.stage is None else f", {trainer.state.stage.value}"
        hook = f" in {module._current_fx_name}" if module._current_fx_name else ""
        return f"step {trainer.global_step}{stage}{hook}"

    def _take_signals(self, trainer: Trainer) -> None:
        environment = self.cluster_environment
        if self._signals is None:
            requeues = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
            self._signals = Signals(requeues=requeues)
        self._told = None
        self._signals.install(trainer)

    def set_world_ranks(self) -> None:
        """Tells the environment the ranks that follow from the numbers of nodes and devices."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]  # as Lightning's own strategies do

    # ---------------------------------------------------------------------------------------------- set-up

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        self._check_module(self.lightning_module, trainer)
        # The leader of a group draws from the user's own loader (runtime/batches.py); there is no public switch for it.
        if self._deals is None:
            self._deals = trainer._accelerator_connector.use_distributed_sampler
        trainer._accelerator_connector.use_distributed_sampler = False
        if not self.is_distributed:  # Lightning advises sync_dist for any process group, but logs are equal already
            warnings.filterwarnings("ignore", r"It is recommended to use `self\.log\(.*sync_dist=True")
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        if trainer.enable_autolog_hparams:
            log_graphs(trainer.loggers, self.lightning_module)
        check_at_start(self._facts(trainer), "at the start", self._timeout)
        self._cut(self.lightning_module)
        self._num_runs += 1
        self._can_save = None
        self._callbacks = StockCallbacks(trainer.callbacks, self.engine, self._fails_alike)  # type: ignore[attr-defined]
        if trainer.state.fn == TrainerFn.FITTING:
            self._reset_optimizers_and_schedulers()
            with one_optimizer():
                self.setup_optimizers(trainer)
            check_optimizers(self.optimizers)
            for optimizer in self.optimizers:
                self.engine.adopt(optimizer)
            self._decisions = Decisions(
                self.lightning_module,
                trainer.callbacks,  # type: ignore[attr-defined]
                self._agree_on_stop,
                self._end_batch,
                lambda decision: self.reduce_boolean_decision(decision, all=False),
                self._of_rank_zero,
            )
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)
            facts = facts_of_optimizers(self.optimizers, self.lr_scheduler_configs)
            check_in_group(facts, "at the start", self.engine.groups.world)
            if self._nonfinite != "ignore":
                self._guard = NonfiniteGuard(self._nonfinite, self.engine, scales=self._scaler is not None)

    def _facts(self, trainer: Trainer) -> dict[str, str]:
        """What all ranks must have alike."""
        assert self.lightning_module is not None
        arguments = {
            "num_stages": self._num_stages,
            "num_microbatches": self._num_microbatches,
            "recompute": self._recompute,
            "cuts": self._cuts,
            "gradient_sync": self._gradient_sync.value,
            "nonfinite": self._nonfinite,
            "process_group_backend": self._process_group_backend,
        }
        return facts_of_run(trainer, self.lightning_module, self.layout.schedule(), **arguments)

    def _choose_cuts(self, module: nn.Module, anatomy: Anatomy) -> tuple[int, ...]:
        schedule = self.layout.schedule()
        stages = schedule.num_stages
        if self._cuts is not None:
            return check_cuts(self._cuts, anatomy.num_blocks, stages)
        return balance(layer_costs(module, anatomy), stages, paired=schedule.placement.is_paired)

    def _cut(self, module: LightningModule) -> None:
        """Keeps this rank's stages of a whole module."""
        anatomy = find_anatomy(module)
        runner = StageRunner(anatomy, self._choose_cuts(module, anatomy))
        check_compiler(self._compile_backend, self.root_device)
        schedule, stages, threads = self.layout.schedule(), runner.num_stages, self._threads.share(self.node_rank)
        nodes = share_nodes(self.global_rank, self.world_size) if self._print_plan else []
        if self._print_plan and self.is_global_zero:
            recomputed = range(stages) if self._recompute == "blocks" else recomputed_stages(self._recompute, stages)
            print_whole(plan_table(module, runner, self.topology, schedule, recomputed, threads, nodes))
            self._print_plan = False
        compiled = any(map(is_compiled, anatomy.blocks()))
        check_whole_backward(schedule.name, is_split=schedule.split_backward, is_compiled=compiled)
        self._engine = Engine(module, runner, self.layout, self._groups, self.root_device, self._timeout)
        own = schedule.placement.stages_of(self.topology.position)
        self._compiled = CompiledBlocks(chain.from_iterable(map(runner.blocks_in, own)), self._compile_backend)

    @override
    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()

        def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
            self.engine.clip_gradients(self.precision_plugin.main_params(optimizer), clip_val)

        def clip_grad_by_value(optimizer: Optimizer, clip_val: float) -> None:
            held = [part for part in self.precision_plugin.main_params(optimizer) if not part.is_meta]
            if any(parameter.grad is not None for parameter in held):  # torch's function fails where there is none
                torch.nn.utils.clip_grad_value_(held, clip_val)

        # On the instance: the plugin's class name is the key of its state in checkpoints.
        self.precision_plugin.__dict__["clip_grad_by_norm"] = clip_grad_by_norm
        self.precision_plugin.__dict__["clip_grad_by_value"] = clip_grad_by_value
        if self._scaler is not None:
            self.engine.share_overflow(self._scaler)

    @property
    def _scaler(self) -> torch.amp.GradScaler | None:
        """What scales the loss, with 16-mixed."""
        return getattr(self.precision_plugin, "scaler", None)

    @override
    def model_to_device(self) -> None:
        """Nothing: the engine moves what this rank holds; the rest are placeholders."""

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # Not on the device: the whole model would not fit there.
        with torch.device("meta") if empty_init else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    # ---------------------------------------------------------------------------------------------- data

    @override
    def process_dataloader(self, dataloader: object) -> object:
        assert self.lightning_module is not None
        stage = self.lightning_module.trainer.state.stage
        ending = _ENDINGS.get(stage, Ending.LONGEST)
        deals = self._deals is not False
        return GroupLoader(dataloader, self.topology, self.engine.groups, ending, rank_zero_warn, deals=deals)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        combined = self._combined
        self._loader = _group_loader(combined.flattened, dataloader_idx) if combined is not None else None
        self._structure, self._counts = None, True
        if combined is not None and combined._mode != "sequential":
            self._structure = tree_structure(combined.iterables)
            batches, self._counts = hand_over(self._structure.flatten_up_to(batch), combined.flattened, combined._mode)
            batch = tree_unflatten(batches, self._structure)
        elif self._loader is not None:
            self._loader.hand_over()
            self._counts = not self._loader.is_surplus
        has_hooks = self._has_transfer_hooks
        key = (self.engine.seed, self.topology.replica, *self._key(), dataloader_idx)
        with keyed(*key) if has_hooks else nullcontext():
            moved = super().batch_to_device(batch, device, dataloader_idx)
        if self._structure is not None and not _is_several(moved, self._structure):
            self._structure = None  # of one loader, or put together by a hook of the module
        if has_hooks:
            check_in_group(describe(moved), "behind the hooks that transfer a batch", self.engine.groups.pipeline)
        return moved

    @property
    def _has_transfer_hooks(self) -> bool:
        """Whether code of the user's changes a batch on each rank by itself, after the leader has shared it."""
        assert self.lightning_module is not None
        owners = (self.lightning_module, self.lightning_module.trainer.datamodule)  # type: ignore[attr-defined]
        return any(owner is not None and is_overridden(hook, owner) for owner in owners for hook in _TRANSFER_HOOKS)

    @property
    def _combined(self) -> CombinedLoader | None:
        """The loaders of the loop that runs; steps need not take a batch's loader, so it is noted with the batch."""
        assert self.lightning_module is not None
        return getattr(self.lightning_module.trainer._active_loop, "_combined_loader", None)

    def _key(self) -> tuple[int, ...]:
        """What the random draws of a batch depend on: how far training is, and the batch of its loader."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        handed = self._loader.handed if self._loader is not None else 0
        return (trainer.global_step, trainer.fit_loop.total_batch_idx, handed)

    # ---------------------------------------------------------------------------------------------- steps

    @override
    @met("a training step")
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs forward and backward of the whole batch; the loss is that of all replicas."""
        assert self.lightning_module is not None
        data, *rest = args
        context = self.precision_plugin.train_step_context
        batch = Batch(data, tuple(rest), kwargs, context, self._key(), self._structure)
        accumulate = self.lightning_module.trainer.accumulate_grad_batches
        scale: Callable[[Tensor], Tensor] = (lambda loss: loss) if self._scaler is None else self._scaler.scale
        trainer = self.lightning_module.trainer
        number = trainer.fit_loop.epoch_loop.batch_idx
        if number == 0:  # a scheduler or a callback may have changed them since
            check_in_group(facts_of_optimizers(self.optimizers), "at the start of an epoch", self.engine.groups.world)
        # As Lightning, which zeroes gradients behind the first batch's step; this rank may be told to step early.
        result = self.engine.train(
            batch, accumulate=accumulate, scale=scale, is_last=self._is_stepping, is_first=number % accumulate == 0
        )
        if self._guard is not None:
            self._guard.after_step(result["loss"], trainer.global_step)
        return result

    @override
    def on_train_start(self) -> None:
        self._agree_on_stop()

    @override
    def on_validation_end(self) -> None:
        self._agree_on_stop()

    @met("the end of a hook of the loop")
    def _agree_on_stop(self) -> None:
        """Makes ``should_stop`` hold on every rank if it does on one: a step sets it on its last stage only."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        trainer.should_stop = self._agree(trainer.should_stop)

    def _agree(self, decision: bool = False, group: ProcessGroup | None = None) -> bool:
        """Whether something holds on any rank; notes the signals that have come to any as well."""
        assert self._groups is not None
        assert self._signals is not None
        votes = torch.tensor([int(decision), *self._signals.received])
        dist.all_reduce(votes, group=group or self._groups.world)
        decided, *received = votes.tolist()
        self._told = self._signals.take(received) or self._told
        return bool(decided)

    def _end_batch(self) -> None:
        """Agrees on what follows a training batch: a stop, or once the step is whole the end that a signal asks for."""
        assert self.lightning_module is not None
        self._agree_on_stop()
        if self._told is not None and not self.lightning_module.trainer.fit_loop.epoch_loop._should_accumulate():
            self._interrupt(self._told)

    def _interrupt(self, kind: signal.Signals) -> NoReturn:
        assert self.lightning_module is not None
        assert self._signals is not None
        trainer, requeues = self.lightning_module.trainer, self._signals.requeues
        interrupt(trainer, kind, requeues=requeues, saves=self._save_on_signal, of_rank_zero=self.broadcast)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Calls the hooks around a backward that has run already, and puts its gradients in place.

        They are summed over all copies if a step follows, before any hook sees them.
        """
        assert self.lightning_module is not None
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self.engine.put_gradients()
        if self._is_stepping:
            with PROGRESS.at("all-reduce of gradients"):
                self.engine.reduce_gradients()
        loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        if self._is_stepping and self._guard is not None:
            self._guard.before_optimizer(self.lightning_module.trainer.global_step)
        return loss

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Has the backward in the closure sum the gradients of all copies."""
        evaluations = 0

        def once() -> Any:
            nonlocal evaluations
            evaluations += 1
            check_evaluations(evaluations, optimizer)
            return closure()

        self.engine.adopt(optimizer)
        self._is_stepping = True
        try:
            return super().optimizer_step(optimizer, once, model, **kwargs)
        finally:
            self._is_stepping = False
            self.engine.show_gradients()

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
        data, *rest = args
        batch = Batch(data, tuple(rest), kwargs, context, self._key(), self._structure)
        in_step_with_replicas = name != "predict_step"
        with meeting(f"a {name}"):
            result = self.engine.evaluate(name, batch, counts=self._counts, logs=in_step_with_replicas)
            self._agree(group=None if in_step_with_replicas else self.engine.groups.pipeline)
        if self._told is not None:
            self._interrupt(self._told)
        return result

    @contextmanager
    def full_parameters(self, *, gradients: bool = False) -> Generator[None, None, None]:
        """Gives every rank the whole model for a while, for histograms, ``generate`` or an upload in mid-run.

        Every rank must enter it. What is changed inside is lost.

        Args:
            gradients: Whether the parameters have their gradients as well; if not, none of them has.
        """
        self._refuse_in_step("strategy.full_parameters()")
        with ExitStack() as stack:
            with meeting("strategy.full_parameters()"):
                stack.enter_context(self.engine.full_parameters(gradients=gradients))
            yield

    @met("strategy.grad_norm()")
    def grad_norm(self, norm_type: float | str, group_separator: str = "/") -> dict[str, Tensor]:
        """What ``lightning.pytorch.utilities.grad_norm`` gives in a single process, equal on every rank.

        Every rank must call it, in a hook around the step (``on_before_optimizer_step``).

        Args:
            norm_type: The order of the norm; ``inf`` for the largest entry.
            group_separator: What is between the two parts of a name.

        Returns:
            The norm of each parameter's gradient, and of all together.
        """
        self._refuse_in_step("strategy.grad_norm()")
        order = float(norm_type)
        found = self.engine.gradient_norms(order)
        norms = {f"grad_{order}_norm{group_separator}{name}": norm for name, norm in found.items()}
        return {**norms, f"grad_{order}_norm_total": torch.stack(list(found.values())).norm(order)} if found else {}

    @met("strategy.clip_grad_norm()")
    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float | str = 2.0,
        *,
        parameters: Iterable[nn.Parameter] | None = None,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """What ``torch.nn.utils.clip_grad_norm_`` does in a single process, in ``configure_gradient_clipping``.

        Every rank must call it.

        Args:
            max_norm: Gradients are scaled by one factor so that their norm is at most this.
            norm_type: The order of the norm; ``inf`` for the largest entry.
            parameters: Those whose gradients are looked at and scaled; all of the module by default.
            error_if_nonfinite: Whether a norm that is no number is an error.

        Returns:
            The norm before.
        """
        self._refuse_in_step("strategy.clip_grad_norm()")
        assert self.lightning_module is not None
        chosen = self.lightning_module.parameters() if parameters is None else parameters
        return self.engine.clip_gradients(chosen, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    @met("strategy.timeline()")
    def timeline(self) -> Timeline | None:
        """When the actions of the last training step ran, over this pipeline group; every rank must call it."""
        return self.engine.timeline()

    @property
    def peak_activations(self) -> float:
        """Most activations that this rank held at one time in the last training step, as a schedule counts them."""
        return self.engine.pipeline.peak_activations

    @property
    def _groups(self) -> Groups | None:
        return None if self._engine is None else self._engine.groups

    # ---------------------------------------------------------------------------------------------- collectives

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

    # ---------------------------------------------------------------------------------------------- checkpoints

    @override
    @met("trainer.save_checkpoint()")
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole module's state on global rank 0, its names elsewhere; every rank must call it.

        Raises:
            RuntimeError: The run has failed, on this rank only.
        """
        error = sys.exception()
        if self._has_failed and error is not None and not self._fails_alike(error):
            raise RuntimeError(
                "No checkpoint can be saved: this rank has failed, and the others, which hold the rest of the model,"
                " have not, or in another way."
            )
        with PROGRESS.at("collecting the state of a checkpoint"):
            return self.engine.module_state()

    @property
    def _has_failed(self) -> bool:
        module = self.lightning_module
        if module is None or module._trainer is None:
            return False
        return bool(module.trainer.state.status == TrainerStatus.INTERRUPTED)

    def _fails_alike(self, error: BaseException) -> bool:
        """Whether all ranks have failed with this error at this step, so that they can still work together."""
        self.on_exception(error)
        if self._can_save is None:
            assert self.lightning_module is not None
            step = self.lightning_module.trainer.global_step
            self._can_save = all_fail_alike(self._num_runs, f"{type(error).__qualname__} after step {step}")
        return self._can_save

    @override
    @met("trainer.save_checkpoint()")
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole optimizer's state on global rank 0; every rank must call it."""
        own = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        with PROGRESS.at("collecting the state of a checkpoint"):
            return self.engine.optimizer_state(own)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            load_optimizer_state(optimizer, state)
        _optimizers_to_device(self.optimizers, self.root_device)

    # ---------------------------------------------------------------------------------------------- end

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Tells the other ranks, so that none waits for this one; says what helps where memory has run out."""
        if exception is self._failure:
            return
        self._failure = exception
        if isinstance(exception, Interrupted):
            end_watching()  # all ranks end alike
            return
        if self._engine is not None and is_out_of_memory(exception):
            explain(exception, self._engine, self.optimizers, str(self.precision_plugin.precision))
        tell_failure(exception)

    @override
    def teardown(self) -> None:
        """Makes the module whole again, unless the run has failed; the groups are kept for a next run."""
        module, engine = self.lightning_module, self._engine
        if module is not None and engine is not None:
            if engine.is_cut and not self._has_failed:
                with meeting("the end of the run"):
                    engine.make_whole(self.optimizers)
                if self._callbacks is not None:
                    self._callbacks.make_whole()
            engine.release()
        end_watching()
        if self._compiled is not None:
            self._compiled.release()
            self._compiled = None
        if self._callbacks is not None:
            self._callbacks.release()
            self._callbacks = None
        if self._decisions is not None:
            self._decisions.remove()
            self._decisions = None
        self._guard = None
        for name in ("clip_grad_by_norm", "clip_grad_by_value"):
            self.precision_plugin.__dict__.pop(name, None)
        if self._scaler is not None:
            self._scaler.__dict__.pop("_unscale_grads_", None)
        _optimizers_to_device(self.optimizers, torch.device("cpu"))
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        if self._signals is not None:
            self._signals.remove(deliver=not self._has_failed)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what belongs to one process: the spawn launcher pickles the strategy."""
        own = ("_engine", "_compiled", "_decisions", "_guard", "_loader", "_callbacks", "_signals", "_failure")
        return {**super().__getstate__(), **dict.fromkeys(own)}


def _is_several(batch: Any, structure: TreeSpec) -> bool:
    """Whether a batch is one of several loaders' batches."""
    try:
        return len(structure.flatten_up_to(batch)) > 1
    except ValueError:
        return False


def _group_loader(loaders: Sequence[Any], dataloader_idx: int) -> GroupLoader | None:
    loader = loaders[dataloader_idx] if dataloader_idx < len(loaders) else None
    return loader if isinstance(loader, GroupLoader) else None


def _leave_process_group() -> None:
    """Closes the connections at the end of the process; Lightning does so for NCCL only."""
    stop_watching()
    if _distributed_is_initialized():
        dist.destroy_process_group()

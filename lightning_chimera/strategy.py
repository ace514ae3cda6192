"""ChimeraStrategy: Lightning's hooks; the work is done by the engine and the rooms below it."""

import atexit
import os
import sys
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
)
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_chimera import slurm
from lightning_chimera.checkpoint import load_optimizer_state
from lightning_chimera.checks import (
    check_callbacks,
    check_evaluations,
    check_hyperparameters,
    check_metrics,
    check_module,
    check_optimizers,
    check_trainer,
    one_optimizer,
    recomputed_stages,
)
from lightning_chimera.clipping import route_clipping
from lightning_chimera.commands import check_session, check_system
from lightning_chimera.decisions import Decisions
from lightning_chimera.engine import Engine
from lightning_chimera.facts import facts_of_optimizers, facts_of_run
from lightning_chimera.failure import Failure
from lightning_chimera.files import WholeFiles
from lightning_chimera.handover import Handover
from lightning_chimera.interruption import Interruption
from lightning_chimera.launch import FunctionLauncher, ScriptLauncher, leave_earlier_job
from lightning_chimera.layout import Layout
from lightning_chimera.nonfinite import Nonfinite, NonfiniteGuard
from lightning_chimera.partition.anatomy import find_anatomy, holds_a_model
from lightning_chimera.partition.compilation import (
    CompiledBlocks,
    check_compiler,
    check_whole_backward,
    is_compiled,
)
from lightning_chimera.partition.stage import StageRunner
from lightning_chimera.plan import plan_table, print_whole, share_nodes
from lightning_chimera.rendezvous import meet
from lightning_chimera.runtime.agreement import check_at_start, check_in_group
from lightning_chimera.runtime.leaving import BOUND, leaving_after
from lightning_chimera.runtime.meeting import meeting, met
from lightning_chimera.runtime.progress import PROGRESS
from lightning_chimera.runtime.topology import Topology
from lightning_chimera.runtime.watch import GRACE, begin_watching, end_watching, stop_watching
from lightning_chimera.schedules import Builder, Schedule
from lightning_chimera.settings import GradientSync, Innermost, Settings, StartMethod
from lightning_chimera.stock import StockCallbacks, log_graphs
from lightning_chimera.threads import Threads
from lightning_chimera.timeline import Timeline
from lightning_chimera.whole_model import WholeModelCalls


class ChimeraStrategy(WholeModelCalls):
    """Trains an unchanged LightningModule around a HuggingFace model as a pipeline.

    Args:
        schedule: A name (``chimera``, ``1f1b``, ``zb_v``, ... as in ``lightning_chimera.schedules.SCHEDULES``), the
            path of a .csv or .txt file, a function of (ranks, microbatches), or a Schedule.
        num_stages: Ranks of a pipeline group, each of which runs one stage of a pipe unless the schedule gives it
            several; all processes by default. With more processes the group is replicated.
        num_microbatches: Parts of a batch; by default one for each rank of the pipeline with ``chimera``,
            ``chimera_split``, ``chimera_split_in_place``, ``chimera_split_v`` and ``hanayo``, and two with all others.
        recompute: What runs once more in the backward instead of being kept: ``"blocks"`` keeps the inputs of blocks,
            ``"stages"`` those of stages, a list those of some stages.
        pipes: Pipes of the schedules that have several.
        chunks: Stages of a rank, for the schedules that give it several.
        cuts: First block of each stage but the first; balanced by estimated cost by default.
        innermost: Which ranks follow each other, so that they share a node: the ``"stages"`` of a pipeline, or the
            ``"replicas"`` of a stage.
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
        innermost: Innermost = "stages",
        gradient_sync: GradientSync = "hidden",
        timeout: float | timedelta = 1800.0,
        stall_timeout: float | timedelta = 120.0,
        nonfinite: Nonfinite = "ignore",
        shared_memory: bool = True,
        save_on_signal: bool = False,
        start_method: StartMethod = "popen",
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
        self._settings = Settings(
            schedule=schedule,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            recompute=recompute,
            pipes=pipes,
            chunks=chunks,
            cuts=cuts,
            innermost=innermost,
            gradient_sync=gradient_sync,
            timeout=timeout,
            stall_timeout=stall_timeout,
            nonfinite=nonfinite,
            shared_memory=shared_memory,
            save_on_signal=save_on_signal,
            start_method=start_method,
            compile_blocks=compile_blocks,
            process_group_backend=process_group_backend,
        )
        self._print_plan = print_plan
        self._process_group_backend = process_group_backend
        self._num_nodes = 1
        self._deals: bool | None = None
        self._threads = Threads()
        self._failure = Failure()
        self._is_stepping = False
        self._engine: Engine | None = None
        self._handover: Handover | None = None
        self._interruption: Interruption | None = None
        self._compiled: CompiledBlocks | None = None
        self._decisions: Decisions | None = None
        self._guard: NonfiniteGuard | None = None
        self._callbacks: StockCallbacks | None = None

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
    @override
    def topology(self) -> Topology:
        """Where this rank is.

        Raises:
            ValueError: The number of processes is no multiple of the number of stages.
        """
        return self._settings.topology(self.num_nodes * self.num_processes, self.global_rank)

    @property
    def layout(self) -> Layout:
        """How the run is laid out."""
        return self._settings.layout(self.topology)

    @override
    def _configure_launcher(self) -> None:
        # Sizes that do not fit are refused before any process is started.
        schedule = self.layout.schedule()
        recomputed_stages(self._settings.recompute, schedule.num_stages)
        compiles = self._settings.compile_backend is not None
        check_whole_backward(schedule.name, is_split=schedule.split_backward, is_compiled=compiles)
        assert self.cluster_environment is not None
        slurm.check_tasks(self.cluster_environment, self.num_processes, self.num_nodes)
        if isinstance(self.cluster_environment, SLURMEnvironment):
            slurm.choose_port()
        start_method = self._settings.start_method
        check_system(self.num_processes * self.num_nodes)
        check_session(start_method, self.num_processes)
        patience = self._settings.longest_wait.total_seconds()
        if start_method == "popen" or self.cluster_environment.creates_processes_externally:
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
                self._check_module, self._threads, self.num_processes, self.num_nodes, patience, self, start_method
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
            self._settings.choose_cuts(module, find_anatomy(module), self.layout.schedule())

    @override
    def setup_environment(self) -> None:
        assert self.lightning_module is not None
        if self._interruption is None:
            self._interruption = Interruption(self.cluster_environment, saves=self._settings.save_on_signal)
        self._interruption.begin(self.lightning_module.trainer)
        super().setup_environment()
        if isinstance(self._launcher, FunctionLauncher) and self._settings.start_method != "fork":
            reset_seed()  # a new process; elsewhere the generators are where a single process's would be
        self.set_world_ranks()
        self._process_group_backend = self._process_group_backend or _get_default_process_group_backend_for_device(
            self.root_device
        )
        assert self.cluster_environment is not None
        environment, longest_wait = self.cluster_environment, self._settings.longest_wait
        # torch waits without a bound for the greeting of a store whose process has been stopped.
        with leaving_after(longest_wait.total_seconds() + GRACE + BOUND, self._unmet()):
            if not _distributed_is_initialized():
                meet(environment, self._process_group_backend, longest_wait)
                atexit.register(_leave_process_group)
            begin_watching(self._settings.longest_silence, self._where, self.topology.at, self._finalize_loggers)

    def _unmet(self) -> str:
        """What the screen says if the ranks do not meet."""
        environment, seconds = self.cluster_environment, self._settings.longest_wait.total_seconds()
        assert environment is not None
        return (
            f"chimera: rank {self.global_rank} of {self.num_nodes * self.num_processes} has not met the others within"
            f" {seconds:g} s (timeout), at {environment.main_address}, port {environment.main_port}.\n"
        )

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
        check_at_start(self._facts(trainer), "at the start", self._settings.longest_wait)
        assert self._interruption is not None
        self._interruption.check_resumed(trainer)
        self._cut(self.lightning_module)
        self._handover = Handover(self.lightning_module, self.engine, deals=self._deals)
        self._failure.begin()
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
            if self._settings.nonfinite != "ignore":
                self._guard = NonfiniteGuard(self._settings.nonfinite, self.engine, scales=self._scaler is not None)

    def _facts(self, trainer: Trainer) -> dict[str, str]:
        """What all ranks must have alike."""
        assert self.lightning_module is not None
        arguments = {**self._settings.facts, "process_group_backend": self._process_group_backend}
        return facts_of_run(trainer, self.lightning_module, self.layout.schedule(), **arguments)

    def _cut(self, module: LightningModule) -> None:
        """Keeps this rank's stages of a whole module."""
        anatomy = find_anatomy(module)
        schedule, recompute, backend = self.layout.schedule(), self._settings.recompute, self._settings.compile_backend
        runner = StageRunner(anatomy, self._settings.choose_cuts(module, anatomy, schedule))
        check_compiler(backend, self.root_device)
        stages, threads = runner.num_stages, self._threads.share(self.node_rank)
        nodes = share_nodes(self.global_rank, self.world_size) if self._print_plan else []
        if self._print_plan and self.is_global_zero:
            recomputed = range(stages) if recompute == "blocks" else recomputed_stages(recompute, stages)
            print_whole(plan_table(module, runner, self.topology, schedule, recomputed, threads, nodes))
            self._print_plan = False
        compiled = any(map(is_compiled, anatomy.blocks()))
        check_whole_backward(schedule.name, is_split=schedule.split_backward, is_compiled=compiled)
        groups = None if self._engine is None else self._engine.reusable_groups
        self._engine = Engine(module, runner, self.layout, groups, self.root_device, self._settings.longest_wait)
        # Lightning says so of the parts that are there before `setup`, and would of all others when it moves them.
        _update_properties(module, device=self.root_device)
        own = schedule.placement.stages_of(self.topology.position)
        self._compiled = CompiledBlocks(chain.from_iterable(map(runner.blocks_in, own)), backend)

    @override
    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        route_clipping(self.precision_plugin, self.engine)
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
        assert self._handover is not None
        return self._handover.wrap(dataloader)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        assert self._handover is not None
        move = partial(super().batch_to_device, device=device, dataloader_idx=dataloader_idx)
        return self._handover.transfer(batch, dataloader_idx, move)

    # ---------------------------------------------------------------------------------------------- steps

    @override
    @met("a training step")
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs forward and backward of the whole batch; the loss is that of all replicas."""
        assert self.lightning_module is not None
        assert self._handover is not None
        batch = self._handover.of_step(args, kwargs, self.precision_plugin.train_step_context)
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
        assert self._interruption is not None
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        trainer.should_stop = self._interruption.agree(trainer.should_stop, self.engine.groups.world)

    def _end_batch(self) -> None:
        """Agrees on what follows a training batch: a stop, or once the step is whole the end that a signal asks for."""
        assert self.lightning_module is not None
        assert self._interruption is not None
        self._agree_on_stop()
        trainer = self.lightning_module.trainer
        if not trainer.fit_loop.epoch_loop._should_accumulate():
            self._interruption.act(trainer, self.broadcast)

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
        assert self._handover is not None
        assert self._interruption is not None
        assert self.lightning_module is not None
        batch = self._handover.of_step(args, kwargs, context)
        in_step_with_replicas = name != "predict_step"
        with meeting(f"a {name}"):
            result = self.engine.evaluate(name, batch, counts=self._handover.counts, logs=in_step_with_replicas)
            groups = self.engine.groups
            self._interruption.agree(False, groups.world if in_step_with_replicas else groups.pipeline)
        self._interruption.act(self.lightning_module.trainer, self.broadcast)
        return result

    @met("strategy.timeline()")
    def timeline(self) -> Timeline | None:
        """When the actions of the last training step ran, over this pipeline group; every rank must call it."""
        return self.engine.timeline()

    @property
    def peak_activations(self) -> float:
        """Most activations that this rank held at one time in the last training step, as a schedule counts them."""
        return self.engine.pipeline.peak_activations

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
        assert self.lightning_module is not None
        return self._failure.is_alike(error, self.lightning_module.trainer.global_step)

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
        self._failure.tell(exception, self._engine, self.optimizers, str(self.precision_plugin.precision))

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
        self._callbacks = None
        if self._decisions is not None:
            self._decisions.remove()
            self._decisions = None
        self._guard = None
        _optimizers_to_device(self.optimizers, torch.device("cpu"))
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        if self._interruption is not None:
            self._interruption.end(deliver=not self._has_failed)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what belongs to one process: the spawn launcher pickles the strategy."""
        own = ("_engine", "_compiled", "_decisions", "_guard", "_handover", "_callbacks", "_interruption")
        return {**super().__getstate__(), **dict.fromkeys(own)}


def _leave_process_group() -> None:
    """Closes the connections at the end of the process; Lightning does so for NCCL only."""
    stop_watching()
    if _distributed_is_initialized():
        dist.destroy_process_group()

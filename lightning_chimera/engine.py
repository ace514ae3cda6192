"""A module cut over a pipeline group, and what happens to a batch there.

The strategy tells it what Lightning wants; everything below knows neither Lightning's hooks nor the Trainer.
"""

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from lightning_chimera import checkpoint
from lightning_chimera.batch import Batch
from lightning_chimera.checks import check_buffers, check_groups, recomputed_stages
from lightning_chimera.layout import Layout
from lightning_chimera.notes import Addition, Notes, growing
from lightning_chimera.outcome import Outcome, detach, extras_of, loss_of
from lightning_chimera.partition.deferral import Splitter
from lightning_chimera.partition.flops import training_flops
from lightning_chimera.partition.ownership import Ownership
from lightning_chimera.partition.shadows import Shadows
from lightning_chimera.partition.stage import HeadCall, StageRunner
from lightning_chimera.reporting import (
    LogCall,
    MetricSync,
    Report,
    Updates,
    check_windows,
    combine,
    metrics_of,
    recorded,
    recording,
    reduce,
    replay,
    silent,
)
from lightning_chimera.results import join, join_lists
from lightning_chimera.runtime.agreement import check_in_group, describe
from lightning_chimera.runtime.exchange import Broadcast, Gather
from lightning_chimera.runtime.gradients import (
    GradientSync,
    PlaceholderGradients,
    check_norm_type,
    clip_by_norm,
    parameter_norms,
    sharing_overflow,
)
from lightning_chimera.runtime.links import Links
from lightning_chimera.runtime.microbatches import Microbatch, count_rows, split, split_together
from lightning_chimera.runtime.packing import Constant
from lightning_chimera.runtime.pipeline import Call, Pipeline, Recompute, TrainingCall
from lightning_chimera.runtime.topology import Groups
from lightning_chimera.runtime.versions import version_of
from lightning_chimera.runtime.weights import LossWeights
from lightning_chimera.timeline import Timeline, sync_order


class _Buffer(NamedTuple):
    """A buffer of a part of the module as it was before a step."""

    name: str
    own: dict[str, Tensor | None]
    key: str
    tensor: Tensor
    version: int

    @property
    def is_changed(self) -> bool:
        """Whether it has been changed in place since, or another has taken its place."""
        now = self.own.get(self.key)
        return now is not None and (now is not self.tensor or version_of(now) != self.version)


class Figures(NamedTuple):
    """What a training step came to.

    Attributes:
        bubble: The part of the time of its actions that ranks idle in, on average.
        sync_wait: Seconds that a rank has waited for sums of gradients behind its last action, on average.
        peak_activations: Most activations on a rank at one time, in the unit of ``Schedule.peak_activations``.
        utilization: The floating point operations of the model over those that the devices could have done.
    """

    bubble: float
    sync_wait: float
    peak_activations: float
    utilization: float


class Engine:
    """The stages of a module on this rank, and their part in every batch.

    Making one cuts the module: parameters that this rank does not hold become placeholders, and all copies of a stage
    become those of its lowest holder.

    Args:
        module: The user's module, whole.
        runner: Its stages.
        layout: The layout of the run.
        groups: The process groups of an earlier run in the same processes, which are used again if they fit.
        device: Where this rank computes.
        timeout: Bound on every wait.
    """

    def __init__(
        self,
        module: LightningModule,
        runner: StageRunner,
        layout: Layout,
        groups: Groups | None,
        device: torch.device,
        timeout: timedelta,
    ) -> None:
        topology, placement = layout.topology, layout.schedule().placement
        self.module = module
        self.layout = layout
        self._num_parts = layout.num_microbatches * (2 if layout.schedule().halved_backward else 1)
        self.topology = topology
        self._own: Callable[[nn.Module], Ownership] = lambda module: Ownership(
            module, runner, lambda stages: topology.holders(placement, stages), topology.global_rank
        )
        self.ownership = self._own(module)
        self.groups = Groups.reuse(groups, topology, placement, self.ownership.holder_sets(), timeout)
        self.device = device
        self.is_cut = True
        self.in_step = False
        self._is_amid_step = False
        self._shadows = ExitStack()
        self._anatomy = runner.anatomy
        self._head_loss = runner.anatomy.head_loss
        self._pending: list[tuple[nn.Parameter, Tensor | None]] = []
        self._present: set[int] = set()
        self._has_gradients: list[bool] = []
        self._used: list[int] = []
        self._is_summed = True
        self._grows: set[str] | None = None
        """The lists of the module that training steps have appended to."""
        self._clock_shift = 0.0
        self._optimized: list[list[int]] = []
        self.ownership.drop(device)
        self._shadows.callback(setattr, module, "example_input_array", module.example_input_array)
        module.example_input_array = None
        for tensor in (*module.parameters(), *module.buffers()):
            if not tensor.is_meta:
                tensor.data = tensor.data.to(device)
        self._inner_metrics = metrics_of(runner.anatomy.base.modules())
        self._paths: dict[int, str] = {}
        for metric in metrics_of(module.modules()):
            metric.to(device)
        self.seed = self._synchronize()
        self.sync_order = sync_order(layout.schedule(), layout.gradient_sync)
        """The stages whose gradients are summed within the schedule."""
        links = Links(topology, self.groups.links, device, timeout, shared_memory=layout.shared_memory)
        links.connect()
        self.pipeline = Pipeline(
            runner,
            links,
            topology.position,
            layout.schedule,
            layout.schedule(),
            {stage: Splitter(runner.modules_of(stage, module)) for stage in placement.stages_of(topology.position)},
            Recompute(recomputed_stages(layout.recompute, runner.num_stages), blocks=layout.recompute == "blocks"),
            (self.seed, topology.replica),
            self.sync_order,
        )
        self._gradient_sync = GradientSync(self.ownership, self.groups.holders, self.sync_order)
        self._absent = PlaceholderGradients(self.ownership)
        self._shadows.callback(MetricSync(self.groups.world, speaks=topology.is_leader).remove)
        self._hide_after_clipping()
        self._share = Broadcast(self.groups.pipeline, topology.leader, is_source=topology.is_leader, device=device)
        self._gather_steps, self._gather_reports = Gather(self.groups.world, device), Gather(self.groups.world)

    def _synchronize(self) -> int:
        """Makes all copies of a stage equal, and the buffers those of global rank 0; agrees on a seed."""
        self._equalize(self.ownership)
        for buffer in self.module.buffers():
            if buffer.numel() and not buffer.is_meta:
                shared = buffer.detach().cpu().contiguous()
                dist.broadcast(shared, 0, group=self.groups.world)
                buffer.detach().copy_(shared)
        seed = torch.tensor(int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed() >> 1)))
        dist.broadcast(seed, 0, group=self.groups.world)
        return int(seed)

    def _equalize(self, ownership: Ownership) -> None:
        """Makes every parameter that several ranks hold that of its lowest holder."""
        for parameter in ownership.held():
            ranks = ownership.holders[parameter]
            if len(ranks) > 1:
                value = parameter.detach().to(self.device)
                dist.broadcast(value, ranks[0], group=self.groups.holders[ranks])
                parameter.detach().copy_(value)

    # ------------------------------------------------------------------------------------------------- training

    def train(
        self,
        batch: Batch,
        *,
        accumulate: int,
        scale: Callable[[Tensor], Tensor],
        is_last: bool = False,
        is_first: bool = True,
    ) -> dict[str, Any]:
        """Runs forward and backward of a batch.

        Its gradients are set apart, since Lightning calls zero_grad between a step and its backward:
        ``put_gradients`` puts them in place.

        Args:
            batch: The batch.
            accumulate: Number of batches whose losses Lightning averages for one optimizer step.
            scale: Scales the loss that a backward starts from.
            is_last: Whether an optimizer step follows, so that gradients may be summed as soon as they are there.
            is_first: Whether gradients of earlier batches are not part of that step.

        Returns:
            What the step would have returned for the batches of all replicas together: the loss, and what else is in
            the dict that it returns, the same on every rank.
        """
        self._is_amid_step = True
        hook = getattr(self.module, "microbatch_weight", None)
        microbatches = self._split(batch)
        weights = LossWeights(microbatches, self._head_loss, hook, self.groups.peers)
        parts: list[Outcome] = []
        calls: list[LogCall] = []
        grown: dict[str, list[Addition]] = {}
        around = self._anatomy.around(self.module)
        metrics = self._inner_metrics + metrics_of(part for _, part in around)
        check, updates = check_windows(metrics, len(microbatches)), Updates(metrics)

        def step(data: Any) -> Any:
            nonlocal calls, grown
            # Of what the stages append, that of the last counts: it appends the same once more, and more.
            with (
                recording(self.module, self._paths) as calls,
                growing(self.module, self._grows) as grown,
                updates.noting(),
            ):
                return self.module.training_step(data, *batch.args, **batch.kwargs)

        def finish(number: int, result: Any, head: HeadCall) -> Tensor | None:
            check()
            loss = loss_of(result, self.module)
            share = weights.share(number, own_loss=loss is head.loss, head=head)
            report = Report(share, microbatches[number].rows, calls)
            counts = share > 0 and (loss.requires_grad or head.counts == ())
            place = (self.topology.replica, number)
            parts.append(Outcome(place, recorded(loss), report, detach(extras_of(result)), detach(grown), counts))
            return scale(loss * (share / accumulate)) if counts else None

        call = TrainingCall(step, batch.context, batch.key, weights.weighing, finish, self.module.backward)
        before = self._buffers(around)
        with self._stepping(), silent(self.module), self._apart() as earlier:
            sync = self._gradient_sync if is_last and self._gradient_sync.is_early else None
            if sync is not None:
                sync.begin({} if is_first else earlier)
            self.pipeline.train(microbatches, call, sync)
            if sync is not None:
                sync.start()
            # Nodes have clocks of their own, of which only that of the day is the same.
            self._clock_shift = time.time() - time.perf_counter()
        changed = [buffer.name for buffer in before if buffer.is_changed]
        self._note_used()
        own = [part.as_tree() for part in parts], Constant(self._used), Constant(self._optimized), Constant(changed)
        shared, used, groups, buffers = zip(*self._gather_steps(own), strict=True)
        self._is_amid_step = False
        check_groups(groups)
        check_buffers(buffers)
        parts = [Outcome.of_tree(tree) for tree in chain.from_iterable(shared)]
        # Those of the batches before as well: what a hook takes away on one rank only is there, as zeros, for the sum.
        self._present = set() if is_first else self._present
        if any(part.counts for part in parts):
            self._present = self._present.union(*used)
        return self._join(sorted(parts, key=lambda part: part.place), weights.total_rows)

    def _buffers(self, parts: Iterable[tuple[str, nn.Module]]) -> list[_Buffer]:
        """The buffers of the user's own as they are now, of the parts around the base model."""
        return [
            _Buffer(name, part._buffers, key, buffer, version_of(buffer))
            for path, part in parts
            for key, buffer in part._buffers.items()
            if buffer is not None and self._anatomy.layer_of(name := f"{path}.{key}" if path else key) is None
        ]

    def _split(self, batch: Batch) -> list[Microbatch]:
        """Splits a batch, as the module says if it does; those of several loaders each by its own rows."""
        hook, count = getattr(self.module, "microbatch_split", None), self._num_parts
        if hook is not None:
            parts = list(hook(batch.data, count))
            check_in_group(describe(parts, "microbatches"), "behind microbatch_split", self.groups.pipeline)
            return [Microbatch(part, count_rows(part) or 1) for part in parts]
        if batch.loaders is None:
            return split(batch.data, count)
        parts = split_together(batch.parts, count)
        return [Microbatch(tree_unflatten(pieces, batch.loaders), rows) for pieces, rows in parts]

    def _join(self, parts: list[Outcome], rows: int) -> dict[str, Any]:
        """Puts together what all microbatches of all replicas gave, on every rank alike."""
        shares = [part.report.share for part in parts]
        self._correct(sum(shares))
        if not any(part.counts for part in parts):
            # Some stages have zeros, which momentum or decay would turn to steps.
            self._gradient_sync.give_up()
            self._pending = [(parameter, None) for parameter, _ in self._pending]
        replay(self.module, combine([part.report for part in parts]), rows)

        rows_of_parts = [part.report.rows for part in parts]
        grown = join_lists([part.grown for part in parts], shares, rows_of_parts)
        self._grows = {*(self._grows or ()), *grown}
        for name, items in grown.items():
            vars(self.module)[name].extend(items)
        extras = join([part.extras for part in parts], shares, rows_of_parts)
        values, (_, dtype) = [part.loss[0] for part in parts], parts[0].loss
        loss = torch.as_tensor(reduce("mean", shares, values), dtype=dtype, device=self.device)
        return {"loss": loss, **extras}

    @contextmanager
    def _apart(self) -> Iterator[Mapping[nn.Parameter, Tensor | None]]:
        """Sets the gradients of this step apart from those of earlier batches, which it gives."""
        held = self.ownership.held()
        before = {parameter: parameter.grad for parameter in held}
        for parameter in held:
            parameter.grad = None
        yield before
        self._pending = [(parameter, parameter.grad) for parameter in held]
        for parameter, gradient in before.items():
            parameter.grad = gradient

    def _correct(self, total: float) -> None:
        """Divides the gradients of this step by the sum of the shares, where that was not known before."""
        gradients = [gradient for _, gradient in self._pending if gradient is not None]
        if total > 0 and not math.isclose(total, 1.0, rel_tol=1e-9):
            # On every rank, as the total: sums that were started are of what was not divided, and so will the next be.
            self._gradient_sync.give_up()
            self._gradient_sync.is_early = False
            if gradients:
                torch._foreach_div_(gradients, total)

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Exchanges what this rank does not hold in an optimizer's groups, those added in mid-run too."""
        if [len(group) for group in self._optimized] == [len(group["params"]) for group in optimizer.param_groups]:
            return
        self.ownership.adopt(optimizer)
        places = {parameter: index for index, parameter in enumerate(self.ownership.holders)}
        self._optimized = [[places[parameter] for parameter in group["params"]] for group in optimizer.param_groups]

    def _note_used(self) -> None:
        """Notes the parameters that got a gradient on this rank, by their places in the module, if others did."""
        now = [gradient is not None for _, gradient in self._pending]
        if now != self._has_gradients:
            self._has_gradients = now
            used = {parameter for parameter, gradient in self._pending if gradient is not None}
            self._used = [index for index, parameter in enumerate(self.ownership.holders) if parameter in used]

    def put_gradients(self) -> None:
        """Adds the gradients of the last step to those in place."""
        complete = self._gradient_sync.under_way  # with those in place, if they belong to this step
        for parameter, gradient in self._pending:
            if gradient is None:
                continue
            before = None if parameter in complete else parameter.grad
            parameter.grad = gradient if before is None else before.add_(gradient)
        self._absent.put(self._present)
        self._pending, self._is_summed = [], False

    def reduce_gradients(self) -> None:
        """Sums the gradients of all copies."""
        self._gradient_sync.reduce()
        self._is_summed = True

    def show_gradients(self) -> None:
        """Ends the time of an optimizer's step, in which placeholders have no gradients."""
        self._absent.show()

    def _hide_after_clipping(self) -> None:
        """Has placeholders without gradients from the last hook before an optimizer's step on."""
        own = self.module.configure_gradient_clipping

        def clip_and_hide(*args: Any, **kwargs: Any) -> None:
            own(*args, **kwargs)
            self._absent.hide()

        self.shadow(self.module, configure_gradient_clipping=clip_and_hide)

    def share_overflow(self, scaler: torch.amp.GradScaler) -> None:
        """Has all ranks skip a step if the gradients of one overflow."""
        # In front of its own, so that it stays the user's object, whose state has the name of Lightning's plugin.
        self.shadow(scaler, _unscale_grads_=sharing_overflow(scaler, self._absent, self.groups.world))

    def clip_gradients(
        self,
        parameters: Iterable[nn.Parameter],
        max_norm: float,
        norm_type: float | str = 2.0,
        *,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Clips by a norm of the whole model's gradient, and returns it."""
        self._check_summed("clip_grad_norm")
        order = check_norm_type(norm_type)
        norm = clip_by_norm(
            parameters, max_norm, self.ownership, self.groups.world, order, error_if_nonfinite=error_if_nonfinite
        )
        return norm.to(self.device)

    def gradient_norms(self, norm_type: float | str) -> dict[str, Tensor]:
        """Norm of each parameter's gradient, where there is one."""
        self._check_summed("grad_norm")
        named = dict(self.module.named_parameters())
        return parameter_norms(named, self.ownership, self.groups.world, check_norm_type(norm_type))

    def _check_summed(self, name: str) -> None:
        """Refuses to look at gradients that are not yet whole.

        Raises:
            RuntimeError: They are not.
        """
        if not self._is_summed:
            raise RuntimeError(
                f"strategy.{name}() was called between the batches of an accumulation window. The copies of a stage"
                " add their gradients up after its last batch: call it in on_before_optimizer_step."
            )

    # ----------------------------------------------------------------------------------------------- evaluation

    def evaluate(self, name: str, batch: Batch, *, counts: bool, logs: bool) -> Any:
        """Runs the user's step once for a batch, and shares what it returned, logged and noted on the module.

        Args:
            name: The step's name.
            batch: The batch.
            counts: Whether this replica's batch counts; if not it only keeps step with the other replicas.
            logs: Whether the step may log; then all ranks of the world must take part.

        Returns:
            What the step returned, on every rank of this group.
        """
        self._is_amid_step = True
        result: Any = None
        own: Any = None
        if counts:
            result, calls = self._evaluate(name, batch)
            if self.topology.is_leader:
                own = Report(batch.all_rows, count_rows(batch.data) or 1, calls).as_tree()
        trees = self._gather_reports(own) if logs else []
        self._is_amid_step = False
        reports = [Report.of_tree(tree) for tree in trees if tree is not None]
        replay(self.module, combine(reports), sum(report.rows for report in reports))
        return result

    def _evaluate(self, name: str, batch: Batch) -> tuple[Any, list[LogCall]]:
        """Runs the step, and shares its result and what it noted on the module behind the model call."""
        before = Notes.of(self.module)
        calls: list[LogCall] = []
        metrics = self._inner_metrics + metrics_of(part for _, part in self._anatomy.around(self.module))

        def step(data: Any) -> Any:
            nonlocal calls
            with recording(self.module, self._paths) as calls, Updates(metrics).noting():
                return getattr(self.module, name)(data, *batch.args, **batch.kwargs)

        call = Call(step, batch.context, batch.key)
        with self._stepping():
            result = self.pipeline.evaluate(batch.data, call, self.layout.num_microbatches)
        result, changes = self._share((result, before.changes(self.module)))
        if not self.topology.is_leader:
            before.apply(self.module, changes)
        return result, calls

    # -------------------------------------------------------------------------------------------------- the rest

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """Marks the time in which the ranks do different things, so that no collective of the user can work."""
        self.in_step = True
        try:
            yield
        finally:
            self.in_step = False

    def timeline(self) -> Timeline | None:
        """When the actions of the last training step ran, over this rank's pipeline group; every rank must call it.

        Returns:
            Ranks are positions, as in the schedule; ``None`` before the first step.
        """
        position = self.topology.position
        shift = self._clock_shift
        own = (
            [span._replace(start=span.start + shift, end=span.end + shift) for span in self.pipeline.spans],
            [
                sync._replace(ranks=(position,), start=sync.start + shift, end=sync.end + shift)
                for sync in self._gradient_sync.spans
            ],
        )
        gathered: list[Any] = [None] * self.topology.num_positions
        dist.all_gather_object(gathered, own, group=self.groups.pipeline)
        spans, syncs = (list(chain.from_iterable(kind)) for kind in zip(*gathered, strict=True))
        if not spans:
            return None
        start = min(span.start for span in spans)
        positions = range(self.topology.num_positions)
        labels = tuple(f"position {position} (global rank {self.topology.at(position)})" for position in positions)
        return Timeline(
            "measured",
            len(positions),
            tuple(span._replace(start=span.start - start, end=span.end - start) for span in spans),
            labels,
            tuple(sync._replace(start=sync.start - start, end=sync.end - start) for sync in syncs),
        )

    def figures(self, seconds: float, rate: float) -> Figures:
        """What the last training step came to, the same on every rank; every rank must call it.

        Args:
            seconds: How long this rank took for all of the step.
            rate: Floating point operations that its device can do in a second.
        """
        spans, shift = self.pipeline.spans, self._clock_shift
        flops = training_flops(self.module, self._anatomy, self.pipeline.hidden) if self.topology.is_leader else 0.0
        own = (
            min(span.start for span in spans) + shift,
            max(span.end for span in spans) + shift,
            sum(span.duration for span in spans),
            self._gradient_sync.wait,
            self.pipeline.peak_activations,
            flops,
            seconds,
            rate,
        )
        gathered = torch.zeros(self.topology.world_size, len(own), dtype=torch.float64)
        dist.all_gather_into_tensor(gathered, torch.tensor([own], dtype=torch.float64), group=self.groups.world)
        by_group = gathered[torch.tensor(self.topology.groups())]
        start, end, busy, wait, peak, flops_of, seconds_of, rates = by_group.unbind(2)
        spent = end.amax(1) - start.amin(1)
        possible = float(seconds_of.max() * rates.sum())
        return Figures(
            bubble=float((1 - busy.mean(1) / spent).mean()),
            sync_wait=float(wait.mean()),
            peak_activations=float(peak.max()),
            utilization=float(flops_of.sum()) / possible if possible else math.nan,
        )

    def module_state(self) -> dict[str, Any]:
        """The whole module's state on global rank 0, its names elsewhere."""
        if not self.is_cut:
            return self.module.state_dict()
        return checkpoint.module_state(self.module, self.ownership, self.groups.world)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The whole optimizer's state on global rank 0, that of this rank's part elsewhere."""
        return checkpoint.optimizer_state(optimizer, self.ownership, self.groups.world)

    @contextmanager
    def full_parameters(self, *, gradients: bool) -> Iterator[None]:
        """Gives every rank the whole module for a while, with all gradients or with none; every rank must enter it."""
        if gradients:
            self._check_summed("full_parameters")
        spread = partial(checkpoint.spread_parameters, self.module, self.ownership, self.groups.world, self.device)
        values, whole = spread(), spread(lambda parameter: parameter.grad) if gradients else {}
        before = [(parameter, parameter.grad) for parameter in self.ownership.held()]
        filled = self.ownership.fill(values)
        for parameter, placeholder in filled.items():
            parameter.grad = whole.get(placeholder)
        for parameter, gradient in before:
            parameter.grad = gradient if gradients else None
        try:
            yield
        finally:
            self.ownership.empty(filled)
            for parameter, gradient in before:
                parameter.grad = gradient

    def make_whole(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Gives every rank the whole module again, on the CPU, and its parameters to the optimizers."""
        cpu = torch.device("cpu")
        values = checkpoint.spread_parameters(self.module, self.ownership, self.groups.world, cpu)
        filled = self.ownership.fill(values)
        for optimizer in optimizers:
            self.ownership.give(optimizer, filled)
        self.is_cut = False
        self.module.cpu()

    def cut_copy(self, copy: nn.Module) -> Ownership:
        """Cuts a whole copy of the module as the module is cut.

        Returns:
            The holders of the copy's parameters.
        """
        ownership = self._own(copy)
        ownership.drop(self.device)
        self._equalize(ownership)
        return ownership

    def copy_state(self, copy: nn.Module, ownership: Ownership) -> dict[str, Any]:
        """The whole state of a copy that is cut on global rank 0, its names elsewhere."""
        return checkpoint.module_state(copy, ownership, self.groups.world)

    def fill_copy(self, copy: nn.Module, ownership: Ownership) -> None:
        """Makes a copy whole again on every rank, on the CPU."""
        cpu = torch.device("cpu")
        ownership.fill(checkpoint.spread_parameters(copy, ownership, self.groups.world, cpu))
        copy.cpu()

    def shadow(self, owner: Any, **attributes: Any) -> None:
        """Puts attributes in front of an object's own, until the engine is released."""
        self._shadows.enter_context(Shadows([(owner, name, value) for name, value in attributes.items()]))

    @property
    def reusable_groups(self) -> Groups | None:
        """The process groups for a next run; none behind a step that broke off, whose messages may be on their way."""
        return None if self._is_amid_step else self.groups

    def release(self) -> None:
        """Takes back what was changed besides the module's parameters, and lets go of what holds memory.

        What there is to say of the last step stays. Links of a run that has failed stay as well: a rank that waits at
        the other end is to learn of the failure, not that nobody is there.
        """
        self._shadows.close()
        self.pipeline.release(links=not self.is_cut)
        self._gradient_sync.release()
        self._pending = []

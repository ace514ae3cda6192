"""Logged values and metrics that are equal on every rank.

The user's step runs only where the last stage is. What it logs there is recorded instead of logged, combined over the
microbatches of all replicas, and then logged once on every rank: so callbacks, progress bars, loggers and schedulers
see the same values everywhere, as in a single process.
"""

import inspect
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torchmetrics import Metric
from torchmetrics.wrappers import Running

from lightning_chimera.partition.shadows import Shadows
from lightning_chimera.runtime.packing import Constant
from lightning_chimera.runtime.versions import version_of

_IN_STEPS = "_chimera_in_steps"
"""Marks a metric that steps update, and have updated on this rank."""


Value = float | Tensor
"""What is logged: a number, in double precision whatever its type, or a tensor of any other shape."""


@dataclass
class LogCall:
    """One call of ``self.log``.

    Attributes:
        name: The key.
        value: The value; for a metric, its value for this step if it has one.
        dtype: In which the value is logged at last.
        metric: Path of the metric in the module, if one was logged.
        options: All other arguments.
    """

    name: str
    value: Value | None
    dtype: torch.dtype
    metric: str | None
    options: dict[str, Any]


@dataclass
class Report:
    """What one microbatch (or one evaluated batch) had to say.

    Attributes:
        share: Its weight in a mean.
        rows: Its rows.
        calls: Its log calls, in order.
    """

    share: float
    rows: int
    calls: list[LogCall] = field(default_factory=list)

    def as_tree(self) -> Any:
        """The report as it travels between ranks: what each call says of itself is the same in every step."""
        sizes = [call.options.get("batch_size") for call in self.calls]
        fixed = [
            (
                call.name,
                call.dtype,
                call.metric,
                {**call.options, "batch_size": None} if size is not None else call.options,
            )
            for call, size in zip(self.calls, sizes, strict=True)
        ]
        return float(self.share), self.rows, Constant(fixed), [call.value for call in self.calls], sizes

    @classmethod
    def of_tree(cls, tree: Any) -> "Report":
        """The report again."""
        share, rows, fixed, values, sizes = tree
        calls = [
            LogCall(name, as_number(value), dtype, metric, options if size is None else {**options, "batch_size": size})
            for (name, dtype, metric, options), value, size in zip(fixed, values, sizes, strict=True)
        ]
        return cls(share, rows, calls)


def check_group(group: Any) -> None:
    """Refuses to reduce or gather over a group of ranks.

    Raises:
        ValueError: It is one, and not that of all ranks.
    """
    if group is not None and group is not dist.group.WORLD:
        raise ValueError(
            "A process group was given to self.log (sync_dist_group), self.all_gather or strategy.reduce. The ranks of"
            " a pipeline work on the same rows, so values are shared between replicas, not ranks: leave the group out."
        )


@contextmanager
def recording(module: LightningModule, paths: dict[int, str]) -> Iterator[list[LogCall]]:
    """Records ``module.log`` (and with it ``log_dict``) instead of logging.

    Args:
        module: The user's module.
        paths: Where logged metrics were found by their ids; filled here, so that they are searched for once in a run.
    """
    calls: list[LogCall] = []

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        options = _options(module, args, kwargs)
        reduce_fx = options.get("reduce_fx", "mean")
        check_group(options.pop("sync_dist_group", None))
        options["reduce_fx"] = reduce_fx if isinstance(reduce_fx, str) else reduce_fx.__name__
        path = None
        if isinstance(value, Metric):
            path = _path_of(value, module, paths)
            if path is None:
                raise ValueError(
                    f"self.log({name!r}, ...) got a {type(value).__name__} that is no attribute of the module. Make it"
                    " one in __init__, so that every rank knows it."
                )
            value = value._forward_cache
        kept, dtype = (None, torch.get_default_dtype()) if value is None else recorded(value)
        calls.append(LogCall(name, kept, dtype, path, options))

    with Shadows([(module, "log", log)]):
        yield calls


_SIGNATURE = inspect.signature(LightningModule.log)


def _options(module: LightningModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``self.log`` behind the name and the value, by their names."""
    if not args and kwargs.keys() <= _SIGNATURE.parameters.keys() - {"self", "name", "value"}:
        return kwargs
    bound = _SIGNATURE.bind(module, "", None, *args, **kwargs).arguments
    return {name: value for name, value in bound.items() if name not in ("self", "name", "value")}


def _path_of(metric: Metric, module: LightningModule, paths: dict[int, str]) -> str | None:
    """Where a metric is in the module; ``None`` if it is not there."""
    path = paths.get(id(metric))
    if path is None or _submodule(module, path) is not metric:
        path = next((path for path, part in module.named_modules() if part is metric), None)
        if path is not None:
            paths[id(metric)] = path
    return path


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def recorded(value: Any) -> tuple[Value, torch.dtype]:
    """A value as it is now, and the type in which it is to be logged."""
    default = torch.get_default_dtype()
    if type(value) is float:
        return value, default
    tensor = torch.as_tensor(value).detach()
    dtype = tensor.dtype if tensor.dtype.is_floating_point else default
    # A number on a device is read together with all others when the step is over: each would be waited for.
    return (as_number(tensor) if tensor.is_cpu else tensor.clone()), dtype


def as_number(value: Any) -> Any:
    """A tensor without dimensions as a number; another as a copy, anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    return value.clone() if value.ndim or value.is_complex() else float(value.item())


@contextmanager
def silent(module: LightningModule) -> Iterator[None]:
    """Refuses ``module.log`` where it would be called for each microbatch, on one rank, and by no step."""

    def log(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError(
            f"self.log was called in the backward of {type(module).__name__}, which runs once for each microbatch, on"
            " the last stage only. Log in the step, in on_before_backward or in on_after_backward."
        )

    with Shadows([(module, "log", log)]):
        yield


def combine(reports: Sequence[Report]) -> list[LogCall]:
    """One log call for each name: means weighted by the shares, sums, minima, maxima."""
    merged: dict[str, list[tuple[Report, LogCall]]] = {}
    for report in reports:
        for call in report.calls:
            merged.setdefault(call.name, []).append((report, call))
    return [_merge(entries) for entries in merged.values()]


def _merge(entries: list[tuple[Report, LogCall]]) -> LogCall:
    first = entries[0][1]
    options = dict(first.options)
    # A size that follows the rows of each part adds up to that of the batch; any other is the user's own constant.
    if all(call.options.get("batch_size") == report.rows for report, call in entries):
        options["batch_size"] = sum(report.rows for report, _ in entries)
    known = [(report.share, call.value) for report, call in entries if call.value is not None]
    shares, values = [share for share, _ in known], [value for _, value in known]
    value = reduce(options["reduce_fx"], shares, values) if known else None
    dtype = next((call.dtype for _, call in entries if call.value is not None), first.dtype)
    return LogCall(first.name, value, dtype, first.metric, options)


def reduce(reduce_fx: str, shares: Sequence[float], values: Sequence[Value]) -> Value:
    """One value of those of all parts: their mean by the shares, their sum, minimum or maximum."""
    numbers = [value for value in values if isinstance(value, float)]
    if len(numbers) == len(values):
        return _reduce_numbers(reduce_fx, shares, numbers)
    return _reduce_tensors(reduce_fx, shares, values)


def _reduce_numbers(reduce_fx: str, shares: Sequence[float], values: Sequence[float]) -> float:
    """One of many numbers: torch's functions would cost more than all else that is done for them."""
    if reduce_fx == "sum":
        return sum(values)
    if reduce_fx in ("min", "max"):
        missing = next((value for value in values if math.isnan(value)), None)
        return missing if missing is not None else (min if reduce_fx == "min" else max)(values)
    counted = [(share, value) for share, value in zip(shares, values, strict=True) if share > 0]
    if not counted:
        return sum(values) / len(values)
    return sum(share * value for share, value in counted) / sum(share for share, _ in counted)


def _reduce_tensors(reduce_fx: str, shares: Sequence[float], values: Sequence[Value]) -> Tensor:
    stacked = torch.stack([torch.as_tensor(value).double() for value in values])
    if reduce_fx == "sum":
        return stacked.sum(dim=0)
    if reduce_fx in ("min", "max"):
        reduced: Tensor = getattr(stacked, f"a{reduce_fx}")(dim=0)
        return reduced
    return weighted_mean(shares, stacked)


def weighted_mean(shares: Sequence[float], values: Tensor) -> Tensor:
    """Mean over the first dimension; entries without weight do not count, not even as NaN."""
    counted = [part for part, share in enumerate(shares) if share > 0]
    if not counted:
        return values.mean(dim=0)
    weights = torch.tensor([shares[part] for part in counted], dtype=torch.float64)
    chosen = values if len(counted) == len(shares) else values[counted]
    weighed = chosen * weights.reshape(-1, *[1] * (values.ndim - 1)).to(values.device)
    return weighed.sum(dim=0) / weights.sum()


def replay(module: LightningModule, calls: Sequence[LogCall], rows: int) -> None:
    """Logs combined values on this rank; every rank does the same.

    Args:
        module: The user's module.
        calls: What to log.
        rows: Rows of the batches of all replicas, which weigh an epoch's mean where the user gave no ``batch_size``.
    """
    for call in calls:
        options = {"batch_size": max(rows, 1), **call.options, "sync_dist": False}
        if call.metric is None:
            assert call.value is not None
            module.log(call.name, _logged(call, module), **options)
            continue
        metric = module.get_submodule(call.metric)
        assert isinstance(metric, Metric)
        metric.__dict__["_forward_cache"] = None if call.value is None else _logged(call, module)
        metric._computed = None
        if metric._update_count == 0:
            metric._update_count = 1  # of another rank
            metric.__dict__.pop(_IN_STEPS, None)
        module.log(call.name, metric, **options)


def _logged(call: LogCall, module: LightningModule) -> Tensor:
    """The combined value of a call as a tensor of its own type on this rank's device."""
    return torch.as_tensor(call.value, dtype=call.dtype, device=module.device)


class MetricSync:
    """Makes torchmetrics sum over the ranks that saw an update, each row once.

    The stock gather takes the state of every rank in the world. Here a step updates a metric where its last stage is,
    so the default state of other ranks would count in means and break concatenations; and a hook updates it on every
    rank of a group alike, so each row would count several times.

    It is put on the class, since metrics are copied (by ``MetricTracker``), made in hooks and held by callbacks too.

    Args:
        world: All ranks, on the CPU.
        speaks: Whether this rank is the one of its group that speaks for hooks.
    """

    def __init__(self, world: ProcessGroup, *, speaks: bool) -> None:
        self._stock = Metric._sync_dist

        def sync(metric: Metric, *_args: Any, **_kwargs: Any) -> None:
            in_steps = metric.__dict__.get(_IN_STEPS, False)
            own = None
            if metric._update_count > 0 and (in_steps or speaks):
                state = {name: getattr(metric, name) for name in metric._reductions}
                own = in_steps, move_data_to_device(state, torch.device("cpu"))
            gathered: list[Any] = [None] * dist.get_world_size(world)
            dist.all_gather_object(gathered, own, group=world)
            found = [entry for entry in gathered if entry is not None]
            states = [state for in_steps, state in found if in_steps] or [state for _, state in found]
            for name, reduce in metric._reductions.items():
                if states:
                    setattr(metric, name, _join([state[name] for state in states], reduce, metric.device))

        Metric._sync_dist = sync  # type: ignore[method-assign, assignment]

    def remove(self) -> None:
        """Puts the stock behaviour back."""
        Metric._sync_dist = self._stock  # type: ignore[method-assign]


def metrics_of(parts: Iterable[nn.Module]) -> list[Metric]:
    """The metrics among the parts of a module."""
    return [part for part in parts if isinstance(part, Metric)]


class Updates:
    """Notes which metrics the passes of a batch update on this rank, and undoes those of passes that leave a stage.

    What comes before the model call runs once for each stage, and the last one's updates are those that count.

    Args:
        metrics: The metrics that a step may update.
    """

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = [(metric, _collections(metric)) for metric in metrics]
        self._copies: dict[int, _Backup] = {}

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Enters around one pass."""
        before = [dict(vars(metric)) for metric, _ in self._metrics]
        copies = [
            {name: self._copy(attributes[name]) for name in names if name in attributes}
            for attributes, (_, names) in zip(before, self._metrics, strict=True)
        ]
        try:
            yield
        except Exception:
            raise
        except BaseException:  # the boundary, which is no error
            for (metric, _), attributes, copied in zip(self._metrics, before, copies, strict=True):
                if not _is_as_before(vars(metric), attributes, copied):
                    vars(metric).clear()
                    vars(metric).update(attributes)
                    vars(metric).update({name: copy.value for name, copy in copied.items()})
            raise
        for (metric, _), attributes in zip(self._metrics, before, strict=True):
            if metric._update_count != attributes["_update_count"]:
                metric.__dict__[_IN_STEPS] = True

    def _copy(self, value: Any) -> "_Backup":
        """A copy, made once for as long as nothing changes; what several metrics share stays shared."""
        known = self._copies.get(id(value))
        if known is None or not known.is_of(value):
            known = self._copies[id(value)] = _Backup.of(value)
        return known


class _Backup(NamedTuple):
    """A tensor or a list, a copy of it, and the version of the tensor that it is of."""

    original: Any
    value: Any
    version: int

    @classmethod
    def of(cls, value: Any) -> "_Backup":
        """One of a value as it is now."""
        return cls(value, value.clone() if isinstance(value, Tensor) else list(value), version_of(value))

    def is_of(self, value: Any) -> bool:
        """Whether a value is the original, as it was."""
        if value is not self.original or version_of(value) != self.version:
            return False
        if isinstance(value, Tensor):
            return not value.is_inference()
        return len(value) == len(self.value) and all(map(operator.is_, value, self.value))


def _collections(metric: Metric) -> list[str]:
    """The attributes of a metric that may be changed in place: tensors and lists."""
    return [
        name
        for name, value in vars(metric).items()
        if type(value) is list or (isinstance(value, Tensor) and not isinstance(value, nn.Parameter))
    ]


def _is_as_before(now: dict[str, Any], before: dict[str, Any], copies: dict[str, _Backup]) -> bool:
    same = now.keys() == before.keys() and all(map(operator.is_, now.values(), before.values()))
    return same and all(copy.is_of(now[name]) for name, copy in copies.items())


def check_windows(metrics: Sequence[Metric], num_microbatches: int) -> Callable[[], None]:
    """Watches over metrics of the last updates, which a training step would update once for each microbatch.

    Returns:
        To be called when the step is over.
    """
    running = [(metric, metric._num_vals_seen) for metric in metrics if isinstance(metric, Running)]

    def check() -> None:
        for metric, seen in running:
            if metric._num_vals_seen != seen and num_microbatches > 1:
                raise RuntimeError(
                    f"The training step updates a {type(metric).__name__}, whose window of {metric.window} updates"
                    " would be one of microbatches, not of batches. Update it in on_train_batch_end, with what the step"
                    " returns."
                )

    return check


def _join(values: list[Any], reduce: Any, device: torch.device) -> Any:
    """A metric's state over ranks, by its own reduction."""
    if isinstance(values[0], list):
        flat = [item.to(device) for value in values for item in value]
        return reduce(flat) if flat and callable(reduce) else flat
    stacked = torch.stack([value.to(device) for value in values])
    return reduce(stacked) if callable(reduce) else stacked

"""What a step costs besides its work: actions, messages, logging, and everything around the schedule.

Two ranks of one thread each train a small GPT-2 (4 blocks, 32 wide; 2 microbatches of 2 rows of 16 tokens), whose work
is so little that the rest can be seen. Both also train it with a plain Trainer, at the same time; in turns with the
pipeline, in the same two processes. In a run blocks of ten steps that log nothing, values, and values and a metric take
turns as well, and the median step of each kind counts. `added` is what a pipeline takes longer, waiting for the other
rank included, and `added cpu` what its thread computes more.

Outside of the schedule is all but forward and backward: the exchange of what was logged, the sum of gradients, which
here waits for the end of the schedule, and the optimizer. Values and a metric are how much longer a step is where it
logs them.

An action is what one of the schedule takes, its messages included, beyond the operations of the model in it, which
have clocks of their own: blocks, embeddings, head, loss and backward. What the user's step and the model do around
these is not counted either, as often as a plain Trainer does it. A pipeline does it more often: the step is entered
once for each stage, and runs as far as the model's blocks. That has a row for itself, and no limit, as it is code of
the user's own; it is measured in the plain step. The operations have one too: they take longer than in a plain Trainer
with batches as small as a microbatch, since a rank that waits for another finds less of them in its caches. Without a
model only the executor and the messages are left.

A message is half of the way to the other rank and back, with two actions that do nothing. The watch is what its threads
compute in the time of a step of 100 ms, while the thread that trains sleeps.
"""

import logging
import os
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import lightning as L
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.ranks import TIMEOUT, run
from benchmarks.report import Bar, Report, arguments
from benchmarks.schedules import one_microbatch
from lightning_chimera import ChimeraStrategy
from lightning_chimera.runtime.boundary import Boundary
from lightning_chimera.runtime.executor import Executor, Incoming
from lightning_chimera.runtime.links import Links
from lightning_chimera.runtime.topology import Groups, Topology
from lightning_chimera.runtime.watch import Watcher
from lightning_chimera.schedules import Action, Schedule, get_family, lower

RANKS = 2
MICROBATCHES, ROWS, LENGTH, VOCABULARY = 2, 2, 16, 101
VALUES = 10

ACTION_LIMIT = 0.2
"""Milliseconds that an action may cost with its messages."""
LOGGED_LIMIT = 1.0
"""Milliseconds that a step may take longer where it logs ten values and a metric."""

STEP = 0.1
"""Seconds of the step that the watch is measured by."""
WATCH_LIMIT = 0.5
"""Milliseconds that the watch may compute in such a step."""

ACTION, BARE_ACTION, WATCH = "action", "action without a model", "watch, in a step of 100 ms"
ENTERED = "step entered once more, an action"
OPERATIONS = "the model's operations, an action"

SIZES = (1, 4, 16, 64, 256, 1024, 4096)
"""Of messages, in KiB."""

BLOCK, SKIPPED = 10, 2
"""Steps that log the same, and how many of them are not counted."""


class Logging(NamedTuple):
    """What a step logs."""

    name: str
    values: int
    metric: bool


NOTHING = Logging("nothing", 0, metric=False)
SOME = Logging(f"{VALUES} values", VALUES, metric=False)
ALL = Logging(f"{VALUES} values and a metric", VALUES, metric=True)
KINDS = (NOTHING, SOME, ALL)


def kind_of(step: int) -> int:
    """Which of the kinds a step logs."""
    return step // BLOCK % len(KINDS)


class Module(L.LightningModule):
    """A small language model that logs other things every few steps."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT2LMHeadModel(
            GPT2Config(
                n_positions=LENGTH,
                n_embd=32,
                n_layer=4,
                n_head=2,
                vocab_size=VOCABULARY,
                bos_token_id=0,
                eos_token_id=0,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        )
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Logs the loss under several names."""
        loss: Tensor = self.model(**batch).loss
        what = KINDS[kind_of(batch_idx)]
        for number in range(what.values):
            self.log(f"value_{number}", loss)
        if what.metric:
            self.mean(loss.detach())
            self.log("mean", self.mean)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Moment(NamedTuple):
    """Seconds, of the clock and of this thread; a moment, or the time between two."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> "Moment":
        """The moment."""
        return cls(time.perf_counter(), time.thread_time())

    @classmethod
    def median(cls, found: Iterable["Moment"]) -> "Moment":
        """The medians of both."""
        return cls(*map(statistics.median, zip(*found, strict=True)))

    @classmethod
    def sum(cls, found: Iterable["Moment"]) -> "Moment":
        """The sums of both."""
        return cls(*map(sum, zip(*found, strict=True)))

    def less(self, other: "Moment") -> "Moment":
        """The time from another moment to this, or what one time is more than another."""
        return Moment(self.wall - other.wall, self.cpu - other.cpu)

    def times(self, factor: float) -> "Moment":
        """Many times this."""
        return Moment(self.wall * factor, self.cpu * factor)


NONE = Moment(0.0, 0.0)


@dataclass
class Times:
    """What the steps took that log the same.

    Attributes:
        whole: Whole steps.
        inside: Their forward and backward.
        model: The operations of the model in these.
        entering: What plain ones took up to the first block, without the embeddings.
        losses: Their losses.
    """

    whole: list[Moment] = field(default_factory=list)
    inside: list[Moment] = field(default_factory=list)
    model: list[Moment] = field(default_factory=list)
    entering: list[Moment] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def outside(self) -> list[Moment]:
        """The rest of each step."""
        return [whole.less(inside) for whole, inside in zip(self.whole, self.inside, strict=True)]

    @property
    def around(self) -> list[Moment]:
        """What is around the operations of the model in forward and backward."""
        return [inside.less(model) for inside, model in zip(self.inside, self.model, strict=True)]


class Clock(Callback):
    """Notes what steps take.

    Args:
        times: Where they are noted, by what they log.
    """

    def __init__(self, times: Sequence[Times]) -> None:
        self._times = times
        self._last: Moment | None = None
        self._inside: list[Moment] = []
        self._model: list[Moment] = []
        self._entering: list[Moment] = []
        self._backward = torch.autograd.backward

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Puts clocks around the schedule, or around a plain step and its backward, and around the model's parts."""
        own: Any = module
        model = own.model
        base = model.transformer
        for part in (base.wte, base.wpe, base.drop, *base.h, base.ln_f, model.lm_head):
            part.forward = _timed(part.forward, self._model)
        model.loss_function = _timed(model.loss_function, self._model)
        torch.autograd.backward = _timed(self._backward, self._model)
        if isinstance(trainer.strategy, ChimeraStrategy):
            pipeline: Any = trainer.strategy.engine.pipeline
            pipeline.train = _timed(pipeline.train, self._inside)
            return
        start, before = Moment.now(), 0

        def enter(*args: Any) -> Tensor:
            nonlocal start, before
            start, before = Moment.now(), len(self._model)
            loss: Tensor = step(*args)
            return loss

        def reach(*_: Any) -> None:
            self._entering.append(Moment.now().less(start).less(Moment.sum(self._model[before:])))

        step = own.training_step
        base.h[0].register_forward_pre_hook(reach)
        own.training_step = _timed(enter, self._inside)
        torch.autograd.backward = _timed(torch.autograd.backward, self._inside)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Puts torch's function back."""
        torch.autograd.backward = self._backward

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Notes a step: from the end of the last to the end of this."""
        now, times = Moment.now(), self._times[kind_of(batch_idx)]
        times.losses.append(float(outputs["loss"]))
        if self._last is not None and batch_idx % BLOCK >= SKIPPED:
            times.whole.append(now.less(self._last))
            times.inside.append(Moment.sum(self._inside))
            times.model.append(Moment.sum(self._model))
            times.entering += self._entering
        self._inside.clear()
        self._model.clear()
        self._entering.clear()
        self._last = Moment.now()


def _timed(function: Callable[..., Any], spent: list[Moment]) -> Callable[..., Any]:
    """A function that notes what its calls take."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = Moment.now()
        result = function(*args, **kwargs)
        spent.append(Moment.now().less(start))
        return result

    return timed


def fit(times: Sequence[Times], blocks: int, strategy: ChimeraStrategy | None, rows: int = MICROBATCHES * ROWS) -> None:
    """Trains the module for some blocks of steps of each kind, plainly or as a pipeline."""
    torch.manual_seed(0)
    module = Module()
    data = torch.randint(VOCABULARY, (blocks * len(KINDS) * BLOCK * rows, LENGTH))
    samples: Any = [{"input_ids": row, "labels": row} for row in data]
    loader: DataLoader[Any] = DataLoader(samples, batch_size=rows)
    L.Trainer(
        max_epochs=1,
        devices=1 if strategy is None else RANKS,
        strategy="auto" if strategy is None else strategy,
        callbacks=[Clock(times)],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, loader)


class Idle:
    """The work of actions that do nothing.

    Args:
        schedule: What is run.
        nbytes: Size of a message.
    """

    def __init__(self, schedule: Schedule, nbytes: int) -> None:
        self._takes, self._gives = set(schedule.producers), set(schedule.producers.values())
        self._tensor = torch.zeros(nbytes // 4)

    def boundary(self, action: Action) -> Boundary:
        """Shape and type of each message."""
        return Boundary(self._tensor.shape, self._tensor.dtype)

    demand = boundary

    def run(self, action: Action, incoming: Incoming) -> Tensor | None:
        """Takes the input and gives an output."""
        if action in self._takes:
            incoming(self.boundary(action))
        return self._tensor if action in self._gives else None


# ---------------------------------------------------------------------------------------------------------------- rank


class Figure(NamedTuple):
    """A row of the table on one rank.

    Attributes:
        what: What was measured.
        plain: With a plain Trainer.
        ours: In a pipeline.
    """

    what: str
    plain: Moment
    ours: Moment


def _rank(blocks: int, rounds: int) -> tuple[list[Figure], float]:
    """Measures everything on this rank.

    Returns:
        The rows, and the largest relative difference between the losses of a pipeline and of a plain Trainer.
    """
    rank = dist.get_rank()
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    plain, small, ours = ([Times() for _ in KINDS] for _ in range(3))
    for _ in range(rounds):
        dist.barrier()
        fit(plain, blocks, None)
        dist.barrier()
        fit(small, blocks, None, ROWS)
        dist.barrier()
        strategy = ChimeraStrategy(
            num_microbatches=MICROBATCHES, gradient_sync="lazy", print_plan=False, timeout=TIMEOUT
        )
        fit(ours, blocks, strategy)
    differences = [
        abs(one - other) / other
        for piped, reference in zip(ours, plain, strict=True)
        for one, other in zip(piped.losses, reference.losses, strict=True)
    ]
    figures = [*_of_steps(plain, small, ours), *_of_messages(blocks * BLOCK), _of_watch(steps=blocks * BLOCK)]
    return figures, max(differences)


def _of_steps(plain: Sequence[Times], small: Sequence[Times], ours: Sequence[Times]) -> Iterator[Figure]:
    """The rows that follow from whole steps; the plain ones may be as small as microbatches."""
    forwards = MICROBATCHES  # of a rank, which runs each microbatch on one of as many stages as there are ranks
    passes = MICROBATCHES / RANKS  # of the whole model that they come to
    entered = Moment.median(small[0].entering).times(forwards - passes)
    around = Moment.median(small[0].around).times(passes)
    usual = Moment.median(plain[0].whole), Moment.median(ours[0].whole)
    yield Figure("step", *usual)
    yield Figure("outside of the schedule", Moment.median(plain[0].outside), Moment.median(ours[0].outside))
    share = 1 / (2 * forwards)
    operations = Moment.median(small[0].model).times(passes * share), Moment.median(ours[0].model).times(share)
    yield Figure(ACTION, NONE, Moment.median(ours[0].around).less(around).less(entered).times(share))
    yield Figure(ENTERED, NONE, entered.times(share))
    yield Figure(OPERATIONS, *operations)
    for number, kind in enumerate(KINDS[1:], 1):
        in_plain, in_ours = Moment.median(plain[number].whole), Moment.median(ours[number].whole)
        yield Figure(kind.name, in_plain.less(usual[0]), in_ours.less(usual[1]))


def _of_messages(steps: int) -> Iterator[Figure]:
    """The rows of actions that do nothing but hand on messages."""
    topology = Topology.of_world(RANKS, RANKS, dist.get_rank())
    schedule = get_family("chimera").build(RANKS, MICROBATCHES)
    groups = Groups.reuse(None, topology, schedule.placement, [], TIMEOUT)
    links = Links(topology, groups.links, torch.device("cpu"), TIMEOUT)
    links.connect()
    executor = Executor(links, topology.position)

    def median(schedule: Schedule, kib: int) -> Moment:
        lowered, work, spent = lower(schedule), Idle(schedule, kib * 1024), []
        for _ in range(steps):
            dist.barrier()
            start = Moment.now()
            executor.run(lowered, work)
            spent.append(Moment.now().less(start))
        return Moment.median(spent[SKIPPED:])

    yield Figure(BARE_ACTION, NONE, median(schedule, 1).times(1 / len(schedule.rows[topology.position])))
    for kib in SIZES:
        yield Figure(f"message of {kib} KiB", NONE, median(one_microbatch(schedule.placement), kib).times(1 / 2))


def _of_watch(steps: int) -> Figure:
    """What the threads of a watch compute while this process does nothing, by their own clocks: others compute too."""
    rank = dist.get_rank()
    port = torch.zeros(1, dtype=torch.int64)
    kept = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    if kept is not None:
        port.fill_(kept.port)
    dist.broadcast(port, 0)
    store = PrefixStore("watch", TCPStore("127.0.0.1", int(port), is_master=False, wait_for_workers=False))
    store.set(f"beat/{rank}", "")
    dist.barrier()
    others = set(threading.enumerate())
    watcher = Watcher(store, rank, RANKS, timedelta(seconds=60), keeper=0)
    watcher.start()
    watcher.begin()
    clocks = [
        time.pthread_getcpuclockid(thread.ident) for thread in set(threading.enumerate()) - others if thread.ident
    ]
    before = sum(map(time.clock_gettime, clocks))
    time.sleep(steps * STEP)
    watched = (sum(map(time.clock_gettime, clocks)) - before) / steps
    watcher.end()
    watcher.close()
    dist.barrier()  # the store is kept by rank 0
    return Figure(WATCH, Moment(STEP, 0.0), Moment(STEP, watched))


# -------------------------------------------------------------------------------------------------------------- report


def judge(report: Report, ranks: Sequence[tuple[list[Figure], float]], *, on_time: bool) -> None:
    """Adds the rows, which are means over the ranks, and the bars."""

    def milliseconds(found: Iterable[float]) -> float:
        return statistics.fmean(found) * 1e3

    added = {}
    for same in zip(*(figures for figures, _ in ranks), strict=True):
        more = [figure.ours.less(figure.plain) for figure in same]
        row = {
            "what": same[0].what,
            "plain_ms": milliseconds(figure.plain.wall for figure in same),
            "ours_ms": milliseconds(figure.ours.wall for figure in same),
            "added_ms": milliseconds(time.wall for time in more),
            "added_cpu_ms": milliseconds(time.cpu for time in more),
        }
        report.rows.append(row)
        added[same[0].what] = row
    report.bars.append(Bar("difference of the losses to a plain Trainer's", max(found for _, found in ranks), 1e-5))
    if on_time:
        # Of the clock's time most is waiting for the other rank.
        for what in (ACTION, BARE_ACTION):
            report.bars.append(Bar(f"ms of an {what}, computing", added[what]["added_cpu_ms"], ACTION_LIMIT))
        report.bars.append(Bar(f"ms of the {WATCH}", added[WATCH]["added_cpu_ms"], WATCH_LIMIT))
        report.bars.append(
            Bar(f"ms of {ALL.name}, on top of Lightning's own", added[ALL.name]["added_ms"], LOGGED_LIMIT)
        )


def main() -> int:
    """Measures all of it on two ranks."""
    parser = arguments(__doc__)
    parser.add_argument("--blocks", type=int, default=8, help="blocks of steps of each kind in a run")
    parser.add_argument("--rounds", type=int, default=4, help="runs of a plain Trainer and of a pipeline")
    given = parser.parse_args()
    if min(given.blocks, given.rounds) < 1:
        parser.error("one block or more is measured, in one run or more")
    blocks, rounds = (1, 1) if given.quick else (given.blocks, given.rounds)
    steps = blocks * rounds * (BLOCK - SKIPPED)
    about = {"ranks": RANKS, "microbatches": MICROBATCHES, "rows": ROWS, "length": LENGTH, "steps": steps}
    report = Report("What a step costs besides its work", about)
    judge(report, run(_rank, blocks, rounds, size=RANKS, limit=100 if given.quick else 900), on_time=not given.quick)
    return report.finish(given.json)


if __name__ == "__main__":
    sys.exit(main())

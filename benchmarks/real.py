"""GPT-2 in training on 2 cores, by pipelines, by data parallelism, and by one process.

Every candidate trains the same model with the same AdamW on the same global batches: N microbatches of 4 rows, with a
pipeline of 2 ranks on one thread each. Its processes wait for their turn before each step, so that the candidates
alternate step by step and what else the machine does falls on all of them. A turn is a whole step: data, forward,
backward, sum of the gradients, optimizer, and Lightning's loop where the candidate runs under a Trainer.

`ours` are runs of the Trainer with this strategy, `torch` those of torch.distributed.pipelining in a bare loop, with
the cut that ours takes and the gradient of the tied table summed over both ends. `ddp` and `fsdp2` are Lightning's
strategies on 2 processes of one thread, each with half of the rows, `one process` has all rows and both threads. The
limit is two processes of one thread that train at the same time and know nothing of each other, each on half of the
rows: what 2 cores can do if nothing has to be exchanged. Its tokens per second are the sum of both.

A step is the median time of a turn, `cpu` for how long it kept cores busy; efficiency is the share of the limit's
tokens per second, the median over the rounds. `states` are the bytes of parameters, gradients and AdamW's moments on
the process with most of them, `activations` the most that autograd kept at one time for backwards. All must find the
loss that one process finds. Of the larger model with 4 microbatches only those are measured that a bar asks for: the
processes of all together need more than 24 GiB.
"""

import functools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.report import Bar, Report, Row, arguments
from benchmarks.turns import Candidate, Processes, Seen, Turn
from lightning_chimera import ChimeraStrategy
from lightning_chimera.partition.anatomy import find_anatomy
from lightning_chimera.partition.balance import balance, layer_costs

ROWS = 4
"""Rows of a microbatch."""

WARM_UP = 3
"""Steps before those that count; in the second of them the activations are measured."""

DIFFERENCE = 1e-4
"""The most that a loss may differ from that of one process, as a part of it."""

EFFICIENCY = {("large", 2): 0.90, ("large", 4): 0.93}
ADVANTAGE = {("large", 2): 1.25, ("small", 2): 1.0, ("small", 4): 1.0}
BEHIND_DDP = 1.03
"""The least part of the limit and of torch's best that Chimera may reach, and the most time against DDP."""


class Size(NamedTuple):
    """A GPT-2.

    Attributes:
        name: What it is called here.
        layers: Its blocks.
        width: Size of the hidden states.
        length: Tokens of a row.
        vocabulary: Size of the vocabulary.
    """

    name: str
    layers: int
    width: int
    length: int
    vocabulary: int = 8192


NEEDED = ("chimera", "ddp", "1F1B", "one process", "limit")
"""The candidates that the bars ask for."""
CROWDED = {("large", 4)}
"""Where only these are measured."""

Batch = dict[str, Tensor]

SIZES = (Size("small", 8, 256, 128), Size("large", 8, 512, 256))
QUICK = Size("tiny", 2, 64, 32, 256)


@dataclass(frozen=True)
class Work:
    """What all candidates do.

    Attributes:
        size: The model.
        num_microbatches: Parts of a batch in a pipeline.
        num_steps: Steps that are made.
    """

    size: Size
    num_microbatches: int
    num_steps: int

    @property
    def rows(self) -> int:
        """Rows of a global batch."""
        return self.num_microbatches * ROWS

    @property
    def tokens(self) -> int:
        """Tokens of a global batch."""
        return self.rows * self.size.length

    def model(self) -> GPT2LMHeadModel:
        """The model, the same in every process; dropout would draw other masks in each layout."""
        torch.manual_seed(0)
        size = self.size
        config = GPT2Config(
            n_layer=size.layers,
            n_embd=size.width,
            n_head=max(1, size.width // 64),
            n_positions=size.length,
            vocab_size=size.vocabulary,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
        )
        return GPT2LMHeadModel(config)

    def loader(self, rank: int = 0, parts: int = 1) -> "DataLoader[Batch]":
        """Global batches, or the part of each that a process draws for itself: Lightning's sampler would shuffle."""
        generator = torch.Generator().manual_seed(1)
        shape = (self.num_steps * self.rows, self.size.length)
        rows = [
            {"input_ids": ids, "labels": ids}
            for ids in torch.randint(0, self.size.vocabulary, shape, generator=generator)
        ]
        return DataLoader(cast("Dataset[Batch]", rows[rank % parts :: parts]), batch_size=self.rows // parts)


# ----------------------------------------------------------------------------------------------------------- candidates


class Turns(Callback):
    """The same in a Trainer.

    Args:
        turn: Where this process waits.
    """

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Waits."""
        self._turn.begin(pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        """Notes the loss."""
        self._turn.end(float(outputs["loss"]), pl_module, trainer.optimizers[0])


class Training(L.LightningModule):
    """GPT-2 in training, as people write it.

    Args:
        work: What is trained.
        shards: Whether FSDP2 shards the blocks and the rest.
    """

    def __init__(self, work: Work, *, shards: bool = False) -> None:
        super().__init__()
        self.model = work.model()
        self._shards = shards

    def configure_model(self) -> None:
        """Shards the model, as Lightning's strategy for FSDP2 demands."""
        if self._shards and not isinstance(self.model, torch.distributed.fsdp.FSDPModule):
            mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
            for block in self.model.transformer.h:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of a batch of rows."""
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, fused."""
        return make_optimizer(self.parameters())


def make_optimizer(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of all candidates."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def by_trainer(work: Work, turn: Turn, rank: int, *, make: Callable[[Work], Any], devices: int, parts: int) -> None:
    """Trains by Lightning's Trainer.

    Args:
        work: What is trained.
        turn: Where the process waits.
        rank: The process's rank; the Trainer knows it from the environment.
        make: Makes the strategy.
        devices: Its processes.
        parts: Into how many parts a global batch is cut by the processes themselves.
    """
    strategy = make(work)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_steps=work.num_steps,
        callbacks=[Turns(turn)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = Training(work, shards=isinstance(strategy, ModelParallelStrategy))
    trainer.fit(module, work.loader(rank, parts))


def _ours(schedule: str, work: Work) -> ChimeraStrategy:
    return ChimeraStrategy(schedule, num_microbatches=work.num_microbatches, print_plan=False)


def _ddp(work: Work) -> DDPStrategy:
    return DDPStrategy(process_group_backend="gloo")


def _fsdp2(work: Work) -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")


def _plain(work: Work) -> str:
    return "auto"


class FirstStage(nn.Module):
    """Embeddings and the first blocks of a GPT-2.

    Args:
        model: The whole.
        cut: The first block of the other stage.
    """

    def __init__(self, model: GPT2LMHeadModel, cut: int) -> None:
        super().__init__()
        self.tokens, self.positions = model.transformer.wte, model.transformer.wpe
        self.blocks = model.transformer.h[:cut]

    @property
    def tied(self) -> Tensor:
        """The table that the other stage has as well."""
        return self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Hidden states."""
        hidden: Tensor = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            hidden = _only(block(hidden))
        return hidden


class LastStage(nn.Module):
    """The other blocks and the head of a GPT-2.

    Args:
        model: The whole.
        cut: The first block of this stage.
    """

    def __init__(self, model: GPT2LMHeadModel, cut: int) -> None:
        super().__init__()
        self.blocks, self.norm, self.head = model.transformer.h[cut:], model.transformer.ln_f, model.lm_head

    @property
    def tied(self) -> Tensor:
        """The table that the other stage has as well."""
        weight: Tensor = self.head.weight
        return weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits."""
        for block in self.blocks:
            hidden = _only(block(hidden))
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def _only(output: Any) -> Tensor:
    """The hidden states that a block returns, alone or in a tuple."""
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


def by_torch(work: Work, turn: Turn, rank: int, *, schedule: str) -> None:
    """Trains by torch.distributed.pipelining."""
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = work.model()
    anatomy = find_anatomy(model)
    (cut,) = balance(layer_costs(model, anatomy), 2)
    stage = (LastStage if rank else FirstStage)(model, cut)
    vocabulary = work.size.vocabulary

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = model.loss_function(logits, labels, vocab_size=vocabulary)
        return loss

    pipeline = get_schedule_class(schedule)(
        PipelineStage(stage, rank, 2, torch.device("cpu")), work.num_microbatches, loss_fn=loss_of
    )
    optimizer = make_optimizer(stage.parameters())
    for batch in work.loader():
        turn.begin(stage)
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if rank:
            pipeline.step(target=batch["labels"], losses=losses, return_outputs=False)
        else:
            pipeline.step(batch["input_ids"], return_outputs=False)
        dist.all_reduce(stage.tied.grad)
        optimizer.step()
        turn.end(float(torch.stack(losses).mean()) if losses else None, stage, optimizer)


def _trainer(make: Callable[[Work], Any], devices: int = 2, parts: int = 1) -> Callable[[Work, Turn, int], None]:
    return functools.partial(by_trainer, make=make, devices=devices, parts=parts)


CANDIDATES = (
    Candidate("chimera", "ours", _trainer(functools.partial(_ours, "chimera"))),
    Candidate("GPipe", "torch", functools.partial(by_torch, schedule="GPipe")),
    Candidate("1f1b", "ours", _trainer(functools.partial(_ours, "1f1b"))),
    Candidate("1F1B", "torch", functools.partial(by_torch, schedule="1F1B")),
    Candidate("gpipe", "ours", _trainer(functools.partial(_ours, "gpipe"))),
    Candidate("ddp", "lightning", _trainer(_ddp, parts=2)),
    Candidate("fsdp2", "lightning", _trainer(_fsdp2, parts=2)),
    Candidate("one process", "lightning", _trainer(_plain, devices=1), size=1, threads=2),
    Candidate("limit", "lightning", _trainer(_plain, devices=1, parts=2), is_joined=False),
)
"""In the order of their turns."""


# -------------------------------------------------------------------------------------------------------------- figures


@dataclass
class Result:
    """What came of a candidate's turns.

    Attributes:
        candidate: The candidate.
        rates: Tokens per second of each step that counts.
        seconds: What each of them took.
        cpu: For how long each of them kept cores busy.
        losses: The loss of each step.
        states: Bytes of states on the process with most.
        activations: Bytes of activations on the process with most.
    """

    candidate: Candidate
    rates: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    states: int = 0
    activations: int = 0

    def add(self, seconds: float, seen: Sequence[Seen], tokens: int, *, counts: bool) -> None:
        """Adds a step."""
        losses = [told.loss for told in seen if told.loss is not None]
        self.losses.append(sum(losses) / len(losses))
        self.states = max(told.states for told in seen)
        self.activations = max(told.activations for told in seen)
        if counts:
            self.seconds.append(seconds)
            self.cpu.append(sum(told.cpu for told in seen))
            shares = [tokens / len(seen) / told.seconds for told in seen]
            self.rates.append(tokens / seconds if self.candidate.is_joined else sum(shares))

    def share_of(self, other: "Result") -> float:
        """The tokens per second as a part of another's, the median over the rounds."""
        return statistics.median(own / its for own, its in zip(self.rates, other.rates, strict=True))


def measure(work: Work, candidates: Sequence[Candidate]) -> dict[str, Result]:
    """Has all candidates make their steps in turns, every other round in the opposite order."""
    processes = [Processes(candidate, work) for candidate in candidates]
    results = {candidate.label: Result(candidate) for candidate in candidates}
    try:
        for own in processes:
            own.get_ready()
        for number in range(work.num_steps - 1):  # after its last step a process says nothing more
            for own in processes[:: -1 if number % 2 else 1]:
                results[own.candidate.label].add(*own.step(), work.tokens, counts=number >= WARM_UP)
    finally:
        for own in processes:
            own.end()
    return results


def judge(report: Report, work: Work, results: dict[str, Result], *, has_bars: bool) -> None:
    """Adds the rows and the bars of one model and number of microbatches."""
    limit, whole = results["lightning limit"], results["lightning one process"]
    for result in results.values():
        report.rows.append(_row(work, result, limit))
        if result is not limit:
            report.bars.append(_loss_bar(work, result, whole))
    if not has_bars:
        return
    chimera, where = results["ours chimera"], f"{work.size.name}, N = {work.num_microbatches}: chimera's time"
    key = (work.size.name, work.num_microbatches)
    if key in EFFICIENCY:
        report.bars.append(Bar(f"{where} against the limit's", 1 / chimera.share_of(limit), 1 / EFFICIENCY[key]))
    if key in ADVANTAGE:
        best = max(1 / chimera.share_of(other) for other in results.values() if other.candidate.runtime == "torch")
        report.bars.append(Bar(f"{where} against torch's best", best, 1 / ADVANTAGE[key]))
    report.bars.append(Bar(f"{where} against DDP's", 1 / chimera.share_of(results["lightning ddp"]), BEHIND_DDP))


def _row(work: Work, result: Result, limit: Result) -> Row:
    return {
        "model": work.size.name,
        "N": work.num_microbatches,
        "runtime": result.candidate.runtime,
        "candidate": result.candidate.name,
        "step_ms": statistics.median(result.seconds) * 1e3,
        "cpu_ms": statistics.median(result.cpu) * 1e3,
        "tokens_per_s": statistics.median(result.rates),
        "efficiency": result.share_of(limit),
        "states_MB": result.states / 1e6,
        "activations_MB": result.activations / 1e6,
    }


def _loss_bar(work: Work, result: Result, whole: Result) -> Bar:
    differences = [abs(own / its - 1) for own, its in zip(result.losses, whole.losses, strict=True)]
    name = f"{work.size.name}, N = {work.num_microbatches}, {result.candidate.label}: difference of the loss"
    return Bar(name, max(differences), DIFFERENCE)


def main() -> int:
    """Measures both models with 2 and 4 microbatches."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=12, help="steps that count, of each candidate")
    parser.add_argument("--only", choices=[size.name for size in SIZES], help="one of the models")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4], help="numbers of microbatches")
    parser.add_argument("--candidates", nargs="+", help=f"names of those beside {', '.join(NEEDED)}")
    given = parser.parse_args()
    if given.steps < 1:
        parser.error("one step or more is measured")
    sizes = (QUICK,) if given.quick else [size for size in SIZES if given.only in (None, size.name)]
    steps, microbatches = (2, [2]) if given.quick else (given.steps, given.microbatches)
    everyone = NEEDED if given.quick else [candidate.name for candidate in CANDIDATES]
    report = Report(
        "GPT-2 in training on 2 cores",
        {"steps": steps, "rows_of_a_microbatch": ROWS, "vocabulary": SIZES[0].vocabulary},
    )
    for size in sizes:
        for number in microbatches:
            usual = NEEDED if (size.name, number) in CROWDED else everyone
            names = usual if given.candidates is None else [*NEEDED, *given.candidates]
            chosen = [candidate for candidate in CANDIDATES if candidate.name in names]
            work = Work(size, number, WARM_UP + steps + 1)
            judge(report, work, measure(work, chosen), has_bars=not given.quick)
    return report.finish(given.json)


if __name__ == "__main__":
    sys.exit(main())

"""Runs one stage of one microbatch through the model's own forward.

The user's step is called on every stage, and the HuggingFace code inside it builds masks, positions and heads as it
always does. Only the walk through the blocks is changed, for the time of one call: in the list of blocks those of other
stages are transparent, the stage's first is handed the activation received from the previous stage, and its last
carries its result out of the user's step by an exception. Parameters, module names and hooks are never touched; shadows
live in the instances' ``__dict__``, where ``nn.Module`` looks before its own modules.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_chimera.partition.anatomy import Anatomy
from lightning_chimera.partition.heads import Weighing, weigh_terms
from lightning_chimera.partition.shadows import Shadow, Shadows

Receive = Callable[[torch.Size], Tensor | None]
"""Gives the activation that enters a stage, of the shape it is told; ``None`` on the first stage."""

Part = Callable[[int, dict[str, Any], Tensor | None], Tensor]
"""Runs a stage on the model's arguments for some rows, and the activation that enters; gives the one that leaves."""

Through = Callable[[dict[str, Any], int, torch.Size, Part], Tensor | None]
"""Brings all rows through this rank's stages in parts; see :meth:`StageRunner.run_whole`."""

Reseed = Callable[[int], None]
"""Called with a layer's number just before that layer runs, so that its random draws depend on nothing else."""


_COUNTS_OTHERWISE = ("num_items_in_batch", "shift_labels", "ignore_index")
"""Arguments of HuggingFace's losses that change over what they are a mean."""


class StageExit(BaseException):
    """Carries the hidden state out of the user's step at the end of a stage.

    A ``BaseException``, so that a user's ``except Exception`` around the model call lets it pass.
    """

    def __init__(self, hidden: Any) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass
class HeadCall:
    """What the HuggingFace head was given and returned, if the user's step called it with labels.

    Attributes:
        loss: The loss that the head computed itself, if it is one mean.
        labels: What it is a mean over.
        count: Over how many of them, as they were when the head was called.
        counts: Over how many things each of its terms is a mean, if they were weighed; ``None`` for one that it lacks.
    """

    loss: Tensor | None = None
    labels: Tensor | None = None
    count: int | None = None
    counts: tuple[int | None, ...] = ()


@dataclass
class Passage:
    """One pass of one microbatch through one stage.

    Attributes:
        entered: The activation received from the previous stage; ``None`` on the first.
        left: What came out: the hidden state for the next stage, or the user's own result on the last.
        head: The head's call, on the last stage.
        called: Whether the step has called the model.
    """

    entered: Tensor | None = None
    left: Any = None
    head: HeadCall = field(default_factory=HeadCall)
    called: bool = False


class _Passing(Tensor):
    """What comes out of a transparent block, to be thrown away: the hidden states, or a tuple that begins with them.

    Which of them a block returns differs between families, and between versions of HuggingFace.
    """

    def __getitem__(self, index: Any) -> Any:
        return self if isinstance(index, int) and index == 0 else super().__getitem__(index)


class _Transparent:
    """A block of another stage: lets the hidden states through, and answers as the block where it is asked."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        return hidden if type(hidden) is _Passing else hidden.as_subclass(_Passing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.block, name)


class _Done(_Transparent):
    """The last block, whose output is there already."""

    def __init__(self, block: nn.Module, output: Any) -> None:
        super().__init__(block)
        self.output = output

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        return self.output


class _Block:
    """A block in its place on a stage: enters before it, seeds it, leaves after it.

    It leaves from here, not from inside the block, because with gradient checkpointing the block's forward runs inside
    the checkpoint function.
    """

    def __init__(self, block: Callable[..., Any], layer: int, reseed: Reseed, *, recompute: bool = False) -> None:
        self.block = block
        self.layer = layer
        self.reseed = reseed
        self.recompute = recompute
        self.entered: Tensor | None = None
        self.after: Callable[[Any], None] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.entered is not None:
            if args:
                args = (self.entered, *args[1:])
            else:
                kwargs["hidden_states"] = self.entered
        if self.recompute and torch.is_grad_enabled():
            # The seeds give the recomputed block the same masks, so no state of a generator needs to be kept.
            output = checkpoint(self._seeded, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        else:
            output = self._seeded(*args, **kwargs)
        if self.after is not None:
            self.after(output)
        return output

    def _seeded(self, *args: Any, **kwargs: Any) -> Any:
        self.reseed(self.layer)
        return self.block(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.block, name)


class StageRunner:
    """The stages of one model.

    Args:
        anatomy: The model.
        cuts: The first block of each stage but the first.
    """

    def __init__(self, anatomy: Anatomy, cuts: Sequence[int]) -> None:
        self.anatomy = anatomy
        self.cuts = tuple(cuts)
        self._container, self._attribute = anatomy.container()
        self._blocks = anatomy.blocks()
        self._transparent = [_Transparent(block) for block in self._blocks]
        self._gives_tuples = False  # whether a block's output is a tuple, known after the first
        self._prologue = [_owner(anatomy.base, path) for path in anatomy.family.prologue]
        self._nothing: Tensor | None = None
        self._names = tuple(inspect.signature(anatomy.base.forward).parameters)
        self._head_names = tuple(inspect.signature(anatomy.top.forward).parameters)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.cuts) + 1

    def blocks_of(self, stage: int) -> range:
        """The blocks of a stage."""
        edges = (0, *self.cuts, self.anatomy.num_blocks)
        return range(edges[stage], edges[stage + 1])

    def blocks_in(self, stage: int) -> list[nn.Module]:
        """The blocks of a stage themselves."""
        return [self._blocks[index] for index in self.blocks_of(stage)]

    def modules_of(self, stage: int, module: nn.Module) -> list[nn.Module]:
        """What a stage runs of a module: its blocks, and on the first and the last what is around the blocks."""
        own = self.blocks_in(stage)
        if 0 < stage < self.num_stages - 1:
            return own
        inside = {part for block in self._blocks for part in block.modules()}
        # Leaves only: a module that holds the blocks would bring them along.
        around = [part for part in module.modules() if part not in inside and not list(part.children())]
        return [*own, *around]

    def stage_of(self, layer: int) -> int:
        """The stage of a layer."""
        block = min(max(layer - 1, 0), self.anatomy.num_blocks - 1)
        return sum(block >= cut for cut in self.cuts)

    def run(
        self,
        stage: int,
        call: Callable[[], Any],
        *,
        receive: Receive,
        reseed: Reseed,
        weighing: Weighing | None = None,
        recompute: bool = False,
    ) -> Passage:
        """Calls the user's step on one microbatch, as one stage sees it.

        Args:
            stage: The stage.
            call: The user's step with its arguments bound.
            receive: Told the shape of the boundary tensors of this microbatch; gives the activation that enters, on all
                stages but the first.
            reseed: Called before each layer.
            weighing: How the head's loss is counted; ``None`` to leave it as it is.
            recompute: Whether each block keeps its input only, and runs once more in the backward.

        Raises:
            RuntimeError: The step did not call the model, or called it more than once.
        """
        passage = Passage()
        leaves = stage < self.num_stages - 1

        def walk(forward: Callable[..., Any], given: dict[str, Any]) -> Any:
            passage.entered = receive(self._boundary_shape(given))
            places = self._places(stage, passage.entered, reseed, leaves=leaves, recompute=recompute)
            reseed(0)
            return self._forward(forward, given, passage.entered, places)

        return self._call(call, passage, walk, weighing, leaves=leaves, splits=True)

    def run_whole(self, call: Callable[[], Any], *, is_last: bool, through: Through, reseed: Reseed) -> Passage:
        """Calls the user's step once on a whole batch; the rows that it gives to the model go through in parts.

        Args:
            call: The user's step with its arguments bound.
            is_last: Whether this rank runs the last stage, behind which the step goes on.
            through: Takes the model's arguments, the number of their rows, the shape of the hidden states, and a
                function that runs a stage on some of the rows; gives the hidden states of all on the last stage.
            reseed: Called before each layer.

        Raises:
            RuntimeError: As ``run``.
        """
        passage = Passage()

        def walk(forward: Callable[..., Any], given: dict[str, Any]) -> Any:
            if self.num_stages == 1:
                return self._forward(forward, given, None, self._places(0, None, reseed, leaves=False))

            def part(stage: int, rows: dict[str, Any], entered: Tensor | None) -> Tensor:
                places = self._places(stage, entered, reseed, leaves=True)
                try:
                    self._forward(forward, rows, entered, places)
                except StageExit as leaving:
                    left: Tensor = leaving.hidden
                    return left
                raise AssertionError("a stage that leaves never returns")

            hidden = through(given, _rows(given), self._boundary_shape(given), part)
            if not is_last:
                raise StageExit(hidden)
            # The blocks are done: all of them are transparent, and the last hands in what came out of them.
            last = _Done(self._blocks[-1], (hidden,) if self._gives_tuples else hidden)
            reseed(self.anatomy.num_layers - 1)
            return self._forward(forward, given, hidden, [*self._transparent[:-1], last])

        return self._call(call, passage, walk, None, leaves=not is_last, splits=False)

    def _call(
        self,
        call: Callable[[], Any],
        passage: Passage,
        walk: Callable[[Callable[..., Any], dict[str, Any]], Any],
        weighing: Weighing | None,
        *,
        leaves: bool,
        splits: bool,
    ) -> Passage:
        """Calls the user's step with ``walk`` in the place of the base model's forward."""
        base, top = self.anatomy.base, self.anatomy.top
        shadows: list[Shadow] = [(top, "generate", _refuse_generate), (base, "forward", self._once(passage, walk))]
        if top is not base:
            shadows.append((top, "forward", self._watched(passage.head, weighing, splits=splits)))
        try:
            with Shadows(shadows):
                passage.left = call()
        except StageExit as leaving:
            passage.left = leaving.hidden
            return passage
        if not passage.called:
            raise RuntimeError(
                f"The step returned without calling the {type(base).__name__} {self.anatomy.base_name!r}. A pipelined"
                " step calls the model exactly once."
            )
        if leaves:
            raise RuntimeError(
                "The step went on after a stage had left the model. Something around the model call caught the"
                " exception that leaves a stage: a bare `except:`, `except BaseException`, or `return` in `finally`."
            )
        return passage

    def _once(self, passage: Passage, walk: Callable[[Callable[..., Any], dict[str, Any]], Any]) -> Callable[..., Any]:
        """The base model's forward as a step sees it: called once, without a cache, with its arguments by name."""
        forward = self.anatomy.base.forward

        def once(*args: Any, **kwargs: Any) -> Any:
            if passage.called:
                raise RuntimeError(
                    "The model was called more than once in one step. A pipeline runs one forward of the model per"
                    " step; compute everything from one call."
                )
            passage.called = True
            given = {**dict(zip(self._names, args, strict=False)), **kwargs}
            self._refuse_inner_outputs(given)
            # Most models would build a cache of keys and values even in training. It stays where it has an effect:
            # without one, and without a mask, position ids that start anew mean several texts in a row.
            is_packed = given.get("position_ids") is not None and given.get("attention_mask") is None
            if "use_cache" in self._names and not is_packed:
                given["use_cache"] = False
            return walk(forward, given)

        return once

    def _refuse_inner_outputs(self, given: Mapping[str, Any]) -> None:
        """Refuses a call that asks for what is inside of other stages.

        Raises:
            RuntimeError: It does.
        """
        if self.num_stages == 1:
            return
        for name in ("output_hidden_states", "output_attentions"):
            asked = given.get(name)
            if asked or (asked is None and getattr(self.anatomy.base.config, name, False)):
                raise RuntimeError(
                    f"{name}=True asks for the inside of every block, but this rank holds the blocks of its own stage"
                    f" only. Leave {name} out of the call and of the config."
                )

    def _watched(self, head: HeadCall, weighing: Weighing | None, *, splits: bool) -> Callable[..., Any]:
        """The head's forward, noting its loss and its count, or weighing its terms, where it sees a part of a batch."""
        forward, known = self.anatomy.top.forward, self.anatomy.head_loss

        def watch(*args: Any, **kwargs: Any) -> Any:
            given = {**dict(zip(self._head_names, args, strict=False)), **kwargs}
            counted = [name for name in _COUNTS_OTHERWISE if splits and given.get(name) is not None]
            if counted:
                raise RuntimeError(
                    f"The step gives {counted[0]} to the model, whose loss is then not the mean over its labels. Leave"
                    " it out: the parts of a batch are weighed by their labels, over microbatches and replicas."
                )
            output = forward(*args, **kwargs)
            if known is None:
                return output
            if not known.terms:
                head.labels = known.count.labels(given)
                if head.labels is not None:
                    head.count = None if weighing is None else weighing.count(0, given)
                    head.loss = output[0] if isinstance(output, tuple) else output.loss
            elif weighing is not None:
                head.counts = weigh_terms(output, given, known, weighing, self.anatomy.top.config)
            return output

        return watch

    def _places(
        self, stage: int, entered: Tensor | None, reseed: Reseed, *, leaves: bool, recompute: bool = False
    ) -> list[Any]:
        """The list of blocks as a stage sees it.

        Every block has its place, since some models look up masks by a block's number; those of other stages are
        transparent.
        """
        own = self.blocks_of(stage)
        placed = [_Block(self._blocks[index], 1 + index, reseed, recompute=recompute) for index in own]
        placed[0].entered = entered
        placed[-1].after = self._leave if leaves else lambda _output: reseed(self.anatomy.num_layers - 1)
        return [*self._transparent[: own.start], *placed, *self._transparent[own.stop :]]

    def _forward(
        self, forward: Callable[..., Any], given: dict[str, Any], entered: Tensor | None, places: list[Any]
    ) -> Any:
        """Runs the base model's own forward over a list of places."""
        shadows: list[Shadow] = [(self._container, self._attribute, places)]
        if entered is not None:
            nothing = self._nothing_like(entered)
            shadows += [(module, name, lambda *_args, **_kwargs: nothing) for module, name in self._prologue]
        with Shadows(shadows):
            return forward(**given)

    def _nothing_like(self, entered: Tensor) -> Tensor:
        """Zeros in the place of what the prologue gives; they take no memory, and can't be written to."""
        known = self._nothing
        if known is None or known.shape != entered.shape or known.dtype != entered.dtype or known.is_inference():
            known = self._nothing = entered.new_zeros(()).expand_as(entered)
        return known

    def _leave(self, output: Any) -> None:
        """Ends a stage with the output of its last block.

        Raises:
            RuntimeError: The blocks hand on more than one hidden state.
        """
        self._gives_tuples = isinstance(output, tuple)
        hidden, *others = output if self._gives_tuples else (output,)
        if any(isinstance(other, Tensor) and other.shape == hidden.shape for other in others):
            name, shape = type(self.anatomy.base).__name__, tuple(hidden.shape)
            raise RuntimeError(
                f"The blocks of {name} hand on several hidden states of {shape} each, but one crosses the boundary of a"
                " stage. Such a model can't be cut."
            )
        raise StageExit(hidden)

    def _boundary_shape(self, given: Mapping[str, Any]) -> torch.Size:
        """Shape of the hidden states in one call of the base model, where each of several texts in a row is a row."""
        ids = given.get("input_ids")
        if ids is None:
            return torch.Size((*given["inputs_embeds"].shape[:-1], self.anatomy.hidden_size))
        *several, length = ids.shape
        return torch.Size((math.prod(several), length, self.anatomy.hidden_size))


def _refuse_generate(*_args: Any, **_kwargs: Any) -> None:
    raise RuntimeError(
        "generate() was called inside a step. It calls the model once per token, and a pipeline runs one forward of the"
        " model per step. Call it in a hook around the steps (on_validation_epoch_end, say), on all ranks, inside of"
        " `with self.trainer.strategy.full_parameters():`."
    )


def _rows(given: Mapping[str, Any]) -> int:
    """Number of rows that the base model is given."""
    return len(given["input_ids"] if given.get("input_ids") is not None else given["inputs_embeds"])


def _owner(base: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module that holds another, and its name there."""
    above, _, name = path.rpartition(".")
    return base.get_submodule(above), name

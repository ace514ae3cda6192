"""Runs one stage of one microbatch through the model's own forward.

The user's step is called on every stage, and the HuggingFace code inside it builds masks, positions and heads as it
always does. Only the walk through the blocks is changed, for the time of one call: the list of blocks is shadowed by
the stage's own blocks, the first of which is handed the activation received from the previous stage, and the last of
which carries its result out of the user's step by an exception. Parameters, module names and hooks are never touched;
shadows live in the instances' ``__dict__``, where ``nn.Module`` looks before its own modules.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_chimera.partition.anatomy import Anatomy

Receive = Callable[[torch.Size, torch.dtype], Tensor]
"""Gives the activation that enters a stage, of the shape and type it is told."""

Reseed = Callable[[int], None]
"""Called with a layer's number just before that layer runs, so that its random draws depend on nothing else."""


class StageExit(BaseException):
    """Carries the hidden state out of the user's step at the end of a stage.

    A ``BaseException``, so that a user's ``except Exception`` around the model call lets it pass.
    """

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass
class HeadCall:
    """What the HuggingFace head was given and returned, if the user's step called it with labels.

    Attributes:
        loss: The loss that the head computed itself.
        labels: The labels it was given.
    """

    loss: Tensor | None = None
    labels: Tensor | None = None


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


class _Block:
    """A block in its place on a stage: enters before it, seeds it, leaves after it.

    It leaves from here, not from inside the block, because with gradient checkpointing the block's forward runs inside
    the checkpoint function.
    """

    def __init__(self, block: nn.Module, layer: int, reseed: Reseed) -> None:
        self.block = block
        self.layer = layer
        self.reseed = reseed
        self.entered: Tensor | None = None
        self.after: Callable[[Tensor], None] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.entered is not None:
            if args:
                args = (self.entered, *args[1:])
            else:
                kwargs["hidden_states"] = self.entered
        self.reseed(self.layer)
        output = self.block(*args, **kwargs)
        if self.after is not None:
            self.after(output[0] if isinstance(output, tuple) else output)
        return output

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
        self._signature = inspect.signature(anatomy.base.forward)
        self._head_signature = inspect.signature(anatomy.top.forward)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.cuts) + 1

    def blocks_of(self, stage: int) -> range:
        """The blocks of a stage."""
        edges = (0, *self.cuts, self.anatomy.num_blocks)
        return range(edges[stage], edges[stage + 1])

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
        on_shape: Callable[[torch.Size], None],
    ) -> Passage:
        """Calls the user's step as one stage sees it.

        Args:
            stage: The stage.
            call: The user's step with its arguments bound.
            receive: Gives the activation that enters; not called on the first stage.
            reseed: Called before each layer.
            on_shape: Told the shape of the boundary tensors of this microbatch, before anything is received.

        Raises:
            RuntimeError: The step did not call the model, or called it more than once.
        """
        passage = Passage()
        base, top = self.anatomy.base, self.anatomy.top
        watched = {} if top is base else {"forward": self._watched(passage.head)}
        walk = self._walk(stage, passage, receive, reseed, on_shape)
        try:
            with _shadowed(top, watched), _shadowed(base, {"forward": walk}):
                passage.left = call()
        except StageExit as leaving:
            passage.left = leaving.hidden
            return passage
        if not passage.called:
            raise RuntimeError(
                f"The step returned without calling the {type(self.anatomy.base).__name__}"
                f" {self.anatomy.base_name!r}. A pipelined step calls the model exactly once."
            )
        if stage < self.num_stages - 1:
            raise RuntimeError(
                f"The step went on after stage {stage} had left the model. Something around the model call caught the"
                " exception that leaves a stage: a bare `except:`, `except BaseException`, or `return` in `finally`."
            )
        return passage

    def _watched(self, head: HeadCall) -> Callable[..., Any]:
        """The head's forward, noting its labels and its loss."""
        forward, known = self.anatomy.top.forward, self.anatomy.head_loss

        def watch(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if known is not None:
                given = dict(zip(self._head_signature.parameters, args, strict=False)) | kwargs
                head.labels = given.get(known.labels)
                if head.labels is not None:
                    head.loss = output[0] if isinstance(output, tuple) else output.loss
            return output

        return watch

    def _walk(
        self, stage: int, passage: Passage, receive: Receive, reseed: Reseed, on_shape: Callable[[torch.Size], None]
    ) -> Callable[..., Any]:
        """The base model's own forward, walking through the blocks of one stage only."""
        base, last = self.anatomy.base, self.num_stages - 1
        forward = base.forward
        calls = 0

        def walk(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise RuntimeError(
                    "The model was called more than once in one step. A pipeline runs one forward of the model per"
                    " step; compute everything from one call (generate() and steps with two calls can't be cut)."
                )
            given = dict(zip(self._signature.parameters, args, strict=False)) | kwargs
            if "use_cache" in self._signature.parameters:
                given["use_cache"] = False  # GPT-2 would build a cache of keys and values even in training
            shape = self._boundary_shape(given)
            on_shape(shape)
            passage.called = True
            if stage > 0:
                passage.entered = receive(shape, self.anatomy.dtype)
                given |= {"input_ids": None, "inputs_embeds": passage.entered}
            placed = [_Block(self._blocks[index], 1 + index, reseed) for index in self.blocks_of(stage)]
            placed[0].entered = passage.entered
            placed[-1].after = _leave if stage < last else lambda _hidden: reseed(self.anatomy.num_layers - 1)
            stand_ins = self.anatomy.family.prologue if stage > 0 else {}
            reseed(0)
            with _shadowed(self._container, {self._attribute: placed}), _shadowed(base, stand_ins):
                return forward(**given)

        return walk

    def _boundary_shape(self, given: Mapping[str, Any]) -> torch.Size:
        """Shape of the hidden states for one call of the base model."""
        ids = given.get("input_ids")
        rows_and_length = ids.shape if ids is not None else given["inputs_embeds"].shape[:-1]
        return torch.Size((*rows_and_length, self.anatomy.hidden_size))


@contextmanager
def _shadowed(module: nn.Module, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Puts attributes in front of a module's own for a while."""
    before = {name: module.__dict__[name] for name in attributes if name in module.__dict__}
    module.__dict__.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            module.__dict__.pop(name, None)
        module.__dict__.update(before)


def _leave(hidden: Tensor) -> None:
    """Ends a stage."""
    raise StageExit(hidden)

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from lightning_chimera.partition.anatomy import find_anatomy
from lightning_chimera.partition.stage import Passage, StageRunner
from lightning_chimera.runtime.microbatches import cut


class Module(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = GPT2LMHeadModel(SMALL_GPT2) if kind == "gpt2" else BertForMaskedLM(SMALL_BERT)


SMALL_GPT2 = GPT2Config(vocab_size=31, n_positions=8, n_embd=8, n_layer=3, n_head=2, bos_token_id=1, eos_token_id=2)
SMALL_BERT = BertConfig(vocab_size=31, hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16)
IDS = torch.arange(24).reshape(4, 6)
BATCH = {"input_ids": IDS, "attention_mask": (torch.arange(6) < torch.tensor([[6], [3], [4], [1]])).long()}


def make(kind: str = "gpt2", cuts: tuple[int, ...] = (1, 2)) -> tuple[Module, StageRunner]:
    module = Module(kind).eval()
    return module, StageRunner(find_anatomy(module), cuts)


def run(
    runner: StageRunner,
    stage: int,
    step: Callable[[], Any],
    entering: Tensor | None = None,
    seeds: list[int] | None = None,
    shapes: list[Any] | None = None,
) -> Passage:
    def receive(shape: torch.Size) -> Tensor | None:
        if shapes is not None:
            shapes.append(shape)
        if stage == 0:
            return None
        assert entering is not None
        assert entering.shape == shape
        return entering

    note_seed = seeds.append if seeds is not None else lambda _layer: None
    return runner.run(stage, step, receive=receive, reseed=note_seed)


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
@pytest.mark.parametrize("cuts", [(), (1,), (2,), (1, 2)])
def test_stages_one_after_the_other_are_the_model(kind: str, cuts: tuple[int, ...]) -> None:
    module, runner = make(kind, cuts)
    expected = module.model(**BATCH, labels=IDS)
    hidden = None
    for stage in range(runner.num_stages):
        passage = run(runner, stage, lambda: module.model(**BATCH, labels=IDS), hidden)
        hidden = passage.left
    torch.testing.assert_close(passage.left.logits, expected.logits, rtol=0.0, atol=0.0)
    assert passage.left.loss == expected.loss
    assert passage.head.loss is passage.left.loss
    assert passage.head.labels is IDS


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_gradients_flow_through_the_boundaries(kind: str) -> None:
    module, runner = make(kind)
    module.model(**BATCH, labels=IDS).loss.backward()
    expected = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    passages, hidden = [], None
    for stage in range(3):
        entering = None if hidden is None else hidden.detach().requires_grad_()
        passages.append(run(runner, stage, lambda: module.model(**BATCH, labels=IDS), entering))
        hidden = passages[-1].left
    gradient = None
    for passage in reversed(passages):
        torch.autograd.backward(passage.left if gradient is not None else passage.left.loss, gradient)
        gradient = None if passage.entered is None else passage.entered.grad
    torch.testing.assert_close([parameter.grad for parameter in module.parameters()], expected)


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_a_later_stage_needs_no_parameter_of_an_earlier_one(kind: str) -> None:
    module, runner = make(kind)
    hidden = torch.rand(4, 6, 8)
    for name, parameter in list(module.named_parameters()):
        layer = runner.anatomy.layer_of(name)
        if layer is not None and runner.stage_of(layer) != 1:
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, nn.Parameter(torch.empty_like(parameter, device="meta")))
    left = run(runner, 1, lambda: module.model(**BATCH, labels=IDS), hidden).left
    assert (left.shape, left.device.type) == ((4, 6, 8), "cpu")


def test_layers_are_seeded_by_their_number_in_the_whole_model() -> None:
    module, runner = make(cuts=(2,))
    seeds: list[int] = []
    shapes: list[Any] = []
    left = run(runner, 0, lambda: module.model(**BATCH), None, seeds, shapes).left
    assert (seeds, shapes) == ([0, 1, 2], [(4, 6, 8)])
    run(runner, 1, lambda: module.model(**BATCH), left, seeds)
    assert seeds == [0, 1, 2, 0, 3, 4]  # block 2 is layer 3, and layer 4 is what comes after the blocks


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
@pytest.mark.parametrize("cuts", [(), (1,), (1, 2)])
def test_rows_may_go_through_in_parts_while_the_step_runs_once(kind: str, cuts: tuple[int, ...]) -> None:
    module, runner = make(kind, cuts)
    expected = module.model(**BATCH, labels=IDS)
    calls: list[int] = []

    def step() -> Any:
        calls.append(1)
        return module.model(**BATCH, labels=IDS)

    entering: list[Tensor | None] = [None, None]
    for stage in range(runner.num_stages):

        def through(given: dict[str, Any], rows: int, shape: torch.Size, part: Any, stage: int = stage) -> Tensor:
            assert (rows, shape) == (4, (4, 6, 8))
            halves = [cut(given, 4, start, start + 2) for start in (0, 2)]
            entering[:] = [part(stage, half, hidden) for half, hidden in zip(halves, entering, strict=True)]
            return torch.cat(entering)

        is_last = stage == runner.num_stages - 1
        passage = runner.run_whole(step, is_last=is_last, through=through, reseed=lambda _layer: None)
    assert len(calls) == runner.num_stages
    torch.testing.assert_close(passage.left.logits, expected.logits)
    torch.testing.assert_close(passage.left.loss, expected.loss)


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_what_is_inside_of_other_stages_is_refused(name: str) -> None:
    module, runner = make(cuts=(1,))
    with pytest.raises(RuntimeError, match=f"{name}=True asks for the inside of every block"):
        run(runner, 0, lambda: module.model(**BATCH, **{name: True}))


def test_what_is_inside_of_other_stages_is_refused_in_the_config_too(monkeypatch: pytest.MonkeyPatch) -> None:
    module, runner = make(cuts=(1,))
    monkeypatch.setattr(module.model.config, "output_hidden_states", True)
    with pytest.raises(RuntimeError, match="Leave output_hidden_states out of the call and of the config"):
        run(runner, 0, lambda: module.model(**BATCH))


def test_a_sum_in_the_place_of_a_mean_is_refused() -> None:
    module, runner = make(cuts=())
    with pytest.raises(RuntimeError, match="gives num_items_in_batch to the model"):
        run(runner, 0, lambda: module.model(**BATCH, labels=IDS, num_items_in_batch=7))


def attributes(module: nn.Module) -> list[set[str]]:
    return [set(vars(part)) for part in module.modules()]


def test_nothing_is_left_on_the_model() -> None:
    module, runner = make()
    before = attributes(module)
    run(runner, 0, lambda: module.model(**BATCH))
    assert attributes(module) == before
    with pytest.raises(ZeroDivisionError):
        run(runner, 0, lambda: 1 / 0)
    with pytest.raises(IndexError):
        run(runner, 0, lambda: module.model(input_ids=IDS + 1000))
    assert attributes(module) == before
    assert module.model(**BATCH).logits.shape == (4, 6, 31)


def test_hooks_on_blocks_and_on_the_model_are_called() -> None:
    module, runner = make(cuts=(2,))
    called: list[str] = []
    for name in ("model", "model.transformer", "model.transformer.h.1", "model.transformer.h.2"):
        module.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: called.append(name))
    run(runner, 0, lambda: module.model(**BATCH))
    assert called == ["model", "model.transformer", "model.transformer.h.1"]


def test_a_step_that_never_or_twice_calls_the_model_is_an_error() -> None:
    module, runner = make(cuts=())
    with pytest.raises(RuntimeError, match=r"without calling the GPT2Model 'model\.transformer'"):
        run(runner, 0, lambda: None)
    with pytest.raises(RuntimeError, match="called more than once in one step"):
        run(runner, 0, lambda: (module.model(**BATCH), module.model(**BATCH)))


def test_a_step_that_catches_everything_is_told_so() -> None:
    module, runner = make(cuts=(1,))

    def step() -> Any:
        try:
            return module.model(**BATCH)
        except BaseException:
            return None

    with pytest.raises(RuntimeError, match=r"went on after a stage had left the model.*a bare `except:`"):
        run(runner, 0, step)


class TwoStreams(nn.Module):
    """A block that hands on the hidden state and what has been added to it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        output = self.block(hidden, *args, **kwargs)
        after = output[0] if isinstance(output, tuple) else output
        return after, after - hidden


@pytest.mark.contract("Models", "blocks that hand on several hidden states", "refused", "DS#969")
def test_blocks_that_hand_on_several_hidden_states_are_refused() -> None:
    module = Module("gpt2")
    module.model.transformer.h = nn.ModuleList(TwoStreams(block) for block in module.model.transformer.h)
    runner = StageRunner(find_anatomy(module), (1,))
    with pytest.raises(RuntimeError, match=r"blocks of GPT2Model hand on several hidden states of \(4, 6, 8\) each"):
        run(runner, 0, lambda: module.model(**BATCH))

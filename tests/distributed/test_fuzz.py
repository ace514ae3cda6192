"""Whatever is drawn at random trains as in one process, or is refused by name.

A failure prints its draw, which can be given to ``verify`` as it is; ``drawn(number)`` makes it again.
"""

from collections import Counter

import pytest

from .fuzzing import Draw, drawn, refusals, verify
from .world import RanksHung, World

COUNT, CHUNK = 500, 25
SAMPLE = range(20)


@pytest.mark.contract(
    "The module",
    "configurations of models, batches, flags and layouts drawn at random train as in one process, or are refused by"
    " name",
)
@pytest.mark.parametrize("number", SAMPLE)
def test_a_configuration_drawn_at_random_trains_as_in_one_process_or_is_refused(world: World, number: int) -> None:
    verify(world, drawn(number))


@pytest.mark.long
@pytest.mark.timeout(CHUNK * 60)
@pytest.mark.parametrize("first", range(len(SAMPLE), COUNT, CHUNK))
def test_so_do_many_more(world: World, first: int) -> None:
    wrong = []
    for number in range(first, min(first + CHUNK, COUNT)):
        try:
            verify(world, drawn(number))
        except (AssertionError, RanksHung) as error:
            wrong.append(f"draw {number}: {error}")
    assert not wrong, "\n\n".join(wrong)


def test_the_draws_cover_every_value_of_every_field_and_most_of_them_train() -> None:
    draws = [drawn(number) for number in range(COUNT)]
    for name in ("model", "schedule", "stages", "microbatches", "structure", "loss", "labels", "frozen", "misuse"):
        assert min(Counter(getattr(draw, name) for draw in draws).values()) >= 3, name
    trained = [draw for draw in draws if not refusals(draw)]
    assert len(trained) > COUNT / 2
    assert Counter(draw.replicas for draw in trained)[2] > COUNT / 8


def test_a_draw_can_be_pasted() -> None:
    for number in SAMPLE:
        assert eval(repr(drawn(number)), {"Draw": Draw}) == drawn(number)

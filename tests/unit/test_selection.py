import pickle

import pytest

from lightning_chimera.schedules import chimera, gpipe, one_f_one_b, select


def test_a_name_selects_its_family() -> None:
    assert select("1f1b").build is one_f_one_b
    assert select("chimera").microbatches_per_rank == 1
    assert select("gpipe").fixed is None


def test_a_function_of_ranks_and_microbatches_is_a_selection() -> None:
    assert select(gpipe).build(2, 3) == gpipe(2, 3)


def test_a_schedule_selects_itself_for_its_own_sizes_only() -> None:
    selection = select(chimera(4, 8))
    assert selection.build(4, 8) == selection.fixed == chimera(4, 8)
    with pytest.raises(ValueError, match="4 ranks and 8 microbatches, not for 4 and 3"):
        selection.build(4, 3)


def test_every_selection_can_be_sent_to_another_process() -> None:
    for chosen in ("chimera", gpipe, chimera(2, 2)):
        assert pickle.loads(pickle.dumps(select(chosen))).build(2, 2) == select(chosen).build(2, 2)


def test_a_misspelt_name_lists_the_known_ones_and_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"Known schedules: chimera, gpipe, 1f1b, .*\. Did you mean 'chimera'"):
        select("chimaera")


def test_what_is_no_schedule_is_refused_with_what_would_be_one() -> None:
    with pytest.raises(ValueError, match="schedule=3: give the name"):
        select(3)  # type: ignore[arg-type]

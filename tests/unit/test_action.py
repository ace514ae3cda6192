import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_chimera.schedules import Action, Kind, Placement, Schedule, chimera, producers, render_grid, zb_v

NUMBERS = st.integers(0, 10**6)
WHOLE = st.builds(Action, NUMBERS, st.sampled_from(Kind), NUMBERS, NUMBERS, st.just(""))
HALVES = st.builds(Action, NUMBERS, st.just(Kind.BACKWARD), NUMBERS, NUMBERS, st.sampled_from("ab"))
ACTIONS = WHOLE | HALVES

SMALL = """\
name,chimera
num_microbatches,2
pipe,0,1
pipe,1,0
rank,0F0,1F1.1,1B1.1,0B0
rank,0F1.1,1F0,1B0,0B1.1
"""


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Action(2, Kind.FORWARD, 0), "2F0"),
        (Action(2, Kind.FORWARD, 0, 1), "2F0.1"),
        (Action(10, Kind.BACKWARD, 31), "10B31"),
        (Action(3, Kind.INPUT, 1, 1), "3I1.1"),
        (Action(3, Kind.WEIGHT, 1), "3W1"),
        (Action(3, Kind.BACKWARD, 1, 1, "a"), "3B1a.1"),
    ],
)
def test_an_action_has_a_text_form(action: Action, text: str) -> None:
    assert str(action) == text
    assert Action.parse(text) == action


@given(ACTIONS)
def test_the_text_of_an_action_is_read_back(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F0",
        "2F",
        "2X0",
        "2f0",
        " 2F0",
        "2F0 ",
        "2F0\n",
        "-2F0",
        "2F0.",
        "2F0.0",
        "02F0",
        "2F0.1.1",
        "2F0,3F0",
        "2F0a",
        "2I0b",
        "2W0a",
        "2B0c",
        "2B0ab",
        "\u0662F0",
    ],
)
def test_a_text_that_is_no_action_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="<stage><kind><microbatch>") as caught:
        Action.parse(text)
    assert repr(text) in str(caught.value)


def test_a_forward_takes_from_the_stage_before_and_a_gradient_from_the_stage_after() -> None:
    texts = ["0F5.1", "1F5.1", "2F5.1", "2B5.1", "1I5.1", "1W5.1", "0B5.1", "1F5", "2B4.1"]
    found = {str(taker): str(maker) for taker, maker in producers(map(Action.parse, texts)).items()}
    assert found == {"1F5.1": "0F5.1", "2F5.1": "1F5.1", "1I5.1": "2B5.1", "0B5.1": "1I5.1"}


def test_halves_of_a_backward_take_from_the_same_half() -> None:
    halves = [Action.parse(f"{stage}B0{half}") for stage in (0, 1) for half in "ab"]
    assert {str(taker): str(maker) for taker, maker in producers(halves).items()} == {"0B0a": "1B0a", "0B0b": "1B0b"}


def test_a_down_pipe_has_stage_s_on_rank_s() -> None:
    placement = Placement.down(3)
    assert (placement.num_pipes, placement.num_stages, placement.num_ranks) == (1, 3, 3)
    assert [placement.rank_of(stage) for stage in range(3)] == [0, 1, 2]
    assert [placement.stages_of(rank) for rank in range(3)] == [(0,), (1,), (2,)]


def test_a_bidirectional_placement_mirrors_the_up_pipe() -> None:
    placement = Placement.bidirectional(4)
    assert (placement.num_pipes, placement.num_stages, placement.num_ranks) == (2, 4, 4)
    assert [placement.rank_of(stage, 1) for stage in range(4)] == [3, 2, 1, 0]
    assert [placement.stages_of(rank) for rank in range(4)] == [(0, 3), (1, 2), (1, 2), (0, 3)]


@pytest.mark.parametrize(
    ("num_pairs", "ranks"),
    [
        (1, "01234567 76543210"),
        (2, "01234567 45670123 76543210 32107654"),
        (4, "01234567 23456701 45670123 67012345 76543210 54321076 32107654 10765432"),
    ],
)
def test_pairs_of_opposite_pipes_are_shifted_evenly(num_pairs: int, ranks: str) -> None:
    placement = Placement.opposite(8, num_pairs)
    assert placement.ranks == tuple(tuple(map(int, pipe)) for pipe in ranks.split())
    assert placement.weight_copies == (2 * num_pairs,) * 8


def test_a_pipe_may_pass_its_ranks_several_times() -> None:
    assert Placement.interleaved(3, 2).ranks == ((0, 1, 2, 0, 1, 2),)
    assert Placement.zigzag(3, 2).ranks == ((0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0),)
    assert Placement.zigzag(2).stages_of(0) == (0, 3)
    assert Placement.zigzag(2).weight_copies == Placement.interleaved(2, 3).weight_copies == (1, 1)


def test_a_stage_that_a_rank_holds_twice_counts_once() -> None:
    assert Placement(((0, 1), (0, 1))).stages_of(1) == (1,)


@pytest.mark.parametrize("ranks", [(), ((),), ((0, 1), (0,)), ((0, 2),), ((1,),), ((-1, 0),)])
def test_a_placement_of_another_shape_is_refused(ranks: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match=r"placement|Ranks"):
        Placement(ranks)


def test_a_schedule_is_a_value() -> None:
    assert chimera(4, 8) == chimera(4, 8)
    assert hash(chimera(4, 8)) == hash(chimera(4, 8))
    assert chimera(4, 8) != chimera(4, 7)


def test_a_schedule_has_a_text_form() -> None:
    assert chimera(2, 2).to_text() == SMALL
    assert Schedule.parse(SMALL) == chimera(2, 2)


@given(
    st.text(st.characters(categories=["L", "N", "P"]), min_size=1),
    st.lists(st.lists(ACTIONS, max_size=4).map(tuple), min_size=2, max_size=2).map(tuple),
)
def test_any_schedule_is_read_back_from_its_text(name: str, rows: tuple[tuple[Action, ...], ...]) -> None:
    schedule = Schedule(name, Placement.bidirectional(2), 7, rows)
    assert Schedule.parse(schedule.to_text()) == schedule


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rank,0F0", "row,0F0", "Line 5"),
        ("num_microbatches,2\n", "", "'num_microbatches'"),
        ("num_microbatches,2", "num_microbatches,two", "'two'"),
        ("name,chimera", "name,a\nname,b", "'name'"),
        ("1F1.1", "1F1.1 ", "'1F1.1 '"),
        ("pipe,0,1", "pipe,0,1,2", "placement"),
        ("rank,0F0,1F1.1,1B1.1,0B0\n", "", "1 rows for 2 ranks"),
        ("name,chimera", "name,", "name of a schedule"),
        ("num_microbatches,2", "num_microbatches,0", "at least one microbatch"),
    ],
)
def test_a_text_that_is_no_schedule_is_refused(old: str, new: str, message: str) -> None:
    assert old in SMALL
    with pytest.raises(ValueError, match=message):
        Schedule.parse(SMALL.replace(old, new))


def test_a_schedule_knows_the_pipe_of_each_microbatch() -> None:
    assert [chimera(4, 8).pipe_of(microbatch) for microbatch in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    with pytest.raises(ValueError, match="microbatch 8"):
        chimera(4, 8).pipe_of(8)


def test_peak_activations_follow_the_row_order() -> None:
    rows = tuple(
        tuple(map(Action.parse, row.split())) for row in ("0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")
    )
    assert Schedule("x", Placement.down(2), 3, rows).peak_activations == (2, 1)


@pytest.mark.parametrize(
    ("row", "peak"),
    [
        ("0F0 0I0 0F1 0W0 0I1 0W1", 2),
        ("0F0 0I0 0W0 0F1 0I1 0W1", 1),
        ("0F0 0B0a 0F1 0B0b 0B1a 0B1b", 1.5),
    ],
)
def test_a_forward_is_held_until_its_weight_gradient_and_half_of_it_until_half_of_its_backward(
    row: str, peak: float
) -> None:
    schedule = Schedule("x", Placement.down(1), 2, (tuple(map(Action.parse, row.split())),))
    assert schedule.peak_activations == (peak,)


def test_a_stage_that_is_half_of_a_share_keeps_half_of_the_activations() -> None:
    row = tuple(map(Action.parse, ["0F0", "1F0", "1B0", "0B0"]))
    assert Schedule("x", Placement(((0, 0),)), 1, (row,)).peak_activations == (1,)
    assert Schedule("x", Placement(((0, 0),)), 1, (row[:1],)).peak_activations == (0.5,)


def test_messages_between_stages_of_one_rank_do_not_count() -> None:
    assert chimera(4, 4).num_messages == 4 * 2 * 3
    assert Schedule("x", Placement.zigzag(2), 1, zb_v(2, 1).rows).num_messages == 2 * 2


def test_the_grid_has_a_line_for_each_rank_and_marks_the_bad_cell() -> None:
    assert render_grid(chimera(2, 2)).splitlines() == [
        "        0       1       2       3",
        "rank 0  0F0     1F1.1   1B1.1   0B0",
        "rank 1  0F1.1   1F0     1B0     0B1.1",
    ]
    assert render_grid(chimera(2, 2), (1, 2)).splitlines() == [
        "        0       1       2       3",
        "rank 0  0F0     1F1.1   1B1.1   0B0",
        "rank 1  0F1.1   1F0    >1B0<    0B1.1",
    ]


def test_the_grid_draws_rows_of_any_length() -> None:
    ragged = Schedule("x", Placement.down(2), 1, ((), (Action(1, Kind.FORWARD, 0),)))
    assert render_grid(ragged).splitlines() == ["        0", "rank 0", "rank 1  1F0"]

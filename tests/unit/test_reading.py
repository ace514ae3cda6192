from pathlib import Path

import pytest

from lightning_chimera.schedules import (
    SCHEDULES,
    Placement,
    ScheduleError,
    chimera,
    gpipe,
    interleaved,
    one_f_one_b,
    parse_table,
    read_schedule,
    select,
    zb_v,
)


def table(schedule: object, *, idle: str = "") -> str:
    return "".join(idle + ",".join(map(str, row)) + "\n" for row in schedule.rows)  # type: ignore[attr-defined]


def write(folder: Path, text: str, name: str = "mine.csv") -> Path:
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_read_from_either_form(name: str, tmp_path: Path) -> None:
    schedule = SCHEDULES[name].build(4, 8)
    assert read_schedule(write(tmp_path, schedule.to_text())) == schedule
    assert read_schedule(write(tmp_path, table(schedule), f"{name}.csv")) == schedule
    assert read_schedule(write(tmp_path, "\ufeff" + table(schedule), f"{name}.csv")) == schedule  # of a spreadsheet


def test_idle_cells_and_blanks_around_actions_are_left_out() -> None:
    assert parse_table("1f1b", " 0F0, 0F1 ,,,0B0,,0B1\n,1F0,1B0,1F1,1B1,,\n") == one_f_one_b(2, 2)


def test_pairs_run_one_after_the_other() -> None:
    text = "0F0,3F0,(0F1;3B0)OVERLAP_F_B,0B0,3F1,3I1,3W1,0B1\n1F0,2F0,2B0,(1F1;1B0)OVERLAP_F_B,2F1,2B1,1B1\n"
    schedule = parse_table("pairs", text)
    assert [str(action) for action in schedule.rows[0]] == [
        "0F0",
        "3F0",
        "0F1",
        "3B0",
        "0B0",
        "3F1",
        "3I1",
        "3W1",
        "0B1",
    ]
    assert schedule.placement == Placement.zigzag(2)


def test_the_order_in_which_torch_writes_stages_on_ranks_gives_the_placement() -> None:
    assert parse_table("x", table(interleaved(2, 4))).placement == Placement.interleaved(2, 2)
    assert parse_table("x", table(zb_v(3, 4))).placement == Placement.zigzag(3)
    assert parse_table("x", table(chimera(4, 4))).placement == Placement.bidirectional(4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1X0\n", "Line 2, cell 2: '1X0' is not an action"),
        ("0F0,0SEND_F0,0B0\n", "Line 1, cell 2: '0SEND_F0' is not an action"),
        ("0F0,0B0\n0F1,0B1\n", "Line 2, 0F1: stage 0 of pipe 0 is on rank 0 as well, by line 1"),
        ("0F0,0B0\n2F0,2B0\n", "No line has stage 1 of pipe 0"),
        ("0F0.2,0B0.2\n", "No line has stage 0 of pipe 0"),
        ("", "There is no action in it"),
        ("0F0,0B0\n\n", "2 rows for 1 ranks"),
        ("name,x\nnum_microbatches,1\nrow,0F0\n", "Line 3 of a schedule starts with one of"),
    ],
)
def test_a_file_that_holds_no_schedule_is_refused_with_its_name_and_the_place(
    text: str, message: str, tmp_path: Path
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match="holds no schedule") as caught:
        read_schedule(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_a_schedule_that_cannot_run_is_refused_with_the_bad_cell_marked(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="Schedule mine, rank 1, position 0: 1B0 runs before 1F0") as caught:
        read_schedule(write(tmp_path, "0F0,0B0\n1B0,1F0\n"))
    assert ">1B0<" in str(caught.value)


@pytest.mark.parametrize("as_text", [True, False])
def test_a_path_selects_the_schedule_of_its_file(as_text: bool, tmp_path: Path) -> None:
    path = write(tmp_path, table(gpipe(2, 4)), "gpipe.csv")
    assert select(str(path) if as_text else path).fixed == gpipe(2, 4)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.csv"):
        select("nowhere.csv")

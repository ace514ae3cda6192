import os
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from .world import RankFailed, RanksHung, World


def sum_of_ranks() -> tuple[int, int]:
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]))
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()
    return int(os.environ["LOCAL_RANK"]), int(total)


def fail_on_rank_one(kind: str) -> None:
    if kind == "exit":
        os._exit(7 * int(os.environ["LOCAL_RANK"]))
    if os.environ["LOCAL_RANK"] != "1":
        time.sleep(0.5)
        raise KeyError("a consequence")
    sys.stdout.write("just before")
    raise ValueError("the cause")


def sleep_on_rank_one() -> None:
    if os.environ["LOCAL_RANK"] == "1":
        time.sleep(60)


def leave_a_process_behind() -> int:
    pid = os.fork()
    if not pid:
        time.sleep(60)
    return pid


def environment() -> dict[str, str]:
    return dict(os.environ)


def draws() -> float:
    return float(torch.rand(()))


def echo(value: Any) -> Any:
    return value


def test_results_come_back_by_rank(world: World) -> None:
    assert world.run(sum_of_ranks, size=3) == [(0, 3), (1, 3), (2, 3)]


def test_ranks_find_the_environment_of_a_launched_run(world: World) -> None:
    found = world.run(environment, size=2, env={"MORE": "1"})
    assert [env["LOCAL_RANK"] for env in found] == ["0", "1"]
    common = {"NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "MORE": "1"}
    assert all(common.items() <= env.items() for env in found)
    assert "MORE" not in world.run(environment, size=1)[0]


def test_ranks_draw_different_numbers_but_the_same_in_each_run(world: World) -> None:
    first, second = world.run(draws, size=2), world.run(draws, size=2)
    assert first == second
    assert len(set(first)) == 2


def test_the_first_error_is_the_one_raised(world: World) -> None:
    with pytest.raises(
        RankFailed, match=r"(?s)Rank 1 of 2 failed first.*fail_on_rank_one.*the cause.*just before"
    ) as info:
        world.run(fail_on_rank_one, "raise", size=2)
    assert (info.value.rank, info.value.error) == (1, "ValueError: the cause")


def test_an_exit_without_an_error_is_reported(world: World) -> None:
    with pytest.raises(RankFailed, match="exit code 7"):
        world.run(fail_on_rank_one, "exit", size=2)


def test_a_hang_is_reported_with_its_place(world: World) -> None:
    start = time.monotonic()
    with pytest.raises(RanksHung, match=r"(?s)Ranks \[1\] of 2 still ran after 1.0 s.*sleep_on_rank_one"):
        world.run(sleep_on_rank_one, size=2, limit=1.0)
    assert time.monotonic() - start < 4.0


def test_no_process_is_left_behind(world: World) -> None:
    (pid,) = world.run(leave_a_process_behind, size=1)
    patience = time.monotonic() + 5.0
    while _runs(pid) and time.monotonic() < patience:
        time.sleep(0.01)
    assert not _runs(pid)


@pytest.mark.long
def test_a_new_server_starts_when_one_was_closed(world: World) -> None:
    assert world.run(echo, {"a": torch.ones(2)}, size=1)[0]["a"].tolist() == [1.0, 1.0]
    world.close()
    assert world.run(echo, 3, size=2) == [3, 3]


def _runs(pid: int) -> bool:
    """Whether a process exists and is no zombie; an orphan is waited for by whoever adopts it."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

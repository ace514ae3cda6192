import io

from rich.console import Console
from rich.table import Table

from lightning_chimera.partition.anatomy import find_anatomy
from lightning_chimera.partition.balance import balance, layer_costs
from lightning_chimera.partition.stage import StageRunner
from lightning_chimera.plan import plan_table, print_whole
from lightning_chimera.runtime.topology import Topology
from lightning_chimera.schedules import get_family


def plan(
    module, name: str, num_stages: int, num_replicas: int, recomputed=(), threads=(), nodes=(), replicas_innermost=False
) -> Table:
    anatomy = find_anatomy(module)
    schedule = get_family(name).build(num_stages, num_stages)
    cuts = balance(layer_costs(module, anatomy), schedule.num_stages, paired=schedule.placement.is_paired)
    ascending = schedule.placement.rank_of(schedule.num_stages - 1) == 0
    topology = Topology(num_stages, num_replicas, 0, ascending, replicas_innermost)
    return plan_table(module, StageRunner(anatomy, cuts), topology, schedule, recomputed, threads, nodes)


def printed(*args, **options) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(plan(*args, **options))
    return console.export_text()


def test_the_plan_says_what_is_where_in_80_columns(gpt2_small) -> None:
    text = printed(gpt2_small, "chimera", 4, 2)
    assert "chimera: 4 stages, 2 pipes, 4 microbatches, 2 x 4 ranks" in text
    assert "0: embedding, blocks 0-1" in text
    assert "3: block 11, head" in text
    assert "cuts=[2, 6, 11]" in text
    assert "\u2026" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_plan_counts_a_tied_table_on_both_end_ranks_but_once_on_a_rank(gpt2_small) -> None:
    table = 50257 * 768 / 1e6
    lines = printed(gpt2_small, "1f1b", 4, 1).splitlines()
    [last] = [line for line in lines if "block 11, head" in line]
    assert float(last.split(" M ")[0].split()[-1]) > table
    lines = printed(gpt2_small, "chimera", 2, 1).splitlines()
    whole = sum(parameter.numel() for parameter in gpt2_small.parameters()) / 1e6
    counts = [float(line.split(" M ")[0].split()[-1]) for line in lines if " M " in line]
    assert counts == [round(whole, 1)] * 2


def test_the_plan_shows_several_stages_of_a_rank_where_the_pipe_ends_on_rank_0(gpt2_small) -> None:
    lines = printed(gpt2_small, "zb_v", 2, 1).splitlines()
    [row] = [index for index, line in enumerate(lines) if "0: embedding" in line]
    assert lines[row].split()[:2] == ["0", "0"]
    assert "3: block 11, head" in lines[row + 1]


def test_the_plan_says_where_every_rank_holds_the_whole_model(gpt2_small) -> None:
    assert "every rank holds the whole model" in printed(gpt2_small, "chimera", 2, 1)
    assert "every rank holds the whole model" not in printed(gpt2_small, "chimera", 4, 1)


def test_the_plan_counts_what_is_recomputed(gpt2_small) -> None:
    def bubble(recomputed) -> str:
        return printed(gpt2_small, "chimera", 4, 1, recomputed).partition("simulated bubble ")[2].partition("%")[0]

    assert int(bubble(range(4))) > int(bubble(())) > 0


def test_the_plan_says_with_how_many_threads_the_ranks_compute(gpt2_small) -> None:
    assert "1 thread per rank" in printed(gpt2_small, "1f1b", 2, 1, threads=[1, 1])
    assert "2 to 4 threads per rank" in printed(gpt2_small, "1f1b", 2, 1, threads=[4, 2])
    assert "thread" not in printed(gpt2_small, "1f1b", 2, 1)


def test_the_plan_names_all_nodes_however_narrow_the_screen_is(gpt2_small, monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    nodes = [f"a-node-with-a-long-name-{rank}" for rank in range(8)]
    print_whole(plan(gpt2_small, "chimera", 4, 2, nodes=nodes))
    text = capsys.readouterr().out
    assert all(f"{nodes[rank]}, {nodes[rank + 4]}  " in text for rank in range(4))
    assert "\u2026" not in text


TWO_NODES = ["left", "left", "right", "right"]


def lines_of(capsys, *args, **options) -> list[str]:
    print_whole(plan(*args, **options))
    return [" ".join(line.split()) for line in capsys.readouterr().out.strip().splitlines()]


def test_the_plan_says_which_stages_are_on_which_node(gpt2_small, capsys) -> None:
    lines = lines_of(capsys, gpt2_small, "1f1b", 4, 1, nodes=TWO_NODES)
    assert lines[-2:] == ["left: stages 2, 3", "right: stages 0, 1"]


def test_a_whole_pipeline_is_on_a_node_where_stages_are_innermost(gpt2_small, capsys) -> None:
    assert lines_of(capsys, gpt2_small, "1f1b", 2, 2, nodes=TWO_NODES)[-1] == "left, right: stages 0, 1"


def test_the_copies_of_a_stage_are_on_a_node_where_replicas_are_innermost(gpt2_small, capsys) -> None:
    lines = lines_of(capsys, gpt2_small, "1f1b", 2, 2, nodes=TWO_NODES, replicas_innermost=True)
    assert lines[-2:] == ["left: stage 1", "right: stage 0"]
    rows = [line.split(":")[0] for line in lines if line.startswith(("0, 1 ", "2, 3 "))]
    assert rows == ["0, 1 left 1 1", "2, 3 right 0 0"]


def test_the_plan_has_no_map_of_a_single_node(gpt2_small) -> None:
    assert "left" not in printed(gpt2_small, "1f1b", 2, 2, nodes=["left"] * 4)

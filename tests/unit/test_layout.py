from lightning_chimera.layout import Layout
from lightning_chimera.runtime.topology import Topology
from lightning_chimera.schedules import Schedule, gpipe


def test_a_schedule_is_made_once_for_each_number_of_microbatches() -> None:
    made = []

    def build(num_ranks: int, num_microbatches: int) -> Schedule:
        made.append(num_microbatches)
        return gpipe(num_ranks, num_microbatches)

    layout = Layout(Topology(2, 1, 0), build, 4)
    for count in (4, 3, 3, None, 4):
        assert layout.schedule(count) == gpipe(2, count or 4)
    assert made == [4, 3]

import dataclasses
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_chimera.schedules import (
    SCHEDULES,
    Action,
    Instruction,
    Lowered,
    Message,
    Operation,
    Placement,
    Schedule,
    ScheduleError,
    chimera,
    forward_only,
    get_family,
    gpipe,
    lower,
    one_f_one_b,
)

SIZES = [(1, 1), (1, 3), (2, 2), (2, 5), (4, 1), (4, 4), (4, 8), (4, 13), (8, 8), (8, 16)]
SMALL = [(2, 5), (4, 4), (4, 13)]
PAIRED = [(2, 4), (4, 8)]
"""DualPipe needs two microbatches for each rank, and an even number of them."""
SIZES_OF = {"chimera": SIZES, "gpipe": SIZES, "1f1b": SIZES, "dualpipe": PAIRED, "dualpipe_v": PAIRED}
SCHEDULES_TO_LOWER = [get_family(name).build(*size) for name in SCHEDULES for size in SIZES_OF.get(name, SMALL)]
SCHEDULES_TO_LOWER += [forward_only(Placement.down(stages), microbatches) for stages, microbatches in SIZES]
EVERY_SCHEDULE = pytest.mark.parametrize(
    "schedule", SCHEDULES_TO_LOWER, ids=lambda s: f"{s.name}-{s.num_stages}-{s.num_microbatches}"
)


def messages(row: tuple[Instruction, ...], operation: Operation) -> list[Message]:
    return [step.subject for step in row if step.operation is operation and isinstance(step.subject, Message)]


def index_of(row: tuple[Instruction, ...], operation: Operation, subject: Action | Message) -> int:
    return row.index(Instruction(operation, subject))


@EVERY_SCHEDULE
def test_every_action_is_computed_once_in_the_order_of_the_schedule(schedule: Schedule) -> None:
    for row, actions in zip(lower(schedule).rows, schedule.rows, strict=True):
        assert tuple(step.subject for step in row if step.operation is Operation.COMPUTE) == actions


@EVERY_SCHEDULE
def test_every_message_is_posted_sent_and_released_once(schedule: Schedule) -> None:
    lowered = lower(schedule)
    owner = {action: rank for rank, row in enumerate(schedule.rows) for action in row}
    expected = Counter(
        (producer, action) for action, producer in schedule.producers.items() if owner[action] != owner[producer]
    )
    for operation, end in ((Operation.POST, "target"), (Operation.SEND, "source"), (Operation.RELEASE, "source")):
        found = [(rank, message) for rank, row in enumerate(lowered.rows) for message in messages(row, operation)]
        assert Counter((message.producer, message.consumer) for _, message in found) == expected
        for rank, message in found:
            assert rank == getattr(message, end)
            assert message.producer in schedule.rows[message.source]
            assert message.consumer in schedule.rows[message.target]


@EVERY_SCHEDULE
def test_messages_of_a_link_are_numbered_and_posted_in_the_order_of_their_sends(schedule: Schedule) -> None:
    lowered = lower(schedule, lookahead=3)
    for source, target in {(s, t) for s in range(schedule.num_ranks) for t in range(schedule.num_ranks)}:
        sent = [message for message in messages(lowered.rows[source], Operation.SEND) if message.target == target]
        posted = [message for message in messages(lowered.rows[target], Operation.POST) if message.source == source]
        released = [
            message for message in messages(lowered.rows[source], Operation.RELEASE) if message.target == target
        ]
        assert sent == posted
        assert set(released) == set(sent)
        assert [message.index for message in sent] == list(range(len(sent)))


@EVERY_SCHEDULE
def test_a_send_directly_follows_its_compute(schedule: Schedule) -> None:
    for row in lower(schedule).rows:
        for index, step in enumerate(row):
            if step.operation is Operation.SEND and isinstance(step.subject, Message):
                assert row[index - 1] == Instruction(Operation.COMPUTE, step.subject.producer)


@pytest.mark.parametrize("lookahead", [0, 1, 2, 5, 1000])
@EVERY_SCHEDULE
def test_a_receive_is_posted_so_many_computes_before_its_use_or_that_of_a_later_one(
    schedule: Schedule, lookahead: int
) -> None:
    for row in lower(schedule, lookahead=lookahead).rows:
        for message in messages(row, Operation.POST):
            post = index_of(row, Operation.POST, message)
            compute = min(
                index_of(row, Operation.COMPUTE, later.consumer)
                for later in messages(row, Operation.POST)
                if later.source == message.source and later.index >= message.index
            )
            computes = [index for index, step in enumerate(row[:compute]) if step.operation is Operation.COMPUTE]
            assert len([index for index in computes if index > post]) == min(lookahead, len(computes))
            # A post stands directly before its compute, with nothing but other posts between.
            between = row[post : row.index(next(s for s in row[post:] if s.operation is Operation.COMPUTE))]
            assert {step.operation for step in between} == {Operation.POST}


def clocks(lowered: Lowered) -> dict[tuple[int, int], tuple[int, ...]]:
    """For each instruction, how many of each rank have certainly happened when it is done (vector clocks)."""
    known: dict[tuple[int, int], tuple[int, ...]] = {}
    sends = {
        step.subject: (rank, index)
        for rank, row in enumerate(lowered.rows)
        for index, step in enumerate(row)
        if step.operation is Operation.SEND
    }
    received = {message.consumer: message for message in sends if isinstance(message, Message)}
    now = [[0] * len(lowered.rows) for _ in lowered.rows]
    next_index = [0] * len(lowered.rows)
    while any(index < len(row) for index, row in zip(next_index, lowered.rows, strict=True)):
        before = list(next_index)
        for rank, row in enumerate(lowered.rows):
            while next_index[rank] < len(row):
                step = row[next_index[rank]]
                if step.operation is Operation.COMPUTE and step.subject in received:
                    send = sends[received[step.subject]]
                    if send not in known:
                        break
                    now[rank] = [max(pair) for pair in zip(now[rank], known[send], strict=True)]
                now[rank][rank] = next_index[rank] + 1
                known[rank, next_index[rank]] = tuple(now[rank])
                next_index[rank] += 1
        assert next_index != before, "the lowered schedule is stuck"
    return known


@EVERY_SCHEDULE
def test_a_release_before_the_end_of_a_row_is_proved_by_what_the_rank_has_received(schedule: Schedule) -> None:
    lowered = lower(schedule)
    known = clocks(lowered)
    for rank, row in enumerate(lowered.rows):
        last_compute = max(index for index, step in enumerate(row) if step.operation is Operation.COMPUTE)
        for message in messages(row, Operation.RELEASE):
            release = index_of(row, Operation.RELEASE, message)
            taken = index_of(lowered.rows[message.target], Operation.COMPUTE, message.consumer)
            proved = known[rank, release][message.target] > taken
            assert proved or release > last_compute


@EVERY_SCHEDULE
def test_a_release_follows_the_first_receive_that_proves_it(schedule: Schedule) -> None:
    lowered = lower(schedule)
    order = {action: index for actions in schedule.rows for index, action in enumerate(actions)}
    for rank, (row, actions) in enumerate(zip(lowered.rows, schedule.rows, strict=True)):
        received = {message.consumer: message for message in messages(row, Operation.POST)}
        for message in messages(row, Operation.RELEASE):
            release = index_of(row, Operation.RELEASE, message)
            computed = [step.subject for step in row[:release] if step.operation is Operation.COMPUTE]
            answers = [
                action
                for action in actions[order[message.producer] + 1 :]
                if action in received
                and received[action].source == message.target
                and order[received[action].producer] >= order[message.consumer]
            ]
            assert computed[-1] == (answers[0] if answers else actions[-1]), (rank, message)


def test_one_f_one_b_leaves_at_most_two_sends_to_the_end() -> None:
    left = []
    for row in lower(one_f_one_b(2, 8)).rows:
        last_compute = max(index for index, step in enumerate(row) if step.operation is Operation.COMPUTE)
        proved_by_it = row[last_compute].subject in {message.consumer for message in messages(row, Operation.POST)}
        left.append(0 if proved_by_it else len(messages(row[last_compute + 1 :], Operation.RELEASE)))
    assert left == [0, 2]


def run(lowered: Lowered, seed: int) -> tuple[bool, bool]:
    """Run by rendezvous with random timing; return whether all was done, and whether an early release blocked."""
    chance = random.Random(seed)
    position = [0] * len(lowered.rows)
    posted: set[Message] = set()
    sent: set[Message] = set()
    matched: set[Message] = set()
    awaited = {m.consumer: m for row in lowered.rows for m in messages(row, Operation.POST)}
    queues: dict[tuple[int, int], list[Message]] = {}
    for row in lowered.rows:
        for message in messages(row, Operation.SEND):
            queues.setdefault((message.source, message.target), []).append(message)
    last = [max(i for i, step in enumerate(row) if step.operation is Operation.COMPUTE) for row in lowered.rows]
    early_block = False
    while True:
        moved = False
        for rank in chance.sample(range(len(lowered.rows)), len(lowered.rows)):
            for _ in range(chance.randint(1, 6)):
                if position[rank] == len(lowered.rows[rank]):
                    break
                operation, subject = lowered.rows[rank][position[rank]]
                blocked = False
                if isinstance(subject, Message):
                    if operation is Operation.POST:
                        posted.add(subject)
                    elif operation is Operation.SEND:
                        sent.add(subject)
                    else:
                        blocked = subject not in matched
                        early_block |= blocked and position[rank] < last[rank]
                else:
                    blocked = subject in awaited and awaited[subject] not in matched
                if blocked:
                    break
                position[rank] += 1
                moved = True
            # The transport: a link's message is matched after all before it, once both of its sides are there.
            for queue in queues.values():
                while queue and queue[0] in posted and queue[0] in sent:
                    matched.add(queue.pop(0))
                    moved = True
        if not moved:
            return all(p == len(row) for p, row in zip(position, lowered.rows, strict=True)), early_block


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(SCHEDULES_TO_LOWER), st.integers(0, 4), st.integers(0, 2**32))
def test_by_rendezvous_every_timing_ends_and_no_release_blocks_before_the_end(
    schedule: Schedule, lookahead: int, seed: int
) -> None:
    assert run(lower(schedule, lookahead=lookahead), seed) == (True, False)


def test_instructions_are_readable() -> None:
    lines = [str(step) for step in lower(chimera(2, 2)).rows[0]]
    assert lines == [
        "post 0F1.1 -> 1F1.1 (1 -> 0, #0)",
        "compute 0F0",
        "send 0F0 -> 1F0 (0 -> 1, #0)",
        "compute 1F1.1",
        "post 1B0 -> 0B0 (1 -> 0, #1)",
        "compute 1B1.1",
        "send 1B1.1 -> 0B1.1 (0 -> 1, #1)",
        "compute 0B0",
        "release 0F0 -> 1F0 (0 -> 1, #0)",
        "release 1B1.1 -> 0B1.1 (0 -> 1, #1)",
    ]


def test_stages_on_one_rank_exchange_no_message() -> None:
    rows = (tuple(map(Action.parse, ["0F0", "1F0", "1B0", "0B0"])),)
    lowered = lower(Schedule("one rank", Placement(((0, 0),)), 1, rows))
    assert [step.operation for step in lowered.rows[0]] == [Operation.COMPUTE] * 4


def test_a_consumer_that_answers_itself_proves_that_the_message_was_taken() -> None:
    rows = tuple(tuple(map(Action.parse, row.split())) for row in ("0F0 2F0 2B0 0B0", "1F0 1B0"))
    lines = [str(step) for step in lower(Schedule("zigzag", Placement(((0, 1, 0),)), 1, rows)).rows[0]]
    assert lines[lines.index("release 0F0 -> 1F0 (0 -> 1, #0)") - 1] == "compute 2F0"
    assert lines[lines.index("release 2B0 -> 1B0 (0 -> 1, #1)") - 1] == "compute 0B0"


def test_an_invalid_schedule_is_not_lowered() -> None:
    rows = gpipe(2, 2).rows
    with pytest.raises(ScheduleError, match="runs before"):
        lower(dataclasses.replace(gpipe(2, 2), rows=(rows[0], rows[1][::-1])))


def test_a_negative_lookahead_is_refused() -> None:
    with pytest.raises(ValueError, match="0 or more; got -1"):
        lower(gpipe(2, 2), lookahead=-1)

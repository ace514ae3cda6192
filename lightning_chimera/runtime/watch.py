"""Watches the other ranks, so that no rank waits for one that will never answer.

A blocked wait of gloo can be neither polled nor aborted. So two threads of each rank look beside it: one talks to the
run's store over a connection of its own, the other watches whether the store answers. If a rank has failed, vanished
or stalled, all others leave the process; who, where and why is on each screen once.
"""

import json
import os
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import (
    PrefixStore,
    Store,
    _get_default_store,
)

from lightning_chimera.runtime.blackboard import begin_run, current_run
from lightning_chimera.runtime.errors import has_timed_out, headline, is_of_a_peer, silence
from lightning_chimera.runtime.leaving import BOUND, exit_later, leave_nothing
from lightning_chimera.runtime.members import Member
from lightning_chimera.runtime.progress import PROGRESS
from lightning_chimera.runtime.verdicts import IDLE, LEFT, RUNS, Beat, Verdict, parse_verdict

PERIOD = 0.5
"""Seconds between two beats."""
GRACE = 7.0
"""Seconds in which a rank may fail by itself after another has; longer than ranks that have failed wait for others."""
PATIENCE = 4.0
"""Seconds without a beat after which a rank is gone, if connections have been closed."""


class Watcher:
    """The watching threads of one process.

    Args:
        store: The run's store, over a connection of this watcher's own.
        rank: The global rank.
        world_size: The number of ranks.
        stall_timeout: Without a sign of life for this long a rank has stalled.
        keeper: The rank whose process the store is in; -1 if it is in none of them.

    Attributes:
        finalize: Called by a rank that leaves because another has failed, where the thread that trains can.
    """

    def __init__(self, store: Store, rank: int, world_size: int, stall_timeout: timedelta, keeper: int) -> None:
        self._store = store
        self._rank, self._world_size = rank, world_size
        self._others = [other for other in range(world_size) if other != rank]
        self._keeper = keeper
        self._stall_timeout = stall_timeout.total_seconds()
        self._period = min(PERIOD, self._stall_timeout / 4)
        self._own = Member.of_this_process(rank)
        self._now = (0, IDLE)
        """The run and its state, in one, since threads read it."""
        self._number = self._rounds = 0
        self._members: dict[int, Member] = {}
        self._beats: dict[int, Beat] = {}
        self._ages: dict[int, float] = dict.fromkeys(range(world_size), 0.0)
        self._found: Verdict | None = None
        self._failed: BaseException | None = None
        self._suspects = self._is_lost = False
        self._requests: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._wake, self._stop = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=self._talk, name="chimera-talk", daemon=True),
            threading.Thread(target=self._look_after, name="chimera-watch", daemon=True),
        ]
        self.finalize: Callable[[], object] = bool

    def start(self) -> None:
        """Starts to watch."""
        self._store.set(f"member/{self._rank}", json.dumps(self._own))
        texts = self._store.multi_get([f"member/{rank}" for rank in range(self._world_size)])  # waits for all
        self._members = {rank: Member(*json.loads(text)) for rank, text in enumerate(texts)}
        for thread in self._threads:
            thread.start()

    # --------------------------------------------------------------------------------------- the thread that trains

    def begin(self) -> None:
        """Begins a run of the Trainer."""
        self._failed, self._suspects = None, False
        self._ages = dict.fromkeys(self._ages, 0.0)
        self._now = (self._now[0] + 1, RUNS)

    def end(self) -> None:
        """Ends a run: all that the ranks do together in it is done."""
        run, state = self._now
        if state == RUNS:
            self._now = (run, IDLE)
            self._ask(bool)  # so that a process that ends now is known not to have vanished

    def close(self) -> None:
        """Ends the threads, at the end of the process."""
        self._now = (self._now[0], LEFT)
        self._ask(bool)
        self._stop.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(BOUND)

    def failed(self, error: BaseException) -> None:
        """Tells the others of an error in this run; does not return if it is but the echo of another rank's.

        Args:
            error: What was raised; it is given a note that says on which rank and where in the run.
        """
        run, state = self._now
        if state != RUNS or self._failed is not None:
            return
        what = f"chimera: rank {self._rank} of {self._world_size} failed at: {PROGRESS.describe()}"
        if has_timed_out(error):
            what += self._waits_for()
        elif is_of_a_peer(error):
            found = self._explained()
            if found is not None and found.rank != self._rank:
                with suppress(Exception):
                    self.finalize()
                time.sleep(GRACE + BOUND)  # the other thread leaves before
                self._leave(found)
        self._failed = error
        error.add_note(what)
        is_silent = not isinstance(error, Exception)  # KeyboardInterrupt and SystemExit, which Python does not print
        text = f"{what} ({headline(error).strip()})\n" if is_silent else "".join(traceback.format_exception(error))
        own = Verdict(run, "error", self._rank, self._rank, text)
        first: Verdict | None = self._ask(lambda: self._claim(own))
        if first is not None and first.rank != self._rank and headline(error) in first.text:
            silence(error)  # it is on the screen already
        elif is_silent:
            os.write(2, text.encode(errors="replace"))
        self._wait_until_seen(self._others)

    def _waits_for(self) -> str:
        """Whom this rank waits for, and where that one is."""
        awaited = PROGRESS.awaited_rank
        if awaited is None:
            return ""
        beat = self._ask(lambda: self._read(awaited)) or Beat()
        return f"; it waited for rank {awaited}" + (f", which was at: {beat.where}" if beat.where else "")

    def _explained(self) -> Verdict | None:
        """Waits until it is known why a connection was closed."""
        self._suspects = True
        is_local = all(map(self._is_near, self._others))
        deadline = time.monotonic() + (BOUND if is_local else PATIENCE + BOUND)
        while self._verdict is None and time.monotonic() < deadline + (2 * BOUND if self._is_lost else 0.0):
            self._ask(bool)
            time.sleep(0.05)
        return self._verdict

    def _wait_until_seen(self, ranks: Sequence[int]) -> None:
        """Keeps the store, if it is here, until others know: they would take this rank for the one that has failed."""
        if self._keeper != self._rank:
            return
        keys = [self._seen(rank) for rank in ranks]
        deadline = time.monotonic() + BOUND / 2
        while time.monotonic() < deadline and not self._ask(lambda: self._store.check(keys)):
            time.sleep(0.02)

    def _ask(self, request: Callable[[], Any]) -> Any:
        """Has the talking thread do something after a round; ``None`` if the store does not answer."""
        if self._is_lost:
            return None
        future: Future[Any] = Future()
        self._requests.put((request, future))
        self._wake.set()
        try:
            return future.result(BOUND)
        except (RuntimeError, TimeoutError):
            return None

    # ---------------------------------------------------------------------------------------- the thread that talks

    def _talk(self) -> None:
        """Beats and listens until the end."""
        before = time.monotonic()
        asked: list[tuple[Callable[[], Any], Future[Any]]] = []
        while True:
            asked += self._pending()
            now = time.monotonic()
            try:
                self._round(min(now - before, 2 * self._period))  # without the time in which this process stood still
                while asked:
                    request, future = asked[0]
                    future.set_result(request())
                    del asked[0]
            except RuntimeError:  # of the store: it has gone
                self._is_lost = True
                return
            except (OSError, MemoryError):  # of this process, as if it had too many open files: until the next round
                pass
            before = now
            self._rounds += 1
            if self._stop.is_set():
                return
            self._wake.wait(self._period)
            self._wake.clear()

    def _pending(self) -> list[tuple[Callable[[], Any], Future[Any]]]:
        found = []
        with suppress(Empty):
            while True:
                found.append(self._requests.get_nowait())
        return found

    def _round(self, elapsed: float) -> None:
        if self._keeper not in (-1, self._rank) and self._is_dead(self._keeper):
            raise RuntimeError("The process that kept the store has ended.")  # torch would print a page about it
        run, state = self._now
        self._number += 1
        self._store.set(f"beat/{self._rank}", json.dumps(self._own_beat()))
        if state != RUNS:
            return
        found = parse_verdict(self._store.compare_set(f"verdict/{run}", "", ""))
        if found is None and self._failed is None:
            found = self._find_gone(run) or self._find_silent(run, elapsed)
        if found is None:
            return
        if self._verdict is None:
            self._store.set(self._seen(self._rank), "")
            self._found = found
        if found.kind == "error":
            self._read(found.rank)

    def _own_beat(self) -> Beat:
        run, state = self._now
        if state != RUNS:
            return Beat(self._number, run, state)
        return Beat(self._number, run, state, PROGRESS.describe(), PROGRESS.awaited_rank)

    @property
    def _verdict(self) -> Verdict | None:
        """That on the run of now."""
        found = self._found
        return found if found is not None and found.run == self._now[0] else None

    def _seen(self, rank: int) -> str:
        return f"seen/{self._now[0]}/{rank}"

    def _is_near(self, rank: int) -> bool:
        return self._members[rank].is_near(self._own)

    def _read(self, rank: int) -> Beat:
        return self._note(rank, self._store.get(f"beat/{rank}"))

    def _note(self, rank: int, text: bytes) -> Beat:
        beat = Beat(*json.loads(text)) if text else Beat()
        if beat != self._beats.get(rank):
            self._beats[rank], self._ages[rank] = beat, 0.0
        return beat

    def _claim(self, verdict: Verdict) -> Verdict:
        """Says why the run can't go on; returns what was said first, which counts."""
        said = self._store.compare_set(f"verdict/{verdict.run}", "", json.dumps(verdict))
        return parse_verdict(said) or verdict

    def _find_gone(self, run: int) -> Verdict | None:
        """A process of this machine that has ended within the run."""
        for other, member in self._members.items():
            if other == self._rank or not self._is_near(other) or not member.is_gone():
                continue
            beat = self._read(other)
            if beat.is_through(run) and not (self._suspects and beat.run == run):
                continue
            what = "has left the run" if beat.is_through(run) or beat.state == LEFT else "has vanished"
            return self._claim(self._about(run, "vanished", other, f"{what}: {member} has ended", beat))
        return None

    def _find_silent(self, run: int, elapsed: float) -> Verdict | None:
        """A rank that has given no sign of life for too long.

        Rank 0 looks at all, the others at rank 0, so that a large world is no burden to the store.
        """
        looked_at = self._others if self._suspects or not self._rank else [0]
        texts = self._store.multi_get([f"beat/{other}" for other in looked_at])
        for other, text in zip(looked_at, texts, strict=True):
            self._ages[other] += elapsed
            beat, member = self._note(other, text), self._members[other]
            if beat.state == LEFT:
                if self._suspects and not beat.is_through(run):
                    what = f"has left before this call of the Trainer: {member} has come to its end"
                    return self._claim(self._about(run, "vanished", other, what, beat))
                continue
            if self._ages[other] > self._stall_timeout:
                what = f"has stalled, without a sign of life for {self._stall_timeout:g} s (stall_timeout)"
                if self._is_near(other) and member.is_stopped():
                    what += f": {member} is stopped by a signal"
                return self._claim(self._about(run, "stalled", other, what, beat))
            if self._suspects and not self._is_near(other) and self._ages[other] > PATIENCE:
                what = f"has vanished: connections were closed, and {member} does not answer"
                return self._claim(self._about(run, "vanished", other, what, beat))
        return None

    def _about(self, run: int, kind: str, rank: int, what: str, beat: Beat) -> Verdict:
        lines = [f"chimera: rank {rank} of {self._world_size} {what}."]
        if beat.where:
            lines.append(f"It was last heard of at: {beat.where}.")
        beats = {other: self._read(other) for other in self._others} | {self._rank: self._own_beat()}
        waiting = [other for other, found in sorted(beats.items()) if found.awaited == rank and other != rank]
        lines += [f"Rank {other} waits for it at: {beats[other].where}." for other in waiting[:3]]
        if not waiting:
            lines.append(f"Rank {self._rank} was at: {PROGRESS.describe()}.")
        return Verdict(run, kind, rank, self._rank, "\n".join(lines) + "\n")

    # --------------------------------------------------------------------------------- the thread that looks after all

    def _look_after(self) -> None:
        """Leaves the process if the run can't go on."""
        silence = known = over = 0.0
        rounds, before = 0, time.monotonic()
        while not self._stop.wait(self._period / 2):
            now = time.monotonic()
            elapsed, before = min(now - before, self._period), now
            silence = 0.0 if rounds != self._rounds else silence + elapsed
            rounds = self._rounds
            if self._now[1] != RUNS or self._failed is not None:
                known = over = 0.0
                continue
            verdict = self._verdict or self._about_store(silence)
            if verdict is None:
                continue
            known += elapsed
            over = over + elapsed if self._is_over(verdict) else 0.0
            if over > self._period or known > GRACE:
                self._leave(verdict)

    def _about_store(self, silence: float) -> Verdict | None:
        """What to think if the store does not answer."""
        if self._is_lost and silence > BOUND:
            what = "has gone"
        elif silence > self._stall_timeout:
            what = f"has not answered for {self._stall_timeout:g} s (stall_timeout)"
        else:
            return None
        rank, text = self._keeper, f"chimera: the store of the run {what}."
        if rank >= 0:
            member, text = self._members[rank], f"chimera: rank {rank} of {self._world_size} "
            if self._is_dead(rank):
                text += f"has vanished: {member}, which kept the store of the run, has ended."
            elif self._is_near(rank) and member.is_stopped():
                text += f"has stalled: {member}, which keeps the store of the run, is stopped by a signal, and {what}."
            else:
                text += f"has stalled or vanished: {member}, which keeps the store of the run, {what}."
        text += f"\nRank {self._rank} was at: {PROGRESS.describe()}.\n"
        self._found = Verdict(self._now[0], "store", rank, self._rank, text)
        return self._found

    def _is_over(self, verdict: Verdict) -> bool:
        """Whether nothing is left to wait for: launchers show the error of the rank that ends first."""
        if verdict.kind != "error":
            return True
        member = self._members[verdict.rank]
        if self._is_near(verdict.rank) and member.pid != os.getppid():  # a parent waits for its children in the end
            return member.is_gone()
        beat = self._beats.get(verdict.rank, Beat())
        return self._is_dead(verdict.rank) or beat.state == LEFT or self._is_lost

    def _leave(self, verdict: Verdict) -> None:
        """Leaves the process, whatever else fails."""
        try:
            threading.Thread(target=exit_later, daemon=True).start()
            if self._prints(verdict):
                os.write(2, verdict.text.encode(errors="replace"))
            self._wait_until_seen([rank for rank in self._others if rank != verdict.rank and not self._is_dead(rank)])
            leave_nothing(verdict, self._members, self._own)
        finally:
            os._exit(1)

    def _prints(self, verdict: Verdict) -> bool:
        """Whether this rank tells its screen, which others may share."""
        if verdict.by == self._rank and verdict.kind != "store":
            return True
        told = [] if verdict.kind == "store" else [verdict.by]
        same = {rank for rank, member in self._members.items() if member.screen == self._own.screen}
        if same & set(told):
            return False
        alive = [rank for rank in same if rank == self._rank or (rank != verdict.rank and not self._is_dead(rank))]
        return self._rank == min(alive, default=self._rank)

    def _is_dead(self, rank: int) -> bool:
        return self._is_near(rank) and self._members[rank].is_gone()


_watcher: Watcher | None = None
_watched: dist.ProcessGroup | None = None


def begin_watching(
    stall_timeout: timedelta,
    context: Callable[[], str],
    rank_at: Callable[[int], int],
    finalize: Callable[[], object],
) -> None:
    """Begins a run; its process group is watched from the first one on.

    Args:
        stall_timeout: Without a sign of life for this long a rank has stalled.
        context: Says where in the run this is.
        rank_at: The global rank at a position.
        finalize: Called if the run ends because another rank has failed, where the thread that trains can.
    """
    global _watcher, _watched
    begin_run()
    if dist.group.WORLD is not _watched:
        stop_watching()
        _watcher, _watched = _make(stall_timeout), dist.group.WORLD
    PROGRESS.begin(context, rank_at)
    if _watcher is not None:
        _watcher.finalize = finalize
        _watcher.begin()


def tell_failure(error: BaseException) -> None:
    """Tells the other ranks of an error; does not return if it is but the echo of another rank's."""
    if _watcher is not None:
        _watcher.failed(error)


def end_watching() -> None:
    """Ends a run: all that the ranks do together in it is done."""
    if _watcher is not None:
        _watcher.end()


def stop_watching() -> None:
    """Ends the watch, before the process group is left."""
    global _watcher, _watched
    if _watcher is not None:
        _watcher.close()
    _watcher = _watched = None


def _make(stall_timeout: timedelta) -> Watcher | None:
    """A watcher with the store of the process group; ``None`` where nobody is to watch, or no store to ask."""
    store = _get_default_store()
    base: Any = store
    while isinstance(base, PrefixStore):
        base = base.underlying_store
    rank, world_size, is_asked = dist.get_rank(), dist.get_world_size(), isinstance(base, TCPStore)
    if world_size == 1 or not is_asked:
        return None
    own: Any = TCPStore(
        base.host, base.port, None, False, base.timeout, wait_for_workers=False, use_libuv=base.libuvBackend
    )
    key = f"chimera/watch/{current_run()}"
    if not rank:
        name = uuid.uuid4().hex  # torchrun's store outlives the processes that it starts anew
        own.multi_set([f"{name}/beat/{other}" for other in range(world_size)], [""] * world_size)
        store.set(key, name)
    keeper = -1 if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0
    watcher = Watcher(PrefixStore(store.get(key).decode(), own), rank, world_size, stall_timeout, keeper)
    watcher.start()
    return watcher

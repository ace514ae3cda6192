"""The processes of a run, as those of the same machine can see them."""

import os
import socket
import stat
from pathlib import Path
from typing import NamedTuple

_ENDED, _STOPPED = "ZX", "Tt"


class Member(NamedTuple):
    """The process of a rank.

    Attributes:
        rank: The global rank.
        host: Its machine's name.
        space: The space of process numbers that it is in: which boot of which machine, and container.
        pid: Its process number.
        born: When it was started, since numbers are used again.
        screen: Where its errors are shown.
    """

    rank: int
    host: str
    space: str
    pid: int
    born: int
    screen: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @classmethod
    def of_this_process(cls, rank: int) -> "Member":
        """This process, as the others know it."""
        host = socket.gethostname()
        space = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}:{os.readlink('/proc/self/ns/pid')}"
        _, born = _look("self") or ("", 0)
        return cls(rank, host, space, os.getpid(), born, _screen(host))

    def is_near(self, other: "Member") -> bool:
        """Whether two processes can see each other."""
        return self.space == other.space

    def is_gone(self) -> bool:
        """Whether it is known to have ended; asked of one that is near."""
        try:
            found = _look(str(self.pid))
        except OSError:  # too many open files, say: to see nothing is not to see it gone
            return False
        return found is None or found[1] != self.born or found[0] in _ENDED

    def is_stopped(self) -> bool:
        """Whether it is known that a signal or a debugger holds it; asked of one that is near."""
        try:
            found = _look(str(self.pid))
        except OSError:
            return False
        return found is not None and found[1] == self.born and found[0] in _STOPPED


def _screen(host: str) -> str:
    """The file that errors of this process go to; srun has a pipe to each task, and shows all on one screen."""
    file, step = os.fstat(2), os.environ.get("SLURM_STEP_ID")
    if step is not None and not stat.S_ISREG(file.st_mode):
        return f"step {os.environ.get('SLURM_JOB_ID')}.{step}"
    return f"{host}:{file.st_dev}:{file.st_ino}"


def _look(pid: str) -> tuple[str, int] | None:
    """State and time of birth of a process, if it is there."""
    try:
        fields = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[19])

"""A Slurm cluster of several machines on this one, each in namespaces of its own.

The login node runs the controller in new network, process, mount and host name namespaces, and the compute nodes run
in further ones inside of it, joined by a bridge. So nothing of it touches this machine's network, services or /etc,
clusters of several test sessions do not meet, and when the login node's first process ends, all end.
"""

import os
import re
import secrets
import shutil
import string
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TOOLS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged", "ip", "unshare", "nsenter", "setpriv")
NETWORK = "192.0.2"
"""Reserved for documentation; lives in the cluster's namespaces only."""

LOGIN = "login"
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "DEADLINE")


def why_not() -> str | None:
    """Why there can be no cluster here; None if there can."""
    if os.geteuid() != 0:
        return "a Slurm cluster in namespaces needs root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        packages = "slurmctld slurmd slurm-client munge iproute2 util-linux"
        return f"no {', '.join(missing)}: apt-get install --no-install-recommends {packages}"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "--mount-proc", "true"],
        capture_output=True,
        text=True,
    )
    return None if tried.returncode == 0 else f"this machine allows no new namespaces: {tried.stderr.strip()}"


class Cluster:
    """A running cluster; ``close`` ends it.

    Args:
        nodes: Number of compute nodes, ``node1`` and so on.
    """

    def __init__(self, nodes: int) -> None:
        self.names = [f"node{number}" for number in range(1, nodes + 1)]
        self.folder = Path(tempfile.mkdtemp(prefix="cluster-"))
        self.work = self.folder / "work"
        self._first: dict[str, int] = {}
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._write_files()
        try:
            self.start_node(LOGIN)
            for name in self.names:
                self.start_node(name)
            self.wait_for(lambda: self.idle_nodes() == self.names, 60.0, "all nodes are idle")
        except BaseException:
            logs = "".join(f"--- {log.name}\n{log.read_text()[-2000:]}" for log in (self.folder / "log").iterdir())
            self.close()
            raise RuntimeError(f"The cluster did not start.\n{logs}") from None

    def _write_files(self) -> None:
        for name in ("state", "log", "work", "munge", *(f"spool/{name}" for name in self.names)):
            (self.folder / name).mkdir(parents=True)
        self.folder.chmod(0o755)
        values = {"folder": self.folder, "login": _address(LOGIN), "nodes": len(self.names), "network": NETWORK}
        (self.folder / "slurm.conf").write_text(
            string.Template((HERE / "slurm.conf.in").read_text()).substitute(values)
        )
        names = "".join(f"{_address(name)} {name}\n" for name in (LOGIN, *self.names))
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        (self.folder / "munge").chmod(0o700)
        key = self.folder / "munge" / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)

    # ------------------------------------------------------------------------------------------------------- nodes

    def start_node(self, name: str) -> None:
        """Starts a machine, or one that was killed."""
        inside = [] if name == LOGIN else [*self._enter(LOGIN), "--"]
        command = ["unshare", "--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "--kill-child=KILL"]
        arguments = [str(HERE / "node.sh"), str(self.folder), name, _address(name)]
        log = (self.folder / "log" / f"init-{name}.log").open("ab")
        (self.folder / f"slurmd-{name}.pid").unlink(missing_ok=True)
        process = subprocess.Popen(
            # If the tests are killed, so is the login node, and with it everything.
            ["setpriv", "--pdeathsig", "KILL", *inside, *command, "--mount-proc", "bash", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        log.close()
        self._started[name] = process
        depth = 1 if name == LOGIN else 2  # nsenter forks as well
        self._first[name] = self.wait_for(lambda: _descendant(process, depth), 20.0, f"{name} is there")
        if name == LOGIN:
            self.wait_for(lambda: self._is_up("br0"), 20.0, "the bridge is up")
        else:
            cable = f"v{name}"
            peer = ["type", "veth", "peer", "name", "eth0", "netns", str(self._first[name])]
            self._ip("link", "add", cable, *peer)
            self._ip("link", "set", cable, "master", "br0", "up")

    def kill_node(self, name: str) -> None:
        """Takes a machine's power away."""
        os.kill(self._first[name], 9)
        self._started[name].wait(20.0)

    def cut(self, name: str) -> None:
        """Pulls a machine's network cable."""
        self._ip("link", "set", f"v{name}", "down")

    def heal(self, name: str) -> None:
        """Plugs the cable in again."""
        self._ip("link", "set", f"v{name}", "up")

    def idle_nodes(self) -> list[str]:
        """The nodes that wait for a job."""
        return sorted(self.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N", check=False).split())

    def _is_up(self, link: str) -> bool:
        return "UP" in self._ip("-brief", "link", "show", link, check=False)

    def _ip(self, *arguments: str, check: bool = True) -> str:
        """Runs ``ip`` in the login node's network, but with this machine's process ids."""
        enter = ["nsenter", f"--net=/proc/{self._first[LOGIN]}/ns/net", "ip", *arguments]
        return subprocess.run(enter, capture_output=True, text=True, check=check, timeout=20).stdout

    def _enter(self, name: str) -> list[str]:
        return ["nsenter", "-t", str(self._first[name]), "--net", "--uts", "--mount", "--ipc", "--pid"]

    def close(self) -> None:
        """Ends everything and removes the folder."""
        for name in (LOGIN, *self.names):
            if name in self._first:
                try:
                    os.kill(self._first[name], 9)
                except ProcessLookupError:
                    continue
        for process in self._started.values():
            process.kill()
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    # -------------------------------------------------------------------------------------------------------- jobs

    def popen(self, *command: str, on: str = LOGIN, env: Mapping[str, str] = {}, **options: Any) -> subprocess.Popen:
        """Starts a command on a machine of the cluster, in the work folder."""
        return subprocess.Popen(
            [*self._enter(on), f"--wd={self.work}", *command],
            env={**_environment(), "SLURM_CONF": str(self.folder / "slurm.conf"), **env},
            stdin=subprocess.DEVNULL,
            text=True,
            **options,
        )

    def run(self, *command: str, check: bool = True, limit: float = 60.0, **options: Any) -> str:
        """Runs a command on the login node, or another one, and returns what it printed."""
        process = self.popen(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
        try:
            printed, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        assert not check or process.returncode == 0, f"{command} left with {process.returncode}:\n{printed}"
        return str(printed)

    def submit(self, script: Path, *arguments: str, options: Sequence[str] = (), env: Mapping[str, str] = {}) -> str:
        """Submits a batch script and returns its job's id."""
        return self.run("sbatch", "--parsable", *options, str(script), *arguments, env=env).split(";")[0].strip()

    def job(self, job: str) -> dict[str, str]:
        """What the controller knows of a job, or of a task of an array."""
        shown = self.run("scontrol", "-o", "show", "job", job, check=False)
        return dict(re.findall(r"(\S+?)=(\S*)", shown.splitlines()[0] if shown else ""))

    def state(self, job: str) -> str:
        """A job's state."""
        return self.job(job).get("JobState", "UNKNOWN")

    def wait_for_state(self, job: str, *states: str, limit: float = 120.0) -> str:
        """Waits for a job to be in a state, and returns it; it is an error if the job ends in another one."""

        def reached() -> str | None:
            state = self.state(job)
            assert state in states or state not in _ENDED, f"job {job} is {state}, not {states}\n{self.output(job)}"
            return state if state in states else None

        return str(self.wait_for(reached, limit, f"job {job} is {' or '.join(states)}", job))

    def wait_to_end(self, job: str, limit: float = 120.0, restarts: int = 0) -> str:
        """Waits for the end of a job, however it ends, and returns its state.

        Args:
            job: The job.
            limit: Seconds.
            restarts: How often it is requeued before; in between it may look as if it had ended.
        """

        def ended() -> str | None:
            known = self.job(job)
            is_over = known.get("JobState") in _ENDED and int(known.get("Restarts", "0")) >= restarts
            return known["JobState"] if is_over else None

        return str(self.wait_for(ended, limit, f"job {job} has ended after {restarts} restarts", job))

    def wait_for_output(self, job: str, pattern: str, limit: float = 120.0) -> re.Match[str]:
        """Waits for a job to print something; it is an error if the job ends without."""

        def found() -> re.Match[str] | None:
            ended = self.state(job) in _ENDED
            match = re.search(pattern, self.output(job))
            assert match or not ended, f"job {job} has ended without printing {pattern}\n{self.output(job)}"
            return match

        return self.wait_for(found, limit, f"job {job} prints {pattern}", job)

    def output(self, job: str) -> str:
        """What a job has printed so far."""
        path = self.job(job).get("StdOut", "")
        return Path(path).read_text(errors="replace") if path and Path(path).exists() else ""

    def cancel_all(self) -> None:
        """Ends all jobs, and waits until the nodes are idle again."""
        self.run("scancel", "--user=root", check=False)
        for name in self.names:
            if self._started[name].poll() is not None:
                self.start_node(name)
        self.wait_for(lambda: self.idle_nodes() == self.names, 120.0, "all nodes are idle again")

    def wait_for(self, condition: Callable[[], Any], limit: float, what: str, job: str | None = None) -> Any:
        """Waits until a condition gives something that is true, and returns it."""
        end = time.monotonic() + limit
        while not (found := condition()):
            if time.monotonic() > end:
                printed = f"\n{self.output(job)}" if job is not None else ""
                raise AssertionError(f"after {limit} s it is not so that {what}{printed}")
            time.sleep(0.2)
        return found


def _address(name: str) -> str:
    return f"{NETWORK}.{100 if name == LOGIN else name.removeprefix('node')}"


def _environment() -> dict[str, str]:
    """This process's environment, without what would tell a run that it has been launched already."""
    launched = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED")
    return {key: value for key, value in os.environ.items() if key not in launched and not key.startswith("SLURM_")}


def _descendant(process: subprocess.Popen[bytes], depth: int) -> int | None:
    """The process that many generations below, by this machine's ids."""
    if process.poll() is not None:
        raise RuntimeError(f"{process.args} has ended with {process.returncode}")
    pid = process.pid
    for _ in range(depth):
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        if not children:
            return None
        pid = int(children[0])
    # Before it has run its program it may still be a fork of unshare in the old namespaces.
    return pid if Path(f"/proc/{pid}/comm").read_text().strip() == "bash" else None

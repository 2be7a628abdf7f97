"""Two hosts on one machine: network namespaces with host names of their own, joined by one virtual cable.

To MPI they are two nodes without shared memory between them. Nothing leaves the cable.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from launching import environment, mpirun

NAMES = ("node-a", "node-b")
ADDRESSES = ("192.0.2.1", "192.0.2.2")  # set aside for documentation: no real host has them
DEVICE = "cable0"

# Hydra calls it as it would call ssh: options, host, and a command for the host's shell.
LAUNCHER = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
case $1 in
    {addresses[0]}) namespace={namespaces[0]} name={names[0]} ;;
    {addresses[1]}) namespace={namespaces[1]} name={names[1]} ;;
    *) echo "no such host: $1" >&2; exit 1 ;;
esac
shift
exec ip netns exec "$namespace" unshare --uts sh -c "hostname $name && $*"
"""


@cache
def obstacle() -> str:
    """Why there can be no two hosts here; empty if there can."""
    for program in ("ip", "unshare"):
        if shutil.which(program) is None:
            return f"there is no program '{program}' (on Debian the packages iproute2 and util-linux)"
    version = subprocess.run([mpirun()[0], "--version"], capture_output=True, text=True, check=False).stdout
    if "HYDRA" not in version:
        return "only MPICH's mpirun can be given a launcher other than ssh"
    name = f"hydssp-{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode == 0:
        entered = subprocess.run(
            ["ip", "netns", "exec", name, "unshare", "--uts", "true"],
            capture_output=True,
            text=True,
            check=False,
        )
        subprocess.run(["ip", "netns", "del", name], check=False)
        made = entered
    if made.returncode != 0:
        return f"this user may not make network namespaces: {made.stderr.strip()}"
    return ""


@dataclass(frozen=True)
class Ended:
    """Exit code, standard output and error, and the bytes that went through the cable meanwhile."""

    code: int
    out: str
    err: str
    cable_bytes: int


class TwoHosts:
    """Two hosts that are up."""

    def __init__(self, namespaces: Sequence[str], launcher: Path) -> None:
        self._namespaces = namespaces
        self._launcher = launcher

    def mpirun(
        self, *command: str, ranks_per_host: int, folder: Path, timeout_s: float, rank_prefix: bool = False
    ) -> Ended:
        """Run ``command`` on every rank: the first half of them on the first host, the rest on the second.

        Args:
            *command: After the name of this Python.
            ranks_per_host: Ranks on each of the two.
            folder: Working directory.
            timeout_s: After it everything on both hosts is killed and the test fails.
            rank_prefix: Put ``[RANK] `` before every line of the output.
        """
        before = self._cable_bytes()
        whole = [
            *("ip", "netns", "exec", self._namespaces[0], "unshare", "--uts"),
            *("sh", "-c", f'hostname {NAMES[0]} && exec "$@"', "sh"),
            *(mpirun()[0], "-launcher", "ssh", "-launcher-exec", str(self._launcher)),
            *("-hosts", ",".join(ADDRESSES), "-ppn", str(ranks_per_host), "-np", str(2 * ranks_per_host)),
            *(["-prepend-rank"] if rank_prefix else []),
            *(sys.executable, *command),
        ]
        # UCX would try the loopback device, too, which leads nowhere here.
        variables = environment() | {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": DEVICE}
        with subprocess.Popen(
            whole,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=variables,
            cwd=folder,
            start_new_session=True,
        ) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()
                out, err = process.communicate()
                raise AssertionError(
                    f"{shlex.join(command)} did not end in {timeout_s} s\n{out}\n{err}"
                ) from None
        return Ended(process.returncode, out, err, self._cable_bytes() - before)

    def kill(self) -> None:
        """End whatever still runs on the hosts."""
        for namespace in self._namespaces:
            pids = subprocess.run(
                ["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False
            )
            for pid in pids.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def is_up(self) -> bool:
        """Whether both ends of the cable carry."""
        return all(self._read(namespace, "operstate") == "up" for namespace in self._namespaces)

    def _cable_bytes(self) -> int:
        return sum(int(self._read(self._namespaces[0], f"statistics/{way}_bytes")) for way in ("rx", "tx"))

    def _read(self, namespace: str, name: str) -> str:
        command = ["ip", "netns", "exec", namespace, "cat", f"/sys/class/net/{DEVICE}/{name}"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Make the hosts, and take them away again whatever happens.

    Args:
        folder: For the launcher's script.
    """
    namespaces = [f"hydssp-{os.getpid()}-{name}" for name in NAMES]
    launcher = folder / "launcher.sh"
    launcher.write_text(LAUNCHER.format(addresses=ADDRESSES, namespaces=namespaces, names=NAMES))
    launcher.chmod(0o755)
    hosts = TwoHosts(namespaces, launcher)

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)

    try:
        for namespace in namespaces:
            ip("netns", "add", namespace)
        cable = ["peer", "name", DEVICE, "netns", namespaces[1]]
        ip("link", "add", DEVICE, "netns", namespaces[0], "type", "veth", *cable)
        for namespace, address in zip(namespaces, ADDRESSES, strict=True):
            ip("-n", namespace, "addr", "add", f"{address}/24", "dev", DEVICE)
            ip("-n", namespace, "link", "set", "lo", "up")
            ip("-n", namespace, "link", "set", DEVICE, "up")
        deadline = time.monotonic() + 10
        while not hosts.is_up():
            assert time.monotonic() < deadline, "the cable between the namespaces does not come up"
            time.sleep(0.05)
        yield hosts
    finally:
        hosts.kill()
        for namespace in namespaces:  # the cable goes with them
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)

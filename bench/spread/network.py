"""Hosts as network namespaces, each with a line of its own to a switch. Linux, as root."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shared.errors import UserError

NAMESPACES = Path("/run/netns")
SUBNET = "10.203.0"
BURST = "1mb"
"""Sent at once, then a line is as slow as it should be: enough for the largest packet."""
CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, slots=True)
class Host:
    name: str
    address: str

    def enter(self) -> None:
        """Moves this process, which has one thread, to the host."""
        libc = ctypes.CDLL(None, use_errno=True)
        with (NAMESPACES / self.name).open() as file:
            if libc.setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.name}")

    def command(self, argv: Sequence[str]) -> list[str]:
        """Returns the command that runs ``argv`` on the host."""
        return ["ip", "netns", "exec", self.name, *argv]


def why_not() -> str | None:
    """Returns why this machine cannot have such hosts; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "ip and tc are not installed (iproute2)"
    probe = f"digenrl-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.strip()}"
    _run("ip", "netns", "del", probe)
    return None


@contextmanager
def network(
    lines: Sequence[float | None], site: Sequence[float | None] = (), site_line: float | None = None
) -> Iterator[list[Host]]:
    """Yield a host for each line; remove the hosts afterwards. A line's rate is in megabytes per
    second and direction; None is unlimited. The lines of a far ``site`` meet at a switch
    of its own, and the site has one line to the others.

    Raises:
        UserError: if this machine cannot.
    """
    reason = why_not()
    if reason is not None:
        raise UserError(reason)
    prefix = f"digenrl-{os.getpid()}"
    switch = f"{prefix}-switch"
    hosts = [
        Host(f"{prefix}-{each}", f"{SUBNET}.{each + 1}") for each in range(len(lines) + len(site))
    ]
    far_switch = f"{switch}-far"
    names = [switch, far_switch, *(host.name for host in hosts)]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        for name in (switch, far_switch):
            _run("ip", "-n", name, "link", "add", "switch", "type", "bridge")
            _run("ip", "-n", name, "link", "set", "switch", "up")
        for each, (host, line) in enumerate(zip(hosts, [*lines, *site], strict=True)):
            _connect(host.name, switch if each < len(lines) else far_switch, f"port{each}", line)
            _run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", "line")
        if site:
            _connect(far_switch, switch, "site", site_line)
            _run("ip", "-n", far_switch, "link", "set", "line", "master", "switch")
        yield hosts
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _connect(name: str, switch: str, port: str, megabytes_per_s: float | None) -> None:
    line = ["link", "add", "line", "netns", name, "type", "veth"]
    _run("ip", *line, "peer", "name", port, "netns", switch)
    _run("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
    _run("ip", "-n", name, "link", "set", "line", "up")
    if megabytes_per_s is None:
        return
    rate = f"{round(megabytes_per_s * 8e6)}bit"
    for namespace, device in ((name, "line"), (switch, port)):
        tbf = ["root", "tbf", "rate", rate, "burst", BURST, "latency", "100ms"]
        _run("tc", "-n", namespace, "qdisc", "add", "dev", device, *tbf)


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{' '.join(argv)}: {done.stderr.strip()}")

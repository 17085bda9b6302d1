"""Hosts as network namespaces, each with a line of its own to a switch. Linux, as root."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from bench.spread.far_line import FarLine, RunningLine, far_line
from bench.spread.namespaces import enter
from shared.errors import UserError

SUBNET = "10.203.0"
BURST = "1mb"
"""Sent at once, then a line is as slow as it should be: enough for the largest packet."""


@dataclass(frozen=True, slots=True)
class Host:
    name: str
    address: str
    line: RunningLine | None = None
    """Its line, if that is a `FarLine`."""

    def enter(self) -> None:
        """Moves this process, which has one thread, to the host."""
        enter(self.name)

    @property
    def resent_frames(self) -> int:
        """Return the frames that TCP has sent again from this host."""
        show = self.command(["cat", "/proc/net/snmp"])
        text = subprocess.run(show, capture_output=True, text=True, check=True).stdout
        names, figures = (line.split() for line in text.splitlines() if line.startswith("Tcp:"))
        return int(dict(zip(names, figures, strict=True))["RetransSegs"])

    @property
    def line_counters(self) -> tuple[int, int, int, int]:
        """Return bytes received and sent over its line, and frames received and sent, as its device
        counts them."""
        show = self.command(["cat", "/proc/net/dev"])
        counters = subprocess.run(show, capture_output=True, text=True, check=True).stdout
        [line] = [each for each in counters.splitlines() if each.strip().startswith("line:")]
        figures = [int(each) for each in line.partition(":")[2].split()]
        return figures[0], figures[8], figures[1], figures[9]

    def command(self, argv: Sequence[str]) -> list[str]:
        """Returns the command that runs ``argv`` on the host."""
        return ["ip", "netns", "exec", self.name, *argv]


def why_not(*, far: bool = False) -> str | None:
    """Returns why this machine cannot have such hosts, or ``far`` lines; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "ip and tc are not installed (iproute2)"
    if far and not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "a line with delay needs /dev/net/tun"
    probe = f"digenrl-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.strip()}"
    _run("ip", "netns", "del", probe)
    return None


Line = float | FarLine | None
"""A rate in megabytes per second and direction; None: unlimited."""


@contextmanager
def network(
    lines: Sequence[Line], site: Sequence[Line] = (), site_line: Line = None
) -> Iterator[list[Host]]:
    """Yield a host for each line; remove the hosts afterwards. The lines of a far ``site`` meet at
    a switch of its own, and the site has one line to the others.

    Raises:
        UserError: if this machine cannot.
    """
    reason = why_not(far=any(isinstance(each, FarLine) for each in (*lines, *site, site_line)))
    if reason is not None:
        raise UserError(reason)
    prefix = f"digenrl-{os.getpid()}"
    switch = f"{prefix}-switch"
    hosts = [
        Host(f"{prefix}-{each}", f"{SUBNET}.{each + 1}") for each in range(len(lines) + len(site))
    ]
    far_switch = f"{switch}-far"
    names = [switch, far_switch, *(host.name for host in hosts)]
    with ExitStack() as stack:
        stack.callback(_remove, names)
        for name in names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        for name in (switch, far_switch):
            _run("ip", "-n", name, "link", "add", "switch", "type", "bridge")
            _run("ip", "-n", name, "link", "set", "switch", "up")
        for each, (host, line) in enumerate(zip(hosts, [*lines, *site], strict=True)):
            of_line = switch if each < len(lines) else far_switch
            running = _connect(stack, host.name, of_line, f"port{each}", line)
            hosts[each] = replace(host, line=running)
            _run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", "line")
        if site:
            _connect(stack, far_switch, switch, "site", site_line)
            _run("ip", "-n", far_switch, "link", "set", "line", "master", "switch")
        yield hosts


def _remove(names: Sequence[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _connect(stack: ExitStack, name: str, switch: str, port: str, line: Line) -> RunningLine | None:
    running = None
    if isinstance(line, FarLine):
        running = stack.enter_context(far_line(line, name, switch, port))
    else:
        veth = ["link", "add", "line", "netns", name, "type", "veth"]
        _run("ip", *veth, "peer", "name", port, "netns", switch)
    _run("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
    _run("ip", "-n", name, "link", "set", "line", "up")
    if isinstance(line, FarLine) or line is None:
        return running
    rate = f"{round(line * 8e6)}bit"
    for namespace, device in ((name, "line"), (switch, port)):
        tbf = ["root", "tbf", "rate", rate, "burst", BURST, "latency", "100ms"]
        _run("tc", "-n", namespace, "qdisc", "add", "dev", device, *tbf)
    return None


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{' '.join(argv)}: {done.stderr.strip()}")

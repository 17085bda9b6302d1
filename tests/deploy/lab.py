"""Bare hosts of a lab, as containers with systemd and sshd, in which DigenRL is installed."""

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from digenrl.local.hosts.units import PLACE
from tests.deploy.judged import faults_of_run
from tests.paths import ROOT

IMAGE, NETWORK, SUBNET = "digenrl-lab", "digenrl-lab", "10.77.0"
DIGENRL = Path(sys.prefix) / "bin" / "digenrl"
PATIENCE_S = 300.0
CPUS = {"beta": "1.0", "gamma": "0.5"}
"""Cores of hosts, which are not alike; others have all of the machine's."""


def docker(*words: str, given: str | None = None) -> str:
    ended = subprocess.run(
        ["docker", *words], capture_output=True, text=True, input=given, check=False
    )
    assert ended.returncode == 0, f"docker {' '.join(words[:6])}: {ended.stderr[-1500:]}"
    return ended.stdout.strip()


@dataclass(frozen=True)
class Lab:
    folder: Path
    names: tuple[str, ...]

    def begin(self, *words: str) -> "subprocess.Popen[str]":
        """Start `digenrl` on the operator's machine."""
        return subprocess.Popen(
            [DIGENRL, *words], cwd=self.folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"},
        )  # fmt: skip

    def digenrl(self, *words: str, fails: bool = False) -> str:
        """What `digenrl` prints on the operator's machine."""
        started = self.begin(*words)
        said, _ = started.communicate()
        assert (started.returncode != 0) == fails, said
        return said

    def faults(self, *, is_finished: bool = True) -> list[str]:
        """What the run has lost, by what it has stored; its hosts have ended."""
        stored, copy = f"/home/me/{PLACE}/lab", self.folder / "lab"
        docker("cp", "--quiet", f"lab-{self.names[0]}:{stored}", str(copy))
        return faults_of_run(copy, is_finished=is_finished)

    def on(self, name: str, command: str) -> str:
        """What a host's shell prints."""
        ended = subprocess.run(
            ["docker", "exec", f"lab-{name}", "sh", "-c", command],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return ended.stdout.strip()

    def kill(self, name: str, command: str) -> None:
        """Kill the processes of a host that have a command, as ``[s]erve rollout``."""
        self.on(name, f"pkill -9 -f '{command}'")

    def reboot(self, name: str) -> None:
        docker("restart", f"lab-{name}")

    def strays(self, name: str) -> list[str]:
        """Command lines of our processes that are in no unit of ours."""
        each = "for pid in $(pgrep -f '[d]igenrl|[n]ats-server|[w]eed|[v]alkey'); do"
        outside = (
            "grep -q [d]igenrl-lab.service /proc/$pid/cgroup || tr '\\0' ' ' < /proc/$pid/cmdline"
        )
        return self.on(name, f"{each} {outside}; done").splitlines()

    def unit(self, name: str, field: str) -> str:
        """A property of a host's unit, as `systemctl show` prints it."""
        return self.on(name, self.as_user(f"systemctl --user show digenrl-lab -P {field}"))

    @staticmethod
    def as_user(command: str) -> str:
        return f"su me -c 'cd; export XDG_RUNTIME_DIR=/run/user/$(id -u me); {command}'"

    def journal(self, name: str, pattern: str = "") -> str:
        """Return the lines of a unit's journal that match a pattern without quotes."""
        ask = "journalctl --user --unit digenrl-lab --no-pager --output cat"
        return self.on(name, self.as_user(f'{ask} --grep "{pattern}"'))

    def starts(self, name: str) -> dict[str, int]:
        """How often each worker of a host has become ready."""
        ready = self.journal(name, "event.: .ready.")
        return dict(Counter(re.findall(r'"worker": "([^"]*)",.*"event": "ready"', ready)))

    def wait_for(self, name: str, text: str, count: int = 1) -> float:
        """Return the seconds until a host's journal has a text this often."""
        began = time.monotonic()
        while (said := self.journal(name)).count(text) < count:
            assert time.monotonic() - began < PATIENCE_S, said[-3000:]
            time.sleep(1)
        return time.monotonic() - began


@contextmanager
def lab(
    folder: Path, roles: dict[str, str], recipe: str = "", lingering: bool = True
) -> Iterator[Lab]:
    """Hosts with these roles; the first leads. `hosts.toml` and keys for ssh are in the folder.

    Args:
        recipe: text of a recipe; by default the demo is run.
    """
    code = [str(ROOT / each) for each in ("digenrl", "services", "shared")]
    subprocess.run([sys.executable, "-m", "compileall", "-q", *code], check=True)  # as pip does
    image, empty = ROOT / "tests/deploy/lab.Dockerfile", ROOT / "deploy/empty"
    docker("build", "-q", "--network=host", "-t", IMAGE, "-f", str(image), str(empty))
    names = tuple(roles)
    _remove(names)  # what a killed run has left
    try:
        docker("network", "create", NETWORK, "--subnet", f"{SUBNET}.0/24")
        _write(folder, roles, "lab.toml" if recipe else "digits.toml")
        for number, name in enumerate(names, start=11):
            _start(folder, name, f"{SUBNET}.{number}", lingering)
        docker(
            "exec", "--interactive", "--user", "me", f"lab-{names[0]}",
            "sh", "-c", "cat > /home/me/lab.toml", given=recipe,
        )  # fmt: skip
        yield Lab(folder, names)
    finally:
        _remove(names)


def _remove(names: Sequence[str]) -> None:
    with suppress(AssertionError):
        docker("rm", "--force", *(f"lab-{name}" for name in names))
    with suppress(AssertionError):
        docker("network", "rm", NETWORK)


def _start(folder: Path, name: str, address: str, lingering: bool) -> None:
    python = Path(os.path.realpath(sys.executable)).parents[1]
    docker(
        "run", "--detach", "--name", f"lab-{name}", "--hostname", name, "--network", NETWORK,
        "--ip", address, "--cpus", CPUS.get(name, str(os.cpu_count())),
        "--privileged", "--tmpfs", "/run", "--tmpfs", "/tmp:exec",
        "--volume", f"{python}:{python}:ro", "--volume", f"{ROOT}:{ROOT}:ro",
        "--volume", f"{sys.prefix}:{sys.prefix}:ro",
        "--volume", f"{ROOT}/models:/data/models:ro", IMAGE,
    )  # fmt: skip
    key = (folder / "ssh" / "id.pub").read_text()
    open_parents = " ".join(
        str(each) for each in [*python.parents, *ROOT.parents] if str(each) != "/"
    )
    script = f"""until systemctl is-system-running | grep -qE 'running|degraded'; do sleep 0.2; done
        chmod a+rx {open_parents} 2>/dev/null
        cat > /home/me/.ssh/authorized_keys; chown me /home/me/.ssh/authorized_keys
        {"loginctl enable-linger me" if lingering else ""}"""
    docker("exec", "--interactive", f"lab-{name}", "sh", "-c", script, given=key)


def _write(folder: Path, roles: dict[str, str], recipe: str) -> None:
    (folder / "ssh").mkdir()
    (folder / "bin").mkdir()
    key = folder / "ssh" / "id"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    config = "".join(
        f"Host {name}\n  HostName {SUBNET}.{number}\n"
        for number, name in enumerate(roles, start=11)
    )
    config += f"Host *\n  User me\n  IdentityFile {key}\n  StrictHostKeyChecking no\n"
    config += f"  UserKnownHostsFile {folder / 'ssh' / 'known'}\n  LogLevel ERROR\n"
    (folder / "ssh" / "config").write_text(config)
    for program in ("ssh", "scp"):  # as a person's ~/.ssh/config would do
        path = folder / "bin" / program
        path.write_text(f'#!/bin/sh\nexec /usr/bin/{program} -F {folder}/ssh/config "$@"\n')
        path.chmod(0o755)
    models = {name: "/data/models" for name in roles} | {next(iter(roles)): ROOT / "models"}
    tables = "".join(
        f'\n[hosts.{name}]\nroles = "{each}"\ndigenrl = "{DIGENRL}"\n'
        f'environment = {{ DIGENRL_MODELS = "{models[name]}", OMP_NUM_THREADS = "1" }}\n'
        for name, each in roles.items()
    )
    (folder / "hosts.toml").write_text(
        f'run = "lab"\nrecipe = "{recipe}"\naddress = "{SUBNET}.11"\n{tables}'
    )

"""`digenrl hosts` on three hosts with systemd and sshd: all that dies comes back."""

import re
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.deploy.lab import PATIENCE_S, Lab, lab
from tests.paths import DEMO, ROOT

pytestmark = [
    pytest.mark.deploy, pytest.mark.run, pytest.mark.timeout(3600),
    pytest.mark.usefixtures("needs_docker"),
]  # fmt: skip
ROLES = {"alpha": "trainer,reward", "beta": "rollout", "gamma": "rollout"}
END_S = 15.0


def demo(**changes: object) -> str:
    """The demo's recipe with other values of some keys, found from any folder."""
    text = (
        DEMO.read_text().replace('"../', f'"{ROOT}/').replace('"digits.', f'"{DEMO.parent}/digits.')
    )
    for key, value in changes.items():
        text, found = re.subn(rf"(?m)^{key} = .*$", f"{key} = {value}", text, count=1)
        assert found, key
    return text


def typed_commands() -> list[list[str]]:
    """What the page types: a plan, and what starts, shows and stops hosts."""
    page = (ROOT / "docs/deploy/lab.md").read_text()
    return [line.split() for line in re.findall(r"^digenrl (hosts .*?) *(?:#.*)?$", page, re.M)]


def record(line: str) -> None:
    """Print a measurement, which pytest shows with the option -s."""
    sys.stderr.write(f"\n{line}")


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Lab]:
    with lab(tmp_path, ROLES, demo(steps=1000)) as hosts:
        yield hosts


def kill_and_wait(hosts: Lab, pattern: str) -> None:
    """Kill processes on all hosts, and return when all workers are ready again."""
    before = {name: hosts.starts(name) for name in hosts.names}
    for name in hosts.names:
        hosts.kill(name, pattern)
    began = time.monotonic()
    for name in hosts.names:
        while any(hosts.starts(name)[each] <= n for each, n in before[name].items()):
            assert time.monotonic() - began < PATIENCE_S, hosts.journal(name)[-3000:]
            time.sleep(1)
        assert hosts.strays(name) == []


def train_and_kill(hosts: Lab, rounds: int, pause_s: float) -> None:
    began = time.monotonic()
    assert hosts.digenrl("hosts", "apply").count(": started") == 3
    hosts.wait_for("alpha", '"version": 1, "checksum"')
    record(f"first commit {time.monotonic() - began:.0f} s after apply")
    assert hosts.digenrl("hosts", "apply").count(": unchanged") == 3
    for number in range(2 * rounds):
        began = time.monotonic()
        kill_and_wait(hosts, "[d]igenrl host" if number % 2 else "[s]erve (trainer|reward|rollout)")
        record(f"all workers ready {time.monotonic() - began:.0f} s after kill {number + 1}")
        time.sleep(max(0.0, pause_s - (time.monotonic() - began)))


def take_down(hosts: Lab) -> None:
    """After `down`, no host has a unit, a process or a secret, and the run has lost nothing."""
    hosts.digenrl("hosts", "down")
    secrets = {path.read_text().strip() for path in (hosts.folder / "hosts/keys").glob("*/secret")}
    assert len(secrets) > 5
    for name in hosts.names:
        assert hosts.strays(name) == []
        assert hosts.on(name, "ls /home/me/.config/systemd/user/*.service") == ""
        grep = " ".join(f"-e {secret}" for secret in secrets)
        assert hosts.on(name, f"grep -rlF {grep} /home/me") == ""
    assert hosts.faults(is_finished=False) == []


def test_three_hosts_train_and_come_back_after_every_death(three: Lab) -> None:
    train_and_kill(three, rounds=1, pause_s=0)
    before = three.starts("gamma")
    three.reboot("gamma")
    began = time.monotonic()
    while three.starts("gamma") == before:
        assert time.monotonic() - began < PATIENCE_S, three.journal("gamma")[-3000:]
        time.sleep(1)
    terminal = three.begin("hosts", "apply")
    time.sleep(1)
    terminal.kill()
    terminal.communicate()
    assert three.digenrl("hosts", "apply").count(": unchanged") == 3
    assert three.digenrl("hosts", "status").count("ActiveState=active") == 3
    take_down(three)


@pytest.mark.slow
def test_each_process_of_a_lab_comes_back_after_twenty_deaths(three: Lab) -> None:
    train_and_kill(three, rounds=20, pause_s=30)
    take_down(three)


def test_fluid_hosts_end_with_their_run_and_lose_nothing(tmp_path: Path) -> None:
    roles = {"alpha": "trainer,reward", "beta": "trainer", "gamma": "trainer"}
    fluid = demo().replace("[schedule]\n", '[schedule]\nmode = "fluid"\n', 1)
    plan, apply, status, down = typed_commands()
    with lab(tmp_path, roles, fluid) as hosts:
        assert hosts.digenrl(*plan).count("\nscp ") == 3
        assert hosts.digenrl(*apply).count(": started") == 3
        hosts.wait_for("alpha", '"version": 2, "checksum"')
        hosts.kill("gamma", "[s]erve trainer")
        hosts.wait_for("alpha", '"phase": "finished"')
        [finish] = re.findall(r'"phase": "finished".*"ts": "(.*?)"', hosts.journal("alpha"))
        began = time.monotonic()
        for name in hosts.names:
            while hosts.unit(name, "ActiveState") != "inactive":
                assert time.monotonic() - began < END_S * 2, hosts.journal(name)[-3000:]
                time.sleep(0.5)
            assert hosts.unit(name, "ExecMainStatus") == "0"
            end = hosts.on(name, hosts.as_user(
                'date --utc +%s -d "$(systemctl --user show digenrl-lab -P ExecMainExitTimestamp)"'
            ))  # fmt: skip
            late = int(end) - datetime.fromisoformat(finish).astimezone(UTC).timestamp()
            record(f"{name} ended {late:.0f} s after the run")
            assert late < END_S
        assert hosts.digenrl(*status).count("Result=success") == 3
        hosts.digenrl(*down)
        assert hosts.faults() == []


def test_a_host_whose_units_would_end_at_log_out_is_refused(tmp_path: Path) -> None:
    with lab(tmp_path, {"alpha": "trainer,reward"}, lingering=False) as one:
        assert "loginctl enable-linger" in one.digenrl("hosts", "apply", fails=True)

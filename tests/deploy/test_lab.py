"""`digenrl hosts` on three hosts with systemd and sshd: all that dies comes back."""

import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from tests.deploy.lab import PATIENCE_S, SUBNET, Lab, docker, lab
from tests.hub.mirror import mirror
from tests.paths import DEMO, ROOT

pytestmark = [
    pytest.mark.deploy, pytest.mark.run, pytest.mark.timeout(3600),
    pytest.mark.usefixtures("needs_docker"),
]  # fmt: skip
ROLES = {"alpha": "trainer,reward", "beta": "rollout", "gamma": "rollout"}
MEMBERS = {"alpha": "trainer,reward", "beta": "trainer,rollout", "gamma": "trainer"}
MODEL = "tiny/digits"
END_S, FIRST_COMMIT_S = 15.0, 60.0


def demo(**changes: object) -> str:
    """The demo's recipe with other values of some keys, found from any folder."""
    text = (
        DEMO.read_text().replace('"../', f'"{ROOT}/').replace('"digits.', f'"{DEMO.parent}/digits.')
    )
    for key, value in changes.items():
        text, found = re.subn(rf"(?m)^{key} = .*$", f"{key} = {value}", text, count=1)
        assert found, key
    return text


def fluid(**changes: object) -> str:
    return demo(**changes).replace("[schedule]\n", '[schedule]\nmode = "fluid"\n', 1)


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


def begin(hosts: Lab) -> None:
    """The run's first commit, at most a minute after the command is typed; typed again, the command
    changes nothing."""
    began = time.monotonic()
    assert hosts.digenrl("hosts", "apply").count(": started") == 3
    record(f"applied in {time.monotonic() - began:.0f} s")
    hosts.wait_for("alpha", '"version": 1, "checksum"')
    seconds = time.monotonic() - began
    record(f"first commit {seconds:.0f} s after apply")
    assert seconds < FIRST_COMMIT_S
    assert hosts.digenrl("hosts", "apply").count(": unchanged") == 3


def kill_in_turn(hosts: Lab, rounds: int, pause_s: float) -> None:
    """Kill all workers, then all `digenrl host`: each process once in every ``pause_s``."""
    for number in range(rounds):
        began = time.monotonic()
        kill_and_wait(hosts, "[s]erve (trainer|reward|rollout)")
        workers_s = time.monotonic() - began
        kill_and_wait(hosts, "[d]igenrl host")
        hosts_s = time.monotonic() - began - workers_s
        record(f"kill {number + 1}: workers ready after {workers_s:.0f} s, hosts {hosts_s:.0f} s")
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
    begin(three)
    kill_in_turn(three, rounds=1, pause_s=0)
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
@pytest.mark.parametrize("mode", ["roles", "fluid"])
def test_each_process_of_a_lab_comes_back_after_twenty_deaths(mode: str, tmp_path: Path) -> None:
    roles, recipe = (ROLES, demo(steps=5000)) if mode == "roles" else (MEMBERS, fluid(steps=5000))
    with lab(tmp_path, roles, recipe) as hosts:
        begin(hosts)
        kill_in_turn(hosts, rounds=20, pause_s=30)
        take_down(hosts)


def time_of_end(hosts: Lab, name: str) -> float:
    """Return when a host's unit has ended by itself, with status 0."""
    began = time.monotonic()
    while hosts.unit(name, "ActiveState") != "inactive":
        assert time.monotonic() - began < PATIENCE_S, hosts.journal(name)[-3000:]
        time.sleep(0.5)
    assert hosts.unit(name, "ExecMainStatus") == "0"
    show = "systemctl --user show digenrl-lab -P ExecMainExitTimestamp"
    return float(hosts.on(name, hosts.as_user(f'date --utc +%s -d "$({show})"')))


def test_fluid_hosts_fetch_the_model_once_end_with_their_run_and_lose_nothing(
    tmp_path: Path,
) -> None:
    folder = f'folder = "{ROOT}/models/digits"'
    plan, apply, status, down = typed_commands()
    with (
        lab(tmp_path, MEMBERS, fluid().replace(folder, f'id = "{MODEL}"')) as hosts,
        mirror(f"{SUBNET}.1") as hub,
    ):
        hub.add(MODEL, ROOT / "models/digits")
        text = (tmp_path / "hosts.toml").read_text()
        hubs = re.sub('DIGENRL_MODELS = ".*?"', f'HF_ENDPOINT = "{hub.url}"', text)
        (tmp_path / "hosts.toml").write_text(hubs)
        assert hosts.digenrl(*plan).count("\nscp ") == 3
        assert hosts.digenrl(*apply).count(": started") == 3
        hosts.wait_for("alpha", '"version": 2, "checksum"')
        hosts.kill("beta", "[s]erve (trainer|rollout)")
        docker("stop", "lab-gamma")
        hosts.wait_for("alpha", '"phase": "finished"')
        [finish] = re.findall(r'"phase": "finished".*"ts": "(.*?)"', hosts.journal("alpha"))
        for name in ("alpha", "beta"):
            seconds = time_of_end(hosts, name) - datetime.fromisoformat(finish).timestamp()
            record(f"{name} ended {seconds:.0f} s after the run")
            assert seconds < END_S
        fetched = Counter(each for each in hub.fetched() if each.endswith(".safetensors"))
        assert {*fetched.values()} == {3}, "each host has fetched it once"
        shown = hosts.digenrl(*status, fails=True)
        assert shown.count("Result=success") == 2 and "gamma ...: ssh: connect to host" in shown
        docker("start", "lab-gamma")
        hosts.wait_for("gamma", '"event": "waiting_for_nats"')
        assert hosts.digenrl(*apply).splitlines() == [
            "alpha: started", "beta: started", "gamma: unchanged",
        ]  # fmt: skip
        for name in hosts.names:
            time_of_end(hosts, name)
        hosts.digenrl(*down)
        assert hosts.faults() == []


def test_a_host_whose_units_would_end_at_log_out_is_refused(tmp_path: Path) -> None:
    with lab(tmp_path, {"alpha": "trainer,reward"}, lingering=False) as one:
        assert "loginctl enable-linger" in one.digenrl("hosts", "apply", fails=True)

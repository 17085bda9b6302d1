"""`digenrl hosts` on three hosts with systemd and sshd: all that dies comes back."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.lab import Lab, lab

pytestmark = [pytest.mark.deploy, pytest.mark.run, pytest.mark.usefixtures("needs_docker")]
ROLES = {"alpha": "trainer,reward", "beta": "rollout", "gamma": "rollout"}


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Lab]:
    with lab(tmp_path, ROLES) as hosts:
        yield hosts


def test_three_hosts_train_and_come_back_after_every_death(three: Lab) -> None:
    assert three.digenrl("hosts", "apply").count(": started") == 3
    three.wait_for("alpha", '"version": 1,')
    assert three.digenrl("hosts", "apply").count(": unchanged") == 3
    three.on("beta", "pkill -9 -f 'serve rollout'")
    three.on("gamma", "pkill -9 -f 'digenrl host'")
    three.wait_for("beta", '"event": "ready"', count=2)
    three.wait_for("gamma", '"event": "ready"', count=2)
    status = three.digenrl("hosts", "status")
    assert "gamma: Result=success NRestarts=1 ActiveState=active" in status
    three.wait_for("alpha", '"event": "run_finished"')
    three.digenrl("hosts", "down")
    for name in three.names:
        assert three.on(name, "pgrep -f '[d]igenrl host'") == ""
        assert three.on(name, "ls /home/me/.config/systemd/user/*.service") == ""
        assert three.on(name, "ls -d /home/me/.local/share/digenrl/lab/keys") == ""
    secrets = {path.read_text().strip() for path in (three.folder / "hosts/keys").glob("*/secret")}
    for secret in secrets:
        assert three.on("alpha", f"grep -rlF -- '{secret}' /home/me --exclude-dir=objects") == ""


def test_a_host_whose_units_would_end_at_log_out_is_refused(tmp_path: Path) -> None:
    with lab(tmp_path, {"alpha": "trainer,reward"}, lingering=False) as one:
        assert "loginctl enable-linger" in one.digenrl("hosts", "apply", fails=True)

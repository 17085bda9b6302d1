"""Hosts of a lab that can never take part: their units end with status 2, and stay so.

tests/local/test_hopeless_host.py has what `digenrl host` prints, without units.
"""

import time
from pathlib import Path

import pytest

from digenrl.local.hosts.units import PLACE
from tests.deploy.lab import Lab, lab

pytestmark = [
    pytest.mark.deploy, pytest.mark.run, pytest.mark.timeout(1800),
    pytest.mark.usefixtures("needs_docker"),
]  # fmt: skip
UNIT = "/home/me/.config/systemd/user/digenrl-lab.service"
END_S = 180.0
STATES = {
    "settings that are not there": ("rm keys/hosts.env", "hosts.env: No such file or directory"),
    "settings of no run": ("sed -i /DIGENRL_RUN/d keys/hosts.env", "does not name the run"),
    "no keys of the role": ("rm -r keys/rollout", "rollout is no folder"),
    "keys that others can read": ("chmod 644 keys/rollout/secret", "others may read"),
    "keys of another run": (
        "sed -i s/@/-other@/ keys/rollout/digenrl_nats_url", "refuses this user or password",
    ),
    "the authority of another lab": (
        "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=other -keyout /dev/null -out /ca; "
        "{ echo \"export DIGENRL_CA='$(cat /ca)'\"; cat keys/hosts.env; } > /first; "
        "cp /first keys/hosts.env", "has a certificate that DIGENRL_CA does not verify",
    ),
    "an unknown role": (f"sed -i 's/--roles rollout/--roles judge/' {UNIT}", "judge is unknown"),
    "a role without work": (
        f"cp -r keys/rollout keys/encoder; sed -i 's/--roles rollout/--roles encoder/' {UNIT}",
        "the recipe has no work for encoder",
    ),
    "the address of another host": (
        f"sed -i 's/^ExecStart=.*/& --at 10.77.0.99 --recipe digits.toml/' {UNIT}",
        "--at: 10.77.0.99 is no address of this machine",
    ),
    "a full disk": (
        "mkdir /small; mount -t tmpfs -o size=10m,mode=777 tmpfs /small; "
        "echo DIGENRL_HOST_CACHE=/small >> host.env", "DIGENRL_HOST_CACHE: /small has",
    ),
    "another model": (
        "cp -r /data/models /another; printf x >> /another/digits/model_index.json; "
        "echo DIGENRL_MODELS=/another >> host.env", "model.folder",
    ),
}  # fmt: skip
"""What is done in the run's folder on the host, and what its unit says then."""


def end_of(hosts: Lab, command: str) -> str:
    """The newest lines of the unit, once it has failed after a change."""
    place = f"/home/me/{PLACE}/lab"
    kept = f"rm -rf {place} {UNIT}; cp -a /kept/lab {place}; cp -a /kept/unit {UNIT}"
    hosts.on("beta", f"{kept}; cd {place}; {command}; chown -R me {place} {UNIT}")
    restart = "systemctl --user daemon-reload; systemctl --user reset-failed; "
    hosts.on("beta", hosts.as_user(f"{restart} systemctl --user restart digenrl-lab"))
    began = time.monotonic()
    while hosts.unit("beta", "ActiveState") != "failed" and time.monotonic() - began < END_S:
        time.sleep(0.5)
    return hosts.journal("beta")[-1500:]


def test_a_unit_that_can_never_take_part_says_why_and_is_not_started_again(tmp_path: Path) -> None:
    with lab(tmp_path, {"alpha": "reward", "beta": "rollout"}) as hosts:
        hosts.digenrl("hosts", "apply")
        hosts.wait_for("beta", '"event": "ready"')
        hosts.on("beta", hosts.as_user("systemctl --user stop digenrl-lab"))
        hosts.on(
            "beta", f"mkdir /kept; cp -a /home/me/{PLACE}/lab /kept/lab; cp -a {UNIT} /kept/unit"
        )
        wrong = {}
        for name, (command, line) in STATES.items():
            said = end_of(hosts, command)
            found = [hosts.unit("beta", field) for field in ("ExecMainStatus", "NRestarts")]
            if line not in said or found != ["2", "0"]:
                wrong[name] = (found, said)
        assert wrong == {}
        assert "beta: Result=exit-code NRestarts=0 ActiveState=failed" in hosts.digenrl(
            "hosts", "status"
        )

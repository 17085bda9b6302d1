"""A storm over a whole run with the real network and its optimizer: services and brokers are killed
again and again, and the weights are those of a run that nobody has touched."""

import hashlib
import os
import random
import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.local_run import SMALL, LocalRun, StartRun, recipe_of

pytestmark = [pytest.mark.run, pytest.mark.slow, pytest.mark.timeout(3600)]
VICTIMS = {
    "serve trainer": 4, "serve rollout": 2, "serve reward": 1, "serve scheduler": 2,
    "nats-server": 1, "valkey-server": 1, "weed": 1,
}  # fmt: skip
"""What is in the command of a process -> how often it is chosen."""
FEW = int(os.environ.get("DIGENRL_KILLS", "4"))
STEPS_PER_KILL = 2
ROUNDED = {"exchange.down": "int4", "exchange.up": "int8", "trainer.devices": 2}
"""Two members exchange sums, and rollout reads changes."""


def adapter(run: LocalRun) -> str:
    [path] = (run.folder / "adapter").glob("*.safetensors")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def kill_one(run: LocalRun, draw: random.Random) -> str:
    """Kill a process of the run, and return what it was."""
    while True:
        wanted = draw.choices([*VICTIMS], [*VICTIMS.values()])[0]
        found = [pid for pid in run.children() if wanted in command(pid)]
        if found:
            os.kill(draw.choice(found), signal.SIGKILL)
            return wanted


def command(pid: int) -> str:
    """Return the command of a process; nothing if it is gone."""
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""


@pytest.mark.parametrize(
    "changes", [pytest.param({}, id="exact"), pytest.param(ROUNDED, id="rounded")]
)
@pytest.mark.parametrize("kills", [FEW, pytest.param(60, marks=pytest.mark.night)])
def test_a_real_network_that_is_killed_again_and_again_has_the_weights_of_a_calm_run(
    start_run: StartRun, tmp_path: Path, kills: int, changes: dict[str, object]
) -> None:
    steps = str(STEPS_PER_KILL * kills + 2)
    given = ("--steps", steps, "--deterministic")
    recipe = recipe_of(tmp_path, {**SMALL, **changes})
    calm = start_run(*given, name="calm", recipe=recipe)
    expected = calm.finish()
    struck = start_run(*given, name="struck", recipe=recipe)
    draw = random.Random(kills)
    victims = []
    for number in range(kills):
        reached = struck.wait_for(lambda view, n=number: view["step"] >= 1 + n)["step"]  # type: ignore[misc]
        assert reached < int(steps), f"the run has ended after {number} kills"
        victims.append(kill_one(struck, draw))
        struck.wait_for(lambda view, n=reached: view["step"] > n)  # type: ignore[misc]
    found = struck.finish()
    assert found["commits"] == expected["commits"] == int(steps)
    assert found["samples_trained"] == expected["samples_trained"]
    assert adapter(struck) == adapter(calm), victims

"""How a whole run is steered and stopped, with every service and broker real.

Starting the services takes most of the time here, so each test does several things with its run.
The emulated cluster shows what needs no real model, in seconds (tests/storm).
"""

import asyncio
import os
import signal
import time
from pathlib import Path

import httpx
import nats
import pytest

from digenrl.local.secrets.tokens import KEYS
from shared.messages.rights import RIGHTS, Role, inbox_subject
from tests.e2e.canary import check_no_secret_is_said
from tests.e2e.local_run import SMALL, LocalRun, StartRun, recipe_of, wait_until

pytestmark = [pytest.mark.run, pytest.mark.timeout(900)]

SAMPLES = 3 * 4


@pytest.mark.slow
def test_operators_steer_it_services_die_strangers_write_garbage_and_the_run_goes_on(
    start_run: StartRun,
) -> None:
    run = start_run("--steps", "6")
    run.wait_for(lambda view: view["step"] >= 1)
    run.post("/v1/run/pause")
    paused = run.wait_for(lambda view: view["phase"] == "paused")
    write_garbage(run)
    check_api(run)
    check_no_secret_is_said(run)
    assert run.get("/v1/run")["step"] <= paused["step"] + 1
    run.post("/v1/run/resume")
    run.wait_for(lambda view: view["phase"] == "running")
    for victim in one_process_of_each_service(run.children()):
        os.kill(victim, signal.SIGKILL)
        time.sleep(0.5)
    assert run.wait_for(lambda view: view["num_quarantined"] >= 4)["failure"] is None
    check_no_secret_is_said(run)
    summary = run.finish()
    assert summary["commits"] == 6
    assert summary["samples_trained"] == 6 * SAMPLES


@pytest.mark.slow
def test_ctrl_c_leaves_no_process_behind_and_a_stop_ends_the_resumed_run(
    start_run: StartRun,
) -> None:
    run = start_run("--steps", "400")
    step = run.wait_for(lambda view: view["step"] >= 1)["step"]
    children = run.children()
    assert len(children) == 10  # three brokers, five services, the page, the starter
    run.process.send_signal(signal.SIGINT)
    output, _ = run.process.communicate(timeout=60)
    assert run.process.returncode == 130
    assert "nothing is lost" in output
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]

    resumed = start_run("--steps", "400", "--resume")
    resumed.wait_for(lambda view: view["step"] >= step + 1)
    assert resumed.post("/v1/run/stop").status_code == 202
    output, _ = resumed.process.communicate(timeout=60)
    assert resumed.process.returncode == 0
    assert "stopped on request" in output


@pytest.mark.slow
def test_a_reward_that_raises_is_reported_at_once_and_repaired_it_starts(
    start_run: StartRun, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def score(image):\n    raise ValueError('no colour')\n")
    mine = {"name": "mine", "type": "python", "source": str(file)}
    recipe = recipe_of(tmp_path, SMALL | {"reward.scorers": [mine]})
    run = start_run("--steps", "1", recipe=recipe)
    output, _ = run.process.communicate(timeout=500)
    assert run.process.returncode == 1
    reason = "reward: mine: ValueError: no colour (mine.py, line 2)"
    first = f"a first attempt has failed; newest dead letter: {reason}"
    assert output.index(first) < output.index("too few of its")
    assert "once that is repaired: " in output and "--resume" not in output
    file.write_text("def score(image):\n    return image.mean()\n")
    assert start_run("--steps", "1", recipe=recipe).finish()["commits"] == 1


def check_api(run: LocalRun) -> None:
    everybody = {"rollout", "reward", "trainer"}  # a trainer that helps may be first by a batch
    wait_until(lambda: {one["service"] for one in run.get("/v1/workers")} == everybody, 60)
    assert run.get("/v1/batches")[0]["status"] == "in_flight"
    assert run.get("/v1/batches/0")["status"] == "committed"
    assert run.get("/v1/versions")[-1]["version"] == 0
    assert "digenrl_onpolicy_ratio_error" in run.ask("/metrics").text
    assert httpx.get(f"{run.url}/readyz").status_code == 200


def one_process_of_each_service(children: list[int]) -> list[int]:
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in children}
    found = {words[4]: pid for pid, words in commands.items() if "serve" in words}
    assert set(found) == {"rollout", "reward", "trainer", "scheduler"}
    return list(found.values())


def write_garbage(run: LocalRun) -> None:
    """Bytes that are no message, into slots of the batches to come and among the events."""

    async def publish(subject: str) -> None:
        role = publisher_of(subject)
        url = (run.folder / KEYS / role / "digenrl_nats_url").read_text()
        client = await nats.connect(url, inbox_prefix=inbox_subject(role))
        await client.jetstream().publish(f"dg.small.{subject}", b"\xc1 this is no message")
        await client.close()

    for subject in ("task.4.0.0.0", "traj.3.1.2.0", "rew.4.2.0.0", "train.3.0.0",
                    "evt.policy_published"):  # fmt: skip
        asyncio.run(publish(subject))


def publisher_of(subject: str) -> Role:
    """A role that may publish to a subject, without the run."""
    word = ".".join(
        subject.split(".")[:2] if subject.startswith("evt.") else subject.split(".")[:1]
    )
    return next(right.publishers[0] for right in RIGHTS if right.subject.startswith(f"dg.*.{word}"))

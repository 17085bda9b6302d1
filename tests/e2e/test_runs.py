"""The promises of a whole run, with every service and broker real."""

import os
import signal
import time

import httpx
import nats
import pytest
from safetensors.numpy import load_file

from tests.e2e.conftest import StartRun

pytestmark = pytest.mark.run

STEPS = "7"


@pytest.fixture(scope="module")
def expected_adapter() -> dict[str, str]:
    """The sha256 of the uninterrupted run, noted by the first test that makes it."""
    return {}


@pytest.mark.parametrize("workers", ["2", "1", "3"])
def test_the_same_seed_gives_the_same_bytes_with_any_number_of_workers(
    start_run: StartRun, expected_adapter: dict[str, str], workers: str
) -> None:
    run = start_run("--steps", STEPS, "--order", "index", "--rollout-workers", workers)
    summary = run.finish()
    assert summary["steps"] == summary["commits"] == int(STEPS)
    assert summary["samples_trained"] == int(STEPS) * 3 * 4
    assert summary["onpolicy_ratio_error_max"] <= 1e-6
    assert summary["adapter_sha256"] == expected_adapter.setdefault(
        "sha", summary["adapter_sha256"]
    )
    for name in ("curve.png", "gallery.png"):
        assert (run.folder / name).stat().st_size > 10_000
    tensors = load_file(run.folder / "adapter" / "pytorch_lora_weights.safetensors")
    assert any(abs(tensor).max() > 0 for name, tensor in tensors.items() if "lora_B" in name)


def test_a_run_killed_as_a_whole_and_resumed_ends_with_the_same_bytes(
    start_run: StartRun, expected_adapter: dict[str, str]
) -> None:
    run = start_run("--steps", STEPS, "--order", "index")
    run.wait_for(lambda view: view["step"] >= 5)
    run.kill_everything()
    resumed = start_run("--steps", STEPS, "--order", "index", "--resume")
    summary = resumed.finish()
    assert summary["commits"] == int(STEPS)
    assert (
        expected_adapter.setdefault("sha", summary["adapter_sha256"]) == summary["adapter_sha256"]
    )


def test_single_services_are_killed_and_strangers_write_garbage_and_the_run_goes_on(
    start_run: StartRun,
) -> None:
    run = start_run("--steps", "6")
    run.wait_for(lambda view: view["step"] >= 1)
    write_garbage(run.folder.joinpath("password").read_text(), run.children())
    for _, victim in zip(range(4), cycle_of_services(run.children()), strict=False):
        os.kill(victim, signal.SIGKILL)
        time.sleep(0.5)
    view = run.wait_for(lambda view: view["num_quarantined"] >= 4)
    assert view["phase"] in ("running", "finished")
    summary = run.finish()
    assert summary["commits"] == 6
    assert summary["samples_trained"] == 6 * 3 * 4


def command_of(pid: int) -> list[str]:
    with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123 - no path of ours
        return file.read().decode().split("\0")


def cycle_of_services(children: list[int]) -> list[int]:
    """One rollout worker, the reward worker, the trainer and the scheduler."""
    by_service = {command_of(pid)[4]: pid for pid in children if "serve" in command_of(pid)}
    assert set(by_service) == {"rollout", "reward", "trainer", "scheduler"}
    return list(by_service.values())


def write_garbage(password: str, children: list[int]) -> None:
    """Bytes that are no message into slots of the batches to come, and into the event stream."""
    import asyncio

    environment: dict[str, str] = {}
    for pid in children:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123 - no path of ours
            pairs = [item.split("=", 1) for item in file.read().decode().split("\0") if "=" in item]
        environment |= dict(pairs)
    assert password in environment["DIGENRL_NATS_URL"]

    async def publish() -> None:
        client = await nats.connect(environment["DIGENRL_NATS_URL"])
        stream = client.jetstream()
        for subject in (
            "dg.small.task.5.0.0.0",
            "dg.small.traj.4.1.2.0",
            "dg.small.rew.5.2.0.0",
            "dg.small.train.4.0.0",
            "dg.small.evt.policy_published",
        ):
            await stream.publish(subject, b"\xc1 this is no message")
        await client.close()

    asyncio.run(publish())


def test_an_operator_pauses_resumes_and_stops_a_run_over_http(start_run: StartRun) -> None:
    run = start_run("--steps", "40")
    run.wait_for(lambda view: view["step"] >= 1)
    assert run.post("/v1/run/pause").status_code == 202
    paused = run.wait_for(lambda view: view["phase"] == "paused")
    time.sleep(2)
    assert run.get("/v1/run")["step"] <= paused["step"] + 1
    assert {worker["service"] for worker in run.get("/v1/workers")} == {
        "rollout", "reward", "trainer",
    }  # fmt: skip
    assert run.get("/v1/batches")[0]["status"] == "in_flight"
    assert run.get("/v1/batches/0")["status"] == "committed"
    assert run.get("/v1/versions")[-1]["version"] == 0
    metrics = httpx.get(f"{run.url}/metrics").text
    assert "digenrl_onpolicy_ratio_error" in metrics
    assert httpx.get(f"{run.url}/readyz").status_code == 200

    run.post("/v1/run/resume")
    run.wait_for(lambda view: view["step"] > paused["step"] + 1)
    run.post("/v1/run/stop")
    output, _ = run.process.communicate(timeout=60)
    assert run.process.returncode == 0
    assert "stopped as asked" in output


def test_ctrl_c_drains_and_leaves_no_process_behind(start_run: StartRun) -> None:
    run = start_run("--steps", "40")
    run.wait_for(lambda view: view["step"] >= 1)
    children = run.children()
    assert len(children) == 8  # three brokers, five services
    run.process.send_signal(signal.SIGINT)
    output, _ = run.process.communicate(timeout=60)
    assert run.process.returncode == 130
    assert "nothing is lost" in output
    assert not [pid for pid in children if os.path.exists(f"/proc/{pid}")]  # noqa: PTH110

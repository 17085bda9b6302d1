"""What is computed of a run, for all that show it."""

import pytest

from digenrl.reading.reading import SlowWorker, device_times, health, read, slow_worker
from services.scheduler.shell.api_load import SlowestView
from shared.run.usage import BatchUsage
from tests.readings import facts, load, run, step, worker


def usage(batch: int, **seconds: float) -> BatchUsage:
    found = {"batch": batch, "seconds": 5.0, "devices": {"trainer-0": seconds}}
    return BatchUsage.model_validate(found)


def test_a_reading_has_what_was_measured_and_what_it_means() -> None:
    steps = [step(0, 0), step(1, 1, reward_mean=0.5, kl=0.1)]
    batches = [usage(batch, training=1.0, waiting_for_rollout=3.0) for batch in range(2)]
    found = read(facts(run(step=1), steps=steps, usage=batches, load=load(), workers=[worker()]))
    assert (found.step, found.status, found.seconds_per_step) == (1, "running", 5.0)
    assert found.metrics == {"reward_mean": 0.5, "kl": 0.1} and found.utilisation == 0.25
    assert "75%, they wait for generation" in found.bottleneck
    assert found.alarms == [line for line in found.alarms if "at rollout-0 for 61 s" in line]
    assert found.lines()[0] == "test: running; step 1 of 30, reward 0.500, 1 min 23 s left"
    assert "waiting: 96 generation, 8 in hand, 0 scoring, 8 training" in found.lines()
    assert found.health in found.lines()
    assert found.slowest is not None and not found.slowest.is_far_slower, "it has no equals"


def test_a_run_that_has_failed_is_told_why_and_not_what_devices_waited_for() -> None:
    failed = facts(run(phase="failed", failure="the disk is full"), usage=[usage(0, training=1.0)])
    assert read(failed).bottleneck == "" and "the disk is full" in read(failed).alarms[0]


def test_members_exchange_gradients() -> None:
    found = device_times([usage(0, training=3.0, committing=1.0), usage(1, committing=2.0)])
    assert found["trainer-0"].exchange_seconds == 1.5
    assert found["trainer-0"].shares == {"training": 0.5, "committing": 0.5}


def slowest(waits: str, *seconds: float, device: str = "cpu") -> SlowWorker | None:
    """Return what is shown of the first of these workers."""
    workers = [
        worker(worker=str(at), device=device if at else "cpu", seconds_per_sample=each)
        for at, each in enumerate((*seconds, None))
    ]
    known = SlowestView(worker="0", seconds_per_sample=seconds[0], mean_seconds_per_sample=0.1)
    return slow_worker(known, workers, waits)


def test_a_worker_is_called_slow_only_if_it_holds_up_others_or_is_unlike_its_equals() -> None:
    assert slowest("waiting_for_reward", 0.3, 0.2) is None
    assert slow_worker(None, [], "tail") is None
    for waits in ("waiting_for_rollout", "tail"):
        found = slowest(waits, 0.3, 0.1)
        assert found is not None and not found.is_far_slower
        assert found.mean_seconds_per_sample == pytest.approx(0.2)
    found = slowest("waiting_for_reward", 0.9, 0.1, 0.1)
    assert found is not None and found.is_far_slower
    assert slowest("waiting_for_reward", 0.9, 0.1, 0.1, device="H100") is None, "by nature"


def test_the_lines_name_what_a_device_declines_with_the_reason() -> None:
    reason = "generates only: its sums would take 334 s at 10 Mbit/s"
    found = read(facts(workers=[worker(worker="trainer-8", declines=reason)]))
    assert found.lines()[-1] == f"trainer-8 {reason}"


def test_health_names_workers_with_a_fault_and_one_that_is_far_slower() -> None:
    assert health(run(), [], None) == ""
    known = SlowestView(worker="1", seconds_per_sample=0.9, mean_seconds_per_sample=0.1)
    workers = [
        worker(worker=str(at), seconds_per_sample=each) for at, each in enumerate((0.1, 0.9))
    ]
    assert health(run(), workers[:1], None) == (
        "1 worker reports without a fault; none is far slower than equal ones."
    )
    slow = slow_worker(known, [*workers, worker(worker="2", seconds_per_sample=0.1)], "tail")
    drained = worker(worker="2", drain="drained")
    assert health(run(missing_workers=["reward"]), [*workers, drained], slow) == (
        "3 workers report, and no worker of reward reports; 2 is drained: has no work, and gets "
        "none; 1 is far slower than equal ones, with 0.9 s per sample where the mean is 0.367: "
        "look at its host, or drain it."
    )

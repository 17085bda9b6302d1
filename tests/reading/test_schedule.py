"""How a run's devices were used: the summary of all batches."""

from digenrl.reading.schedule import summarise_schedule
from shared.run.commits import CommitRecord
from shared.run.usage import BatchUsage, TagUsage
from tests import examples


def record(version: int, generated_by: int) -> CommitRecord:
    group = examples.trained_group(version=generated_by)
    return examples.record(version, trained=(group,) if version else ())


def usage(batch: int, seconds: float) -> BatchUsage:
    tag = TagUsage(groups=1, samples_helped=2, reason="scan", predicted_gain=0.1, measured_gain=0.2)
    return BatchUsage(
        batch=batch,
        seconds=seconds,
        devices={
            "rollout-0": {"generating": 6.0, "tail": 2.0},
            "trainer-0": {"training": 3.0, "generating": 3.0, "waiting_for_rollout": 2.0},
            "reward-0": {"scoring": 1.0, "waiting_for_trainer": 7.0},
        },
        tag=tag,
    )


def test_shares_are_of_rollout_and_trainer_devices() -> None:
    chain = [record(0, 0), record(1, 0), record(2, 0)]
    summary = summarise_schedule(
        [each.staleness.items() for each in chain], [usage(0, 80.0), usage(1, 8.0)]
    )
    assert summary.utilisation == 0.75
    assert summary.bubbles == {"tail": 0.125, "waiting_for_rollout": 0.125}
    assert summary.utilisation_by_device["reward-0"] == 0.125
    assert summary.seconds_per_step == 8.0  # the first batch waits for devices to start
    assert summary.staleness == {0: 4, 1: 4}
    assert summary.samples_helped == 4
    assert [decision.batch for decision in summary.tag] == [0, 1]


def test_a_run_of_which_nothing_was_seen_has_no_shares() -> None:
    summary = summarise_schedule([record(1, 0).staleness.items()], [])
    assert summary.utilisation is None and summary.seconds_per_step is None
    assert summary.staleness == {0: 4}

"""The scheduler notes when devices change what they do."""

from services.scheduler.core.usage import UsageMeter
from shared.limits import MAX_CHANGES
from shared.run.usage import DeviceUse, Timeline


def test_changes_are_noted_once_and_an_absence_too() -> None:
    meter = UsageMeter()
    seen: list[dict[str, DeviceUse]] = [
        {},
        {"a": "generating"},
        {"a": "generating", "b": "training"},
        {"a": "tail"},
        {"a": "tail", "b": "training"},
    ]
    for second, uses in enumerate(seen):
        meter.advance(10.0 + second, uses)  # each has held for the second before
    assert meter.timeline(3) == Timeline(
        batch=3,
        seconds=4.0,
        devices={
            "a": ((0.0, "generating"), (2.0, "tail")),
            "b": ((1.0, "training"), (2.0, None), (3.0, "training")),
        },
    )


def test_the_next_batch_begins_where_the_last_one_ended() -> None:
    meter = UsageMeter()
    for now in (1.0, 2.0, 3.0):
        meter.advance(now, {"a": "generating"})
    assert meter.take() == {"a": {"generating": 2.0}}
    assert meter.timeline(1) == Timeline(batch=1, seconds=0.0, devices={})
    meter.advance(5.0, {"a": "generating"})
    found = meter.timeline(1)
    assert (found.seconds, found.devices["a"]) == (2.0, ((0.0, "generating"),))


def test_a_device_that_changes_all_the_time_fills_no_memory() -> None:
    meter = UsageMeter()
    uses: tuple[DeviceUse, DeviceUse] = ("generating", "tail")
    for second in range(3 * MAX_CHANGES):
        meter.advance(float(second), {"a": uses[second % 2]})
    assert len(meter.timeline(0).devices["a"]) == MAX_CHANGES


def test_it_is_stored_small_and_a_damaged_one_is_no_timeline() -> None:
    changes = [(round(0.001 * each, 3), "scoring") for each in range(500)]
    devices = {f"rollout-{n}": changes for n in range(64)}
    timeline = Timeline.model_validate({"batch": 1, "seconds": 1.0, "devices": devices})
    stored = timeline.encode()
    assert Timeline.decode(stored) == timeline
    assert len(stored) < len(timeline.model_dump_json()) / 20
    for damaged in (b"", stored[:-20], b"x" + stored, stored[:40] + b"\0" * 40 + stored[80:]):
        assert Timeline.decode(damaged) is None

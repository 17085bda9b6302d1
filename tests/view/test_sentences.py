"""What the page says in words."""

import re
import time

import pytest

from digenrl.report.summary import summarise_schedule
from digenrl.view.sentences import REMEDIES, alarms, bottleneck, status, throughput
from services.scheduler.core.usage import BUSY, BatchUsage, Use
from shared.run.chain import Step
from tests import examples

RUN: dict[str, object] = {
    "phase": "running", "waiting_for": "nothing", "missing_workers": [], "failure": None,
    "num_dead_letters": 0, "run": "test",
}  # fmt: skip


def sentence(**seconds: float) -> str:
    usage = {"batch": 0, "seconds": 1.0, "devices": {"trainer-0": seconds}}
    return bottleneck(summarise_schedule([], [BatchUsage.model_validate(usage)]))


@pytest.mark.parametrize("use", sorted(set(Use.__args__) - BUSY))  # type: ignore[attr-defined]
def test_for_whatever_devices_wait_there_is_a_remedy(use: str) -> None:
    what, remedy = REMEDIES[use]
    said = sentence(training=1.0, **{use: 2.0})
    assert "at work 33% of their time" in said and f"67%, they wait {what}" in said
    assert remedy in said


def test_no_setting_is_named_where_none_would_help() -> None:
    assert sentence(training=95.0, tail=5.0).endswith("at work 95% of their time.")
    assert "after the second batch" in bottleneck(summarise_schedule([], []))


@pytest.mark.parametrize(
    ("now", "forecast", "bound", "said"),
    [
        (None, 1.0, 2.0, r"\A\Z"),
        (9.0, None, None, "not learned yet"),
        (9.0, 10.0, 11.0, r"no schedule gets beyond about 11 on these devices\.\Z"),
        (5.0, 10.0, 11.0, "slower than its schedule explains"),
        (10.0, 10.0, 20.0, "leaves devices idle: another split"),
    ],
)
def test_throughput_is_compared_with_what_is_possible(
    now: float | None, forecast: float | None, bound: float | None, said: str
) -> None:
    load: dict[str, object] = {
        "samples_per_second": now, "forecast_samples_per_second": forecast,
        "bound_samples_per_second": bound, "queues": [],
    }  # fmt: skip
    assert re.search(said, throughput(load))


@pytest.mark.parametrize(
    ("run", "version", "said"),
    [
        (None, -1, "not begun"),
        (None, 30, "finished"),
        (None, 7, "not running; stopped after step 7"),
        (RUN, 7, "running"),
        (RUN | {"waiting_for": "reward"}, 7, "running, waits for reward"),
        (RUN | {"phase": "paused"}, 7, "paused"),
        (RUN | {"phase": "waiting", "missing_workers": ["trainer"]}, 0,
         "waiting for a worker of: trainer"),
    ],
)  # fmt: skip
def test_the_state_of_a_run_in_words(
    run: dict[str, object] | None, version: int, said: str
) -> None:
    assert status(run, version, 30) == said


def test_whoever_has_drained_everything_is_told_what_stands_still() -> None:
    drained = {"service": "rollout", "drain": "drained"}
    [line] = alarms(RUN, (), (), [drained, {"service": "trainer", "drain": "no"}])
    assert "every rollout worker is drained" in line and "--undrain" in line
    assert alarms(RUN, (), (), [drained, drained | {"drain": "no"}]) == []


def test_steps_that_change_nothing_are_an_alarm() -> None:
    steps = [step(version, version) for version in range(8)]
    assert alarms(RUN, steps, ()) == []
    [line] = alarms(RUN, [*steps[:3], *(step(version, 2) for version in range(3, 8))], ())
    assert "have not changed since version 2" in line and "trainer.decay_steps" in line


def step(version: int, weights: int) -> Step:
    policy = examples.policy(weights).model_copy(update={"version": version})
    return Step(run="test", policy=policy, digest="0" * 64, weights=examples.ref("weights"))


def test_dead_letters_are_an_alarm_while_they_come_with_what_they_cost() -> None:
    run = RUN | {"num_dead_letters": 9}
    now = time.time()
    late = [(now - 5, "no table of sevens"), (now - 9, "no table of sevens"), (now - 7, "other")]
    [line] = alarms(run, (), (), (), [*late, (now - 3600, "old")])
    assert line.startswith("9 dead letters are open") and "3 came in the last 10 minutes" in line
    assert "the last one 5 s ago" in line
    assert "2 of them for: no table of sevens. What fails is done up to three times" in line
    assert alarms(run, (), (), (), [(now - 3600, "old")]) == []
    [line] = alarms(run, (), ())  # when they came is not known
    assert line == "9 dead letters are open: `digenrl dlq list test` has why"


def test_a_failure_is_the_first_alarm() -> None:
    failed = RUN | {"failure": "the ratio is 3", "num_dead_letters": 1}
    lines = alarms(failed, (), ["gold fell"])
    assert lines[0] == "the run has failed: the ratio is 3" and len(lines) == 3
    assert alarms(RUN, (), ()) == []

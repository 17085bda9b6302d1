"""What the page says in words."""

import re
import time
from typing import Any

import pytest

from digenrl.reading.schedule import summarise_schedule
from digenrl.reading.sentences import (
    NO_SCHEDULE,
    REMEDIES,
    alarms,
    bottleneck,
    frozen,
    is_failing,
    main_wait,
    settings_of,
    slow_scorer,
    status,
    throughput,
)
from digenrl.reading.wording import cause, crew, figure, time_left
from digenrl.view.markup import linked
from shared.recipe.recipe import load_recipe, override
from shared.run.chain import CommitSummary
from shared.run.usage import BUSY_USES, BatchUsage, DeviceUse
from tests import examples
from tests.paths import DIGITS

RUN: dict[str, object] = {
    "phase": "running", "waiting_for": "nothing", "missing_workers": [], "failure": None,
    "num_dead_letters": 0, "pause_at_failure": False, "alarms": [], "run": "test",
}  # fmt: skip


def sentence(settings: set[str] | None = None, **seconds: float) -> str:
    usage = {"batch": 0, "seconds": 1.0, "devices": {"trainer-0": seconds}}
    schedule = summarise_schedule([], [BatchUsage.model_validate(usage)])
    return bottleneck(schedule, "test", settings)


def settings(changes: dict[str, Any] | None = None, tag: str = "off") -> set[str]:
    recipe = override(load_recipe(DIGITS), changes or {})
    stale = recipe.schedule.max_staleness
    found = settings_of({**RUN, "max_staleness": stale}, recipe, tag)
    assert found is not None
    return found


@pytest.mark.parametrize("use", sorted(set(DeviceUse.__args__) - BUSY_USES))  # type: ignore[attr-defined]
def test_for_whatever_devices_wait_there_is_a_remedy_while_it_goes_on(use: str) -> None:
    what, remedies = REMEDIES[use]
    said = sentence(settings(), training=1.0, **{use: 2.0})
    assert "at work 33% of their time" in said and f"67%, they wait {what}" in said
    assert all(each.format(run="test") in said for each in remedies)
    over = sentence(None, training=1.0, **{use: 2.0})
    assert over.endswith(f"they wait {what}."), "nothing can be changed any more"


def test_nothing_is_advised_that_a_run_has_already() -> None:
    assert "digenrl tag test auto" in sentence(settings(), waiting_for_rollout=2.0)
    assert "tag" not in sentence(settings(tag="auto"), waiting_for_rollout=2.0)
    fluid = {"schedule.mode": "fluid", "rollout.workers": 0}
    assert "tag" not in sentence(settings(fluid), waiting_for_rollout=2.0)
    automatic = {"schedule.fragment_size": "auto"}
    assert "fragment_size" not in sentence(settings(automatic), tail=2.0)
    stale = settings({"schedule.max_staleness": 1})
    assert "max_staleness" not in sentence(stale, waiting_for_trainer=2.0)
    assert settings_of({**RUN, "phase": "finished", "max_staleness": 0}, None, "off") is None


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
        (10.0, 10.0, 20.0, "leaves devices idle: in another run, another split"),
    ],
)
def test_throughput_is_compared_with_what_is_possible(
    now: float | None, forecast: float | None, bound: float | None, said: str
) -> None:
    assert re.search(said, throughput(load_of(now, forecast, bound)))


def load_of(now: float | None, forecast: float | None, bound: float | None) -> dict[str, object]:
    return {
        "samples_per_second": now, "forecast_samples_per_second": forecast,
        "bound_samples_per_second": bound, "queues": [],
    }  # fmt: skip


@pytest.mark.parametrize("use", sorted(NO_SCHEDULE))
@pytest.mark.parametrize("load", [load_of(17.4, 63.8, 844), load_of(60.0, 63.8, 844)])
def test_what_no_schedule_changes_is_not_blamed_on_the_schedule_or_a_worker(
    use: str, load: dict[str, object]
) -> None:
    said = throughput(load, use)
    assert said.endswith(f"on these devices. {NO_SCHEDULE[use]}")
    assert "split" not in said and "digenrl workers" not in said
    assert "see to" not in throughput(load_of(60.0, 63.8, 70.0), use), "all is well"


def test_for_what_devices_wait_is_known_unless_they_are_at_work() -> None:
    def wait(**seconds: float) -> str:
        usage = {"batch": 0, "seconds": 1.0, "devices": {"trainer-0": seconds}}
        return main_wait(summarise_schedule([], [BatchUsage.model_validate(usage)]))

    assert wait(training=1.0, tail=1.0, waiting_for_reward=2.0) == "waiting_for_reward"
    assert wait(training=95.0, waiting_for_reward=5.0) == ""
    assert main_wait(summarise_schedule([], [])) == ""


def test_commands_in_sentences_name_the_run_and_lead_to_its_pages() -> None:
    said = throughput(load_of(5.0, 10.0, 11.0), run="study")
    assert "`digenrl workers study`" in said and "`digenrl logs study`" in said
    shown = str(linked(f"<{said}"))
    assert shown.startswith("&lt;5 samples") and '<a href="/workers">the page of workers' in shown
    assert "<code>digenrl logs study</code>" in shown and "`" not in shown


def test_numbers_have_three_digits_and_no_exponent() -> None:
    said = throughput(load_of(1213.4, 1234.0, 1107.0))
    assert said.startswith("1,210 samples") and "about 1,110 on" in said
    assert [figure(each) for each in (0.0, 8.0, 0.00533, 2.5e-7, 9999.0)] == [
        "0", "8", "0.00533", "0.00000025", "10,000",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (47437, "about 13 h"),
        (35900, "about 10 h"),
        (4700, "about 1 h 15 min"),
        (3600, "about 1 h"),
        (75.2, "1 min 15 s"),
    ],
)
def test_time_left_is_told_no_more_exactly_than_it_is_known(seconds: float, said: str) -> None:
    assert time_left(seconds) == said


def test_drained_workers_are_counted_beside_the_others() -> None:
    found = [("rollout", "no"), ("rollout", "drained"), ("rollout", "draining"), ("reward", "no")]
    workers = [{"service": service, "drain": drain} for service, drain in found]
    assert crew(workers) == "3 rollout (1 drained, 1 draining), 1 reward"


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
    drained = {"service": "rollout", "drain": "drained", "host": "node7"}
    [line] = alarms(RUN, (), (), [drained, {"service": "trainer", "drain": "no"}])
    assert "every rollout worker is drained" in line
    assert "`digenrl workers test --host node7 --undrain` gives them work again" in line
    assert alarms(RUN, (), (), [drained, drained | {"drain": "no"}]) == []


def test_steps_that_change_nothing_are_an_alarm() -> None:
    steps = [step(version, version) for version in range(8)]
    assert alarms(RUN, steps, ()) == []
    [line] = alarms(RUN, [*steps[:3], *(step(version, 2) for version in range(3, 8))], ())
    assert "have not changed since version 2" in line and "no gradient is finite" in line
    still = [*steps[:3], *(step(version, 2) for version in range(3, 8))]
    [line] = alarms(RUN, still, (), decay_steps=2)
    assert line.startswith("the learning rate is 0 since step 2 (trainer.decay_steps)")
    [line] = alarms(RUN, still, (), decay_steps=9)
    assert "have not changed" in line


def test_steps_that_were_not_taken_are_an_alarm_while_they_are_new() -> None:
    steps = [step(version, version) for version in range(30)]
    lost = [each.model_copy(update={"metrics": {"skipped_not_finite": 1.0}}) for each in steps]
    [line] = alarms(RUN, [*steps[:25], lost[25], *steps[26:]], ())
    assert line.startswith("step 25 was not taken, since the gradient was not finite")
    [line] = alarms(RUN, [*steps[:25], *lost[25:28], *steps[28:]], ())
    assert line.startswith("3 of 20 steps were not taken") and "(the newest: 27)" in line
    assert alarms(RUN, [*steps[:5], lost[5], *steps[6:]], ()) == []


def step(version: int, weights: int) -> CommitSummary:
    policy = examples.policy(weights).model_copy(update={"version": version})
    return CommitSummary(
        run="test", policy=policy, digest="0" * 64, weights=examples.ref("weights")
    )


def test_dead_letters_are_an_alarm_while_they_come_with_what_they_cost() -> None:
    run = RUN | {"num_dead_letters": 9}
    now = time.time()
    late = [(now - 5, "no table of sevens"), (now - 9, "no table of sevens"), (now - 7, "other")]
    [line] = alarms(run, (), (), (), [*late, (now - 3600, "old")])
    assert line.startswith(
        "3 dead letters, one for each attempt that fails, in the last 2 minutes, the last one "
        "5 s ago, 2 of them for: no table of sevens. What fails"
    )
    [line] = alarms(RUN, (), (), (), late[:2])
    assert "5 s ago, for: no table of sevens. What fails" in line
    assert is_failing(run | {"phase": "running"}, late) and not is_failing(run, None)
    assert not is_failing(run | {"phase": "paused"}, late)
    assert alarms(run, (), (), (), [(now - 3600, "old")]) == []
    [line] = alarms(run, (), ())  # when they came is not known
    assert line == "dead letters: 9 are open; `digenrl dlq list test` has why"


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("reward: mine: ValueError: no sevens (a.py, line 7)",
         "in scorer mine: ValueError: no sevens (a.py, line 7)"),
        ("mine: ValueError: no sevens", "in scorer mine: ValueError: no sevens"),
        ("reward: the image has no pixels", "reward: the image has no pixels"),
        ("rollout: OutOfMemoryError: 2 GB", "rollout: OutOfMemoryError: 2 GB"),
        ("ValueError: HTTP: 500", "ValueError: HTTP: 500"),
    ],
)  # fmt: skip
def test_a_reason_names_the_scorer_and_nothing_else_is_one(reason: str, said: str) -> None:
    assert cause(reason) == said


def test_a_fragment_that_failed_and_its_samples_have_one_reason() -> None:
    now = time.time()
    late = [(now, "reward: mine: ValueError: no"), (now, "x"), (now, "mine: ValueError: no")]
    [line] = alarms(RUN | {"num_dead_letters": 3}, (), (), (), late)
    assert "2 of them in scorer mine: ValueError: no. What" in line


def test_a_failure_is_the_first_alarm() -> None:
    failed = RUN | {"failure": "the ratio is 3", "num_dead_letters": 1}
    lines = alarms(failed, (), ["gold fell"])
    assert lines[0] == "the run has failed: the ratio is 3" and len(lines) == 3
    assert alarms(RUN, (), ()) == []


def test_where_rewards_are_waited_for_reward_workers_say_which_scorer_is_slow() -> None:
    said = "of a sample, mine takes 75.0 ms, proxy 0.5 ms"
    workers = [{"service": "rollout", "note": "x"}, {"service": "reward", "note": said}]
    assert slow_scorer("waiting_for_reward", workers) == f"Scoring: {said}."
    assert slow_scorer("tail", workers) == ""
    assert slow_scorer("waiting_for_reward", workers[:1]) == ""


def test_of_a_paused_run_the_alarm_says_what_to_do_and_not_to_pause_it() -> None:
    late = [(time.time(), "no memory")]
    [line] = alarms(RUN | {"num_dead_letters": 1, "phase": "paused"}, (), (), (), late)
    assert line.endswith("mend it, then retry: `digenrl dlq retry test --all --resume`")
    assert " pause " not in line
    [line] = alarms(RUN | {"phase": "paused"}, (), (), (), late)
    assert line.endswith("The run is paused, and nothing of its batch has failed")
    [line] = alarms(RUN | {"num_dead_letters": 1}, (), (), (), late)
    assert line.endswith("with time for a mend: `digenrl pause test --at-failure`")
    slow = RUN | {"seconds_per_step": 600.0}
    before = [(time.time() - 300, "no memory")]
    assert alarms(slow, (), (), (), before) and alarms(RUN, (), (), (), before) == []
    asked = RUN | {"pause_at_failure": True}
    [line] = alarms(asked, (), (), (), late)
    assert line.endswith("The run will be paused as soon as an attempt fails")
    assert status(asked | {"phase": "running"}, 3, 9).endswith("; pauses at the next failure")


def test_of_versions_that_are_all_the_same_it_is_not_said_that_the_first_was_the_change() -> None:
    versions = [(number, "a" * 64) for number in range(50)]
    assert "since version 0:" in frozen(versions)[0]
    assert "since version 10 or an earlier one:" in frozen(versions[10:])[0]
    assert "since version 10:" in frozen([(9, "b" * 64), *versions[10:]])[0]

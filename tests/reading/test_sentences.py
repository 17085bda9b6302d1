"""What a reading of a run says in words."""

import re
from typing import Any

import pytest

from digenrl.reading.alarms import alarms, is_failing
from digenrl.reading.schedule import summarise_schedule
from digenrl.reading.sentences import (
    NO_SCHEDULE,
    REMEDIES,
    active_settings,
    bottleneck,
    main_wait,
    slow_scorer,
    status,
    throughput,
)
from digenrl.reading.wording import figure, time_left, worker_counts
from digenrl.view.markup import linked
from services.scheduler.shell.api_load import LoadView
from services.scheduler.shell.api_models import RunView
from shared.recipe.recipe import load_recipe, override
from shared.run.usage import BUSY_USES, BatchUsage, DeviceUse
from tests.paths import DIGITS
from tests.readings import facts, letter, load, run, step, worker


def sentence(settings: set[str] | None = None, **seconds: float) -> str:
    usage = {"batch": 0, "seconds": 1.0, "devices": {"trainer-0": seconds}}
    schedule = summarise_schedule([], [BatchUsage.model_validate(usage)])
    return bottleneck(schedule, "test", settings)


def settings(changes: dict[str, Any] | None = None, tag: str = "off") -> set[str]:
    recipe = override(load_recipe(DIGITS), changes or {})
    stale = recipe.schedule.max_staleness
    found = active_settings(run(max_staleness=stale), recipe, tag)  # type: ignore[arg-type]
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
    assert active_settings(run(phase="finished"), None, "off") is None


def test_no_setting_is_named_where_none_would_help() -> None:
    assert sentence(training=95.0, tail=5.0).endswith("at work 95% of their time.")
    assert "after a batch that was measured" in bottleneck(summarise_schedule([], []))


@pytest.mark.parametrize(
    ("now", "forecast", "bound", "said"),
    [
        (None, 1.0, 2.0, r"\A\Z"),
        (9.0, None, None, "not learned yet"),
        (12.0, 10.0, 11.0, r"forecast is 10\.\Z"),
        (9.0, 10.0, 11.0, r"no schedule gets beyond about 11 on these devices\.\Z"),
        (5.0, 10.0, 11.0, "slower than its schedule explains"),
        (10.0, 10.0, 20.0, "leaves devices idle: in another run, another split"),
    ],
)
def test_throughput_is_compared_with_what_is_possible(
    now: float | None, forecast: float | None, bound: float | None, said: str
) -> None:
    assert re.search(said, throughput(load_of(now, forecast, bound)))


def load_of(now: float | None, forecast: float | None, bound: float | None) -> LoadView:
    return load(
        samples_per_second=now, forecast_samples_per_second=forecast,
        bound_samples_per_second=bound, queues=[],
    )  # fmt: skip


@pytest.mark.parametrize("use", sorted(NO_SCHEDULE))
@pytest.mark.parametrize("known", [load_of(17.4, 63.8, 844), load_of(60.0, 63.8, 844)])
def test_what_no_schedule_changes_is_not_blamed_on_the_schedule_or_a_worker(
    use: str, known: LoadView
) -> None:
    said = throughput(known, use)
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
    assert '<a href="/logs">the page of logs</a>' in shown and "`" not in shown


def test_numbers_have_three_digits_and_no_exponent() -> None:
    said = throughput(load_of(1213.4, 1234.0, 1307.0))
    assert said.startswith("1,210 samples") and "about 1,310 on" in said
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
    workers = [worker(service=service, drain=drain) for service, drain in found]
    assert worker_counts(workers) == "3 rollout (1 drained, 1 draining), 1 reward"


@pytest.mark.parametrize(
    ("now", "is_live", "said"),
    [
        (run(phase="stopped", policy_version=None), False, "not begun"),
        (run(phase="finished"), False, "finished"),
        (run(phase="failed"), False, "failed"),
        (run(phase="stopped", step=7), False, "not running; stopped after step 7"),
        (run(), True, "running"),
        (run(waiting_for="reward"), True, "running, waits for scores"),
        (run(phase="paused"), True, "paused"),
        (run(pause_at_failure=True), True, "running; pauses at the next failure"),
        (run(phase="waiting", missing_workers=["trainer"]), True,
         "waiting for a worker of: trainer"),
    ],
)  # fmt: skip
def test_the_state_of_a_run_in_words(now: RunView, is_live: bool, said: str) -> None:
    assert status(now, is_live=is_live) == said


def test_whoever_has_drained_everything_is_told_what_stands_still() -> None:
    drained, trainer = worker(drain="drained"), worker(service="trainer")
    [line] = alarms(facts(workers=[drained, trainer]))
    assert "every rollout worker is drained" in line
    assert "`digenrl workers test --host node7 --undrain` gives them work again" in line
    assert alarms(facts(workers=[drained, worker()])) == []


def test_steps_that_change_nothing_are_an_alarm() -> None:
    assert alarms(facts(steps=[step(version, version) for version in range(8)])) == []
    still = [step(version, min(version, 2)) for version in range(8)]
    [line] = alarms(facts(steps=still))
    assert "have not changed since version 2:" in line and "no gradient is finite" in line
    recipe = load_recipe(DIGITS)
    decayed = facts(steps=still, recipe=override(recipe, {"trainer.decay_steps": 2}))
    [line] = alarms(decayed)
    assert line.startswith("the learning rate is 0 since step 2 (trainer.decay_steps)")
    [line] = alarms(facts(steps=still, recipe=override(recipe, {"trainer.decay_steps": 9})))
    assert "have not changed" in line


def test_of_versions_that_are_all_the_same_it_is_not_said_that_the_first_was_the_change() -> None:
    same = [step(version, 0) for version in range(50)]
    assert "since version 0:" in alarms(facts(steps=same))[0]
    assert "since version 10 or an earlier one:" in alarms(facts(steps=same[10:]))[0]
    assert "since version 10:" in alarms(facts(steps=[step(9, 1), *same[10:]]))[0]


def test_steps_that_were_not_taken_are_an_alarm_while_they_are_new() -> None:
    steps = [step(version, version) for version in range(30)]
    skipped = [step(version, version, skipped_not_finite=1.0) for version in range(30)]
    [line] = alarms(facts(steps=[*steps[:25], skipped[25], *steps[26:]]))
    assert line.startswith("step 25 was not taken, since the gradient was not finite")
    [line] = alarms(facts(steps=[*steps[:25], *skipped[25:28], *steps[28:]]))
    assert line.startswith("3 of 20 steps were not taken") and "(the newest: 27)" in line
    assert alarms(facts(steps=[*steps[:5], skipped[5], *steps[6:]])) == []


def test_dead_letters_are_an_alarm_while_they_come() -> None:
    late = [letter("no table of sevens", 5), letter("no table of sevens", 9), letter("other", 7)]
    [line] = alarms(facts(letters=[*late, letter("old", 3600)]))
    assert line.startswith(
        "3 dead letters in the last 1 min 0 s, 2 of them: no table of sevens; to fix the cause and "
        "retry: `digenrl pause test --at-failure`"
    )
    assert is_failing(facts(letters=late)) and not is_failing(facts())
    assert not is_failing(facts(run(phase="paused"), letters=late))
    assert alarms(facts(letters=[letter("old", 3600)])) == []
    [line] = alarms(facts(run(num_dead_letters=9)))  # when they came is not known
    assert line == "dead letters: 9 are open; `digenrl dlq list test` has why"


def test_a_failure_is_the_first_alarm() -> None:
    failed = facts(run(failure="the ratio is 3", num_dead_letters=1, alarms=["trained nothing"]))
    lines = alarms(failed)
    see = "see `digenrl logs test --level error`"
    assert lines[0] == f"the run has failed: the ratio is 3; {see}" and len(lines) == 3
    assert alarms(facts()) == []
    scored = facts(
        run(failure="no sample"), is_live=False,
        letters=[letter("other", 0), *[letter("reward: mine: KeyError: 1", 1)] * 2],
    )  # fmt: skip
    assert alarms(scored) == [
        f"the run has failed: no sample, because of reward: mine: KeyError: 1; {see}"
    ]


def test_where_rewards_are_waited_for_reward_workers_say_which_scorer_is_slow() -> None:
    said = "of a sample, mine takes 75.0 ms, proxy 0.5 ms"
    workers = [worker(note="x"), worker(service="reward", note=said)]
    assert slow_scorer("waiting_for_reward", workers) == f"Scoring: {said}."
    assert slow_scorer("tail", workers) == ""
    assert slow_scorer("waiting_for_reward", workers[:1]) == ""


def test_of_a_paused_run_the_alarm_says_what_to_do_and_not_to_pause_it() -> None:
    late = [letter("no memory", 0)]
    [line] = alarms(facts(run(phase="paused"), letters=late))
    assert line.endswith("fix the cause, then retry: `digenrl dlq retry test --all --resume`")
    assert " pause " not in line
    before = [letter("no memory", 300)]
    assert alarms(facts(run(seconds_per_step=600.0), letters=before))
    assert alarms(facts(letters=before)) == []
    [line] = alarms(facts(run(pause_at_failure=True), letters=late))
    assert line.endswith("the run will be paused as soon as an attempt fails")

"""Single decisions; `test_regret.py` has whole runs."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from services.scheduler.core.tag.controller import (
    MAX_DEBT,
    PROBE_EVERY,
    WARM_UP,
    Controller,
    TagDecision,
    decide,
    observe,
)
from services.scheduler.core.tag.estimates import Estimate
from services.scheduler.core.tag.makespan import TagInputs, best_groups, makespan
from tests.scheduler.core.tag.loop import REGIMES

SHORT = REGIMES["generator-short"]
BALANCED = REGIMES["balanced"]
STARVED = REGIMES["trainer-starved"]


def played(
    controller: Controller, tag_inputs: TagInputs, batches: int, *, hidden: float = 1.0
) -> tuple[Controller, list[TagDecision]]:
    """Batches that take what the model says; with help, ``hidden`` times as long."""
    decisions = []
    for _ in range(batches):
        controller, decision = decide(controller, tag_inputs)
        decisions.append(decision)
        factor = hidden if decision.groups else 1
        seconds = makespan(tag_inputs, decision.groups) * factor
        controller = observe(controller, tag_inputs, decision.groups, seconds)
    return controller, decisions


def test_a_run_starts_without_help_then_tries_one_group_then_follows_the_scan() -> None:
    _, decisions = played(Controller(), SHORT, WARM_UP + 3)
    assert [d.reason for d in decisions] == ["warm-up"] * WARM_UP + ["probe", "scan", "scan"]
    assert [d.groups for d in decisions] == [0] * WARM_UP + [1] + [best_groups(SHORT)] * 2


def test_a_decision_says_what_it_expects() -> None:
    _, decisions = played(Controller(), SHORT, WARM_UP + 2)
    last = decisions[-1]
    assert last.predicted_seconds == pytest.approx(makespan(SHORT, best_groups(SHORT)))
    assert last.predicted_seconds_off == pytest.approx(makespan(SHORT, 0))
    assert last.predicted_gain == pytest.approx(161.5 / 121 - 1)


def test_predictions_are_corrected_by_what_batches_took() -> None:
    controller = Controller()
    for _ in range(30):
        controller, decision = decide(controller, SHORT)
        seconds = 1.3 * makespan(SHORT, decision.groups)
        controller = observe(controller, SHORT, decision.groups, seconds)
    _, decision = decide(controller, SHORT)
    assert decision.predicted_seconds == pytest.approx(1.3 * 121, rel=0.01)
    assert decision.predicted_gain == pytest.approx(161.5 / 121 - 1, rel=0.01)


@pytest.mark.parametrize(("mode", "groups"), [("off", 0), ("fixed", 3)])
def test_an_operator_s_choice_is_followed(mode: str, groups: int) -> None:
    controller = Controller(mode="off") if mode == "off" else Controller(mode="fixed", groups=3)
    for tag_inputs in (SHORT, STARVED):
        controller, decision = decide(controller, tag_inputs)
        assert (decision.groups, decision.reason) == (groups, mode)
        controller = observe(controller, tag_inputs, decision.groups, 1e4)
    _, decision = decide(Controller(mode="fixed", groups=99), SHORT)
    assert decision.groups == SHORT.groups


def test_a_plan_is_kept_until_another_gains_more_than_noise() -> None:
    controller, _ = played(Controller(), BALANCED, 10)
    three = replace(controller, plan=3)  # two waves of help instead of one
    noisy = replace(three, off=replace(three.off, spread=0.1))
    for help, best_gains, of_noisy, of_calm in (
        (11.1, 0.009, "hysteresis: kept", "hysteresis: kept"),
        (11.5, 0.015, "gain below threshold", "scan"),
        (12.0, 0.023, "scan", "scan"),
    ):
        tag_inputs = replace(BALANCED, help=help)
        gain = makespan(tag_inputs, 3) / makespan(tag_inputs, 2) - 1
        assert gain == pytest.approx(best_gains, abs=5e-4)
        calm = replace(three, off=replace(three.off, spread=0.0), on=replace(three.on, spread=0.0))
        for known, reason in ((noisy, of_noisy), (calm, of_calm)):
            decision = decide(known, tag_inputs)[1]
            assert decision.reason == reason, help
            assert decision.groups == (2 if reason == "scan" else 3), help


def test_deciding_twice_counts_no_batch_twice() -> None:
    controller = Controller()
    for _ in range(3 * PROBE_EVERY):
        once, decision = decide(controller, STARVED)
        twice, again = decide(once, STARVED)
        assert (again, twice) == (decision, once)
        controller = observe(twice, STARVED, decision.groups, makespan(STARVED, decision.groups))


def test_help_that_is_off_is_probed_with_one_group_now_and_then() -> None:
    _, decisions = played(Controller(), STARVED, 1 + 4 * PROBE_EVERY)
    probes = [i for i, d in enumerate(decisions) if d.groups]
    assert [decisions[i].groups for i in probes] == [1] * len(probes)
    gaps = [after - before for before, after in pairwise(probes)]
    assert probes[0] == WARM_UP
    assert set(gaps) == {PROBE_EVERY + 1}


def test_the_dearer_a_probe_is_the_rarer() -> None:
    dear = replace(STARVED, switch=40.0)
    _, decisions = played(Controller(), dear, 400)
    probes = [i for i, d in enumerate(decisions) if d.groups]
    lost = len(probes) * (makespan(dear, 1) / makespan(dear, 0) - 1) / 400
    assert 2 <= len(probes) <= 6
    assert lost <= 0.005, f"{lost:.2%} spent on probes"


def test_a_probe_that_went_better_than_feared_is_repeated_until_it_is_believed() -> None:
    controller, _ = played(Controller(), replace(STARVED, switch=40.0), 10)
    feared = replace(STARVED, switch=40.0)
    controller = replace(controller, idle=100)
    for _ in range(3):
        controller, decision = decide(controller, feared)
        assert decision.reason == "probe"
        controller = observe(controller, STARVED, 1, makespan(STARVED, 1))
    controller, decision = decide(controller, STARVED)
    controller = observe(controller, STARVED, 1, makespan(STARVED, 1))
    assert decide(controller, STARVED)[1].groups == 0


def test_the_guard_turns_off_help_that_loses() -> None:
    controller, decisions = played(Controller(), BALANCED, 300, hidden=1.4)
    assert "guard: off is faster" in [d.reason for d in decisions]
    assert sum(d.groups > 0 for d in decisions) <= 12
    assert controller.plan == 0


def test_the_guard_asks_for_more_after_each_setback_in_a_row_and_forgives() -> None:
    learned, _ = played(Controller(), BALANCED, 10)

    def after_a_loss(controller: Controller) -> Controller:
        controller, decision = decide(controller, BALANCED)
        assert decision.groups
        return observe(controller, BALANCED, decision.groups, 1.3 * makespan(BALANCED, 0))

    first = after_a_loss(learned)
    assert first.debt == pytest.approx(0.3)
    second = after_a_loss(replace(learned, setbacks=first.setbacks))
    assert second.debt == pytest.approx(0.6)
    assert after_a_loss(replace(learned, setbacks=6)).debt == MAX_DEBT

    promised = makespan(BALANCED, 0) / makespan(BALANCED, 2) - 1
    _, decisions = played(replace(first, on=learned.on), BALANCED, 20)
    off = [d for d in decisions if d.reason == "guard: off is faster"]
    assert decisions[: len(off)] == off
    assert len(off) == math.ceil(0.3 / promised)
    assert [d.reason for d in decisions[len(off) :]][:2] == ["probe", "scan"]

    forgiven, _ = played(replace(first, on=learned.on), BALANCED, 30)
    assert forgiven.setbacks == 0


def test_help_that_is_known_to_take_longer_than_modelled_ends() -> None:
    learned, _ = played(Controller(), BALANCED, 10)
    assert learned.plan == 2
    worse = replace(learned, on=Estimate(value=1.3, count=20, spread=0.03))
    assert decide(worse, BALANCED)[1].groups == 0
    better = replace(learned, on=Estimate(value=1.05, count=20, spread=0.03))
    assert decide(better, BALANCED)[1].groups == 2


def test_two_slow_batches_at_the_start_are_no_evidence_for_help() -> None:
    controller = Controller()
    for _ in range(WARM_UP):
        controller, _ = decide(controller, BALANCED)
        controller = observe(controller, BALANCED, 0, 1.06 * makespan(BALANCED, 0))
    controller, _ = played(controller, BALANCED, 3)
    _, decision = decide(controller, BALANCED)
    modelled = makespan(BALANCED, 0) / makespan(BALANCED, 2) - 1
    assert decision.predicted_gain == pytest.approx(modelled, abs=0.005)


def test_losses_are_forgotten_with_the_plan_that_made_them() -> None:
    controller, _ = played(Controller(), BALANCED, 10)
    lost = observe(controller, BALANCED, 2, 1.2 * makespan(BALANCED, 0))
    assert lost.harm == pytest.approx(0.2)
    assert observe(lost, BALANCED, 0, makespan(BALANCED, 0)).harm == 0.0


def test_a_batch_that_was_slow_for_another_reason_is_not_held_against_help() -> None:
    controller, _ = played(Controller(), SHORT, 10)
    slow = replace(SHORT, rollout=tuple(3 * each for each in SHORT.rollout))
    controller, decision = decide(controller, SHORT)
    controller = observe(controller, slow, decision.groups, makespan(slow, decision.groups))
    assert decide(controller, SHORT)[1].groups == best_groups(SHORT)


def test_one_freak_batch_changes_neither_plan_nor_prediction_much() -> None:
    controller, _ = played(Controller(), REGIMES["generator-starved"], 20)
    tag_inputs = REGIMES["generator-starved"]
    before = decide(controller, tag_inputs)[1]
    assert before.predicted_seconds is not None
    controller = observe(controller, tag_inputs, before.groups, 1.8 * before.predicted_seconds)
    after = decide(controller, tag_inputs)[1]
    assert after.groups == before.groups
    assert after.predicted_seconds == pytest.approx(before.predicted_seconds, rel=0.01)


def test_without_rollout_the_trainer_generates_all_from_the_first_batch_on() -> None:
    alone = replace(SHORT, rollout=())
    controller, decisions = played(Controller(), alone, 3)
    assert [d.groups for d in decisions] == [alone.groups] * 3
    assert decisions[0].predicted_seconds_off is None
    assert decisions[0].predicted_gain is None
    assert math.isfinite(controller.gain)


def test_a_plan_ends_when_the_trainer_can_no_longer_generate() -> None:
    controller, _ = played(Controller(), SHORT, 10)
    _, decision = decide(controller, replace(SHORT, trainer_queues=0))
    assert decision.groups == 0


def test_a_batch_shorter_than_the_plan_is_planned() -> None:
    controller, _ = played(Controller(), SHORT, 10)
    _, decision = decide(controller, replace(SHORT, groups=2))
    assert 0 <= decision.groups <= 2


def test_a_batch_of_no_known_cost_teaches_nothing() -> None:
    unknown = replace(SHORT, rollout=(0.0,), train=0.0, ready=0.0, commit=0.0)
    assert observe(Controller(), unknown, 0, 12.0) == Controller()
    assert hash(Controller()) == hash(Controller(mode="auto"))

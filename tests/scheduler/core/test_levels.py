"""How far `auto` rounds: as little as the lines allow, and not back and forth."""

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.fluid.events import MemberReported
from services.scheduler.core.fluid.levels import (
    BYTES_SHARE,
    RETURN_MARGIN,
    chosen_level,
    least_rounding,
)
from services.scheduler.core.inputs import LinkMeasured
from shared.messages.fluid import ExchangeSums, TakeStep
from shared.messages.records import Level
from shared.messages.workers import Holds
from tests.scheduler.core.test_fluid import CHECKSUM, Run
from tests.scheduler.core.test_fluid_updates import take_step

LEVELS = list(BYTES_SHARE)
SIZE = 418 * 10**6
MBIT = 1e6 / 8
seconds = st.floats(0, 1e6)
levels = st.sampled_from(LEVELS)


@given(levels, seconds, seconds)
def test_a_transfer_is_hidden_unless_the_most_rounding_is_not_enough(
    current: Level, exact: float, hidden: float
) -> None:
    found = least_rounding(current, exact, hidden)
    assert exact * BYTES_SHARE[found] <= hidden or found == LEVELS[-1]
    for less in LEVELS[: LEVELS.index(found)]:
        is_less_than_now = LEVELS.index(less) < LEVELS.index(current)
        limit = hidden * (RETURN_MARGIN if is_less_than_now else 1.0)
        assert exact * BYTES_SHARE[less] > limit


@given(levels, st.floats(1, 1e6), st.floats(1, 1e6), st.floats(0.85, 1.17))
def test_rates_that_vary_a_little_do_not_change_the_level_back(
    current: Level, exact: float, hidden: float, factor: float
) -> None:
    first = least_rounding(current, exact, hidden)
    second = least_rounding(first, exact * factor, hidden)
    third = least_rounding(second, exact, hidden)
    assert not (second != first and third == first and LEVELS.index(second) > LEVELS.index(first))


def run_with(mbits: float | None, **schedule: object) -> Run:
    run = Run(members=2, **schedule)  # type: ignore[arg-type]
    for number, rate in enumerate((10_000.0, mbits)):
        address = f"trainer-{number}-a"
        holds = Holds(version=0, checksum=CHECKSUM, update=0, sum_bytes=SIZE)
        run.give(MemberReported(address, holds))
        if rate is not None:
            run.give(LinkMeasured(address, 1 / (rate * MBIT), 1 / (rate * MBIT)))
    return run


def chosen(run: Run, batch_s: float) -> Level:
    assert run.state.batch is not None
    now = run.state.batch.opened_at + batch_s
    return chosen_level(run.plan, run.state, now, "up", ["trainer-0-a", "trainer-1-a"])


def test_one_step_ahead_a_transfer_may_take_as_long_as_a_batch() -> None:
    found = [chosen(run_with(rate, up="auto", max_staleness=1), 60.0) for rate in (100, 30, 10)]
    assert found == ["exact", "int8", "int4"]


def test_on_policy_a_transfer_may_add_a_fiftieth_of_a_batch() -> None:
    rates = (10_000, 1000, 300)
    assert [chosen(run_with(r, up="auto"), 60.0) for r in rates] == ["exact", "int8", "int4"]


def test_a_line_that_was_never_measured_changes_no_level() -> None:
    run = run_with(None, up="auto", max_staleness=1)
    assert chosen_level(run.plan, run.state, 60.0, "up", ["trainer-1-a"]) == "exact"


def test_commands_name_the_level_of_the_recipe() -> None:
    run = run_with(10, up="int8", down="int4")
    run.generate()
    run.train()
    [command] = run.take(ExchangeSums)
    assert isinstance(command, ExchangeSums) and command.up == "int8"
    step = take_step(run, command)
    assert isinstance(step, TakeStep) and step.down == "int4"

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.runner.figures import RunRecord
from bench.runner.watch import Heard, Sample
from bench.two_devices.bound import Speed, fastest
from bench.two_devices.compare import RunFigures, figures_of, summarise
from bench.two_devices.intervals import Job, intervals_of, jobs_of
from bench.two_devices.modes import ONE_STEP, Mode
from bench.two_devices.run import ROLLOUT, TRAINER
from shared.messages.contracts import FragmentGenerated, Message, PolicyPublished
from shared.messages.fluid import Piece, PieceTrained
from shared.run.usage import BatchUsage, TagUsage
from tests.examples import generated as generated_from
from tests.examples import published, task

GROUP = 4


# --- what is heard of a run --------------------------------------------------------------------


def generated(worker: str, seconds: float, *, batch: int = 1, group: int = 0) -> FragmentGenerated:
    message = generated_from(task(batch=batch, group=group, num_samples=GROUP))
    return message.model_copy(update={"worker": f"{worker}-0a1b", "seconds": seconds})


def trained(seconds: float, *, batch: int = 1, group: int = 0) -> PieceTrained:
    piece = Piece(
        group=group, attempt=0, number=0, first_sample=0, num_samples=GROUP, first_step=0,
        num_steps=1,
    )  # fmt: skip
    return PieceTrained(
        batch=batch, attempt=0, update=0, piece=piece, sum_number=0, worker=f"{TRAINER}-0a1b",
        seconds=seconds, pass_rows=0,
    )  # fmt: skip


def announced(version: int, seconds: float = 0.0) -> PolicyPublished:
    changes = {"worker": f"{TRAINER}-0a1b", "seconds": seconds}
    return published(version).model_copy(update=changes)


def heard(*timed: tuple[float, Message]) -> tuple[Heard, ...]:
    return tuple(Heard(at, message) for at, message in timed)


RUN = heard(
    (0.0, announced(0)),
    (9.0, generated(ROLLOUT, 4.0, batch=0)),
    (10.0, announced(1)),
    (11.0, generated(ROLLOUT, 1.0)),
    (13.0, generated(TRAINER, 1.5)),
    (14.0, trained(2.0)),
    (14.5, trained(0.0, group=1)),
    (15.0, announced(2, seconds=0.25)),
    (18.0, announced(3)),
)


USAGE = tuple(
    BatchUsage(
        batch=batch,
        seconds=4.0,
        devices={TRAINER: {"training": 3.0, "waiting_for_rollout": 0.5, "tail": 0.5}},
        tag=TagUsage(
            groups=batch, samples_helped=0, reason="scan", predicted_gain=0.05, measured_gain=None
        ),
    )
    for batch in range(3)
)


def record() -> RunRecord:
    return RunRecord(
        commits=[0.0, 10.0, 15.0, 18.0],
        begin=Sample(1, 10.0, {TRAINER: 1.0, "nats": 0.0}),
        end=Sample(3, 18.0, {TRAINER: 4.0, "nats": 0.4}),
        usage=USAGE,
        intervals=intervals_of(jobs_of(RUN)),
    )


def test_a_run_is_measured_from_the_first_version_after_warm_up_to_the_last() -> None:
    found = figures_of(record(), 1, 3, group_size=GROUP)
    assert found.batches == [5.0, 3.0]
    assert found.step == 4.0
    assert found.cores == {TRAINER: 0.375, "nats": 0.05}
    assert found.held == pytest.approx(0.375 / ((1.5 + 2.0 + 0.25) / 8))
    assert found.speeds[ROLLOUT] == Speed(generate=1.0 / GROUP)
    assert found.speeds[TRAINER] == Speed(generate=1.5 / GROUP, train=2.0 / GROUP)
    assert found.generated_by_trainer == GROUP / 2
    assert found.busy[ROLLOUT]["generate"] == 1.0 / 8
    assert found.busy[TRAINER]["train"] == 2.0 / 8
    assert found.bubbles[TRAINER] == {"waiting_for_rollout": 1 / 8, "tail": 1 / 8}
    assert found.decisions[1] == "batch 1: at most 1 groups (scan, predicted to gain 5.0%)"


def test_what_a_device_did_too_seldom_says_nothing_of_its_speed() -> None:
    found = figures_of(record(), 1, 3, group_size=GROUP + 1)
    assert found.speeds[TRAINER] == Speed()


def test_a_generation_that_was_interrupted_is_drawn_around_the_training() -> None:
    generation = Job(device=TRAINER, use="generate", end=10.0, seconds=4.0, samples=GROUP)
    training = Job(device=TRAINER, use="train", end=8.0, seconds=3.0, samples=GROUP)
    drawn = [(i.use, i.begin, i.end) for i in intervals_of([generation, training])]
    assert drawn == [("generate", 3.0, 5.0), ("train", 5.0, 8.0), ("generate", 8.0, 10.0)]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([ROLLOUT, TRAINER]),
            st.sampled_from(["generate", "commit"]),
            st.floats(0, 20),
            st.floats(0.1, 5),
        ),
        max_size=12,
    )
)
def test_a_device_is_never_drawn_to_do_two_things_and_no_second_is_lost(
    rows: list[tuple[str, str, float, float]],
) -> None:
    jobs = [
        Job(device=device, use="generate" if use == "generate" else "commit",
            end=end, seconds=seconds)
        for device, use, end, seconds in rows
    ]  # fmt: skip
    intervals = intervals_of(jobs)
    for device in (ROLLOUT, TRAINER):
        mine = [interval for interval in intervals if interval.device == device]
        for before, after in itertools.pairwise(mine):
            assert before.end <= after.begin + 1e-9
        drawn = sum(interval.end - interval.begin for interval in mine)
        assert drawn == pytest.approx(sum(j.seconds for j in jobs if j.device == device))


# --- the comparison ----------------------------------------------------------------------------


def figures(*batches: float, speed: Speed | None = None) -> RunFigures:
    return RunFigures(
        batches=batches,
        speeds={ROLLOUT: speed or Speed(generate=0.3, train=0.2)}
        | {TRAINER: speed or Speed(generate=0.3, train=0.2)},
        busy={},
        bubbles={},
        cores={},
        held=1.0,
        generated_by_trainer=0.0,
        decisions=(),
        intervals=(),
        begin=0.0,
    )


def mode(name: str, *, baseline: bool = False, overlaps: bool = True) -> Mode:
    return Mode(name=name, changes={}, baseline=baseline, overlaps=overlaps)


def test_a_mode_counts_with_the_median_of_its_runs_means() -> None:
    first = (mode("sequential"), [figures(4.0), figures(6.0), figures(4.4)])
    ours = (mode(ONE_STEP), [figures(3.0, 5.0), figures(2.0, 2.0), figures(4.1)])
    result = summarise("equal", [first, ours], samples=12, slowdown=1.0)
    assert [row.seconds for row in result.rows] == [4.4, 4.0]
    assert result.rows[1].spread == (2.0, 4.1)
    assert result.bound == pytest.approx(3.0)
    assert result.rows[1].to_previous == pytest.approx(1.1)
    assert result.rows[1].to_alone is None
    assert result.rows[1].of_the_bound == pytest.approx(0.75)
    assert [target.reached for target in result.targets] == [False]


def test_beside_a_slowed_device_the_fast_one_alone_is_what_to_beat() -> None:
    alone = (mode("fast alone", baseline=True, overlaps=False), [figures(6.0)])
    ours = (mode(ONE_STEP), [figures(5.0)])
    result = summarise("slowed", [alone, ours], samples=12, slowdown=1.0)
    assert result.rows[1].to_alone == pytest.approx(1.2)
    assert [target.reached for target in result.targets] == [True]


def test_speeds_beside_an_idle_device_do_not_enter_the_bound() -> None:
    undisturbed = Speed(generate=0.1, train=0.1)
    alone = (mode("sequential", overlaps=False), [figures(9.0, speed=undisturbed)])
    result = summarise("equal", [alone, (mode(ONE_STEP), [figures(5.0)])], samples=12, slowdown=1.0)
    assert result.bound == pytest.approx(3.0)
    assert [target.reached for target in result.targets] == [False]


def test_the_bound_is_of_the_best_that_was_measured_of_each_device_and_task() -> None:
    first = {"a": Speed(generate=1.0, train=3.0), "b": Speed(generate=2.0)}
    second = {"a": Speed(generate=2.0, train=2.0)}
    found = fastest([first, second])
    assert found == {"a": Speed(generate=1.0, train=2.0), "b": Speed(generate=2.0)}
    assert found["b"].rates == (0.5, 0.0)

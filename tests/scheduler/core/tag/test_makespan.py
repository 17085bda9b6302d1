"""The model, and its optimum against searches that try everything."""

import random
import time
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.tag.makespan import TagInputs, best_groups, makespan

MAX_BLOCKS = 4


def one_slot(rng: random.Random, *, ready: int) -> TagInputs:
    """Identical groups of one fragment, one slot on either side; whole seconds, so exact."""
    return TagInputs(
        groups=rng.randint(1, 7),
        fragments_per_group=1,
        rollout=(float(rng.randint(1, 8)),),
        trainer_queues=1,
        help=float(rng.randint(1, 12)),
        train=float(rng.randint(1, 6)),
        switch=float(rng.choice((0, 0, 1, 2, 3, 8, 20))),
        ready=float(ready),
        commit=float(rng.randint(0, 3)),
    )


def pool(rng: random.Random) -> TagInputs:
    """Unequal slots, groups of several fragments."""
    return TagInputs(
        groups=rng.randint(1, 16),
        fragments_per_group=rng.randint(2, 8),
        rollout=tuple(rng.uniform(2, 14) for _ in range(rng.randint(1, 12))),
        trainer_queues=rng.randint(1, 10),
        help=rng.uniform(2, 20),
        train=rng.uniform(0.2, 12),
        switch=rng.choice((0.0, rng.uniform(0, 5), rng.uniform(5, 60))),
        ready=rng.uniform(0, 4),
        commit=rng.uniform(0, 3),
    )


def aggregate(s: TagInputs, k: int) -> float:
    """C(k) of the cost model, plus the commit: the helper's own groups are trainable at once."""
    g, left = s.rollout[0], s.groups - k
    by_rollout = [g + s.ready + left * s.train, left * g + s.ready + s.train] if left else []
    by_trainer = [s.switch + k * s.help + s.groups * s.train] if k else []
    return max(by_rollout + by_trainer) + s.commit


def recursive_search(s: TagInputs) -> float:
    """The shortest batch over every sequence of SkipBubble and InsertTAG decisions.

    The trainer may turn to generation whenever it is idle (at every second of it) or between two
    trainings, up to four times, for as many groups as nobody has begun; each time it pays the
    switch. In between it trains what is ready, first come first served.
    """
    seconds = s.rollout[0]

    @cache
    def ends(
        now: float, by_rollout: int, taken: int, blocks: int, helped: tuple[float, ...]
    ) -> float:
        """``by_rollout``: groups of rollout that are trained; ``helped``: ready, not trained."""
        if by_rollout == s.groups - taken and not helped:
            return now + s.commit
        coming = [(helped[0], 1)] if helped else []
        if by_rollout < s.groups - taken:
            coming.append(((by_rollout + 1) * seconds + s.ready, 0))
        ready, mine = min(coming)
        if ready <= now:
            rest = helped[1:] if mine else helped
            best = ends(now + s.train, by_rollout + 1 - mine, taken, blocks, rest)
        else:
            best = ends(now + 1, by_rollout, taken, blocks, helped)
        begun = min(s.groups - taken, -(-now // seconds))
        for k in range(1, int(s.groups - taken - begun) + 1 if blocks else 1):
            start = now + s.switch
            new = tuple(start + (i + 1) * s.help + s.ready for i in range(k))
            back = start + k * s.help
            best = min(best, ends(back, by_rollout, taken + k, blocks - 1, helped + new))
        return best

    return ends(0.0, 0, 0, MAX_BLOCKS, ())


def test_one_block_at_the_opening_is_as_good_as_any_sequence_of_decisions() -> None:
    rng = random.Random("tag")
    for _ in range(1000):
        s = one_slot(rng, ready=rng.randint(0, 4))
        planned, best = makespan(s, best_groups(s)), recursive_search(s)
        assert planned == best, f"{s}: planned {planned} s, the best is {best} s"


def test_the_scan_finds_the_smallest_of_the_best() -> None:
    rng = random.Random("waves")
    for _ in range(1000):
        s = pool(rng)
        every = [makespan(s, k) for k in range(s.groups + 1)]
        best = every.index(min(every))
        assert best_groups(s) == best, f"{s}: {every}"


def test_the_model_is_the_cost_model_where_groups_are_trainable_at_once() -> None:
    rng = random.Random("aggregate")
    for _ in range(1000):
        s = one_slot(rng, ready=0)
        for k in range(s.groups + 1):
            assert makespan(s, k) == aggregate(s, k), f"{s}, k = {k}"


def test_scoring_the_trainers_groups_takes_at_most_its_own_time_more_than_the_cost_model() -> None:
    rng = random.Random("ready")
    finer = 0
    for _ in range(1000):
        s = one_slot(rng, ready=rng.randint(1, 4))
        for k in range(s.groups + 1):
            more = makespan(s, k) - aggregate(s, k)
            assert 0 <= more <= s.ready, f"{s}, k = {k}"
            finer += more > 0
    assert finer, "the models differ nowhere"


def test_fragments_of_unequal_queues_are_finished_as_an_event_simulation_says() -> None:
    rng = random.Random("slots")
    for _ in range(200):
        s = replace(pool(rng), train=0.0, commit=0.0)
        free = [0.0] * len(s.rollout)
        done: list[float] = []
        for _ in range(s.groups * s.fragments_per_group):
            slot = min(range(len(free)), key=lambda i: free[i] + s.rollout[i])
            free[slot] += s.rollout[slot]
            done.append(free[slot])
        assert makespan(s, 0) == pytest.approx(max(done) + s.ready)


def test_a_slow_queue_gets_no_fragment_that_a_fast_one_finishes_sooner() -> None:
    s = TagInputs(
        groups=4, fragments_per_group=1, rollout=(1.0, 10.0), trainer_queues=0,
        help=1.0, train=0.0, switch=0.0, ready=0.0, commit=0.0,
    )  # fmt: skip
    assert makespan(s, 0) == 4.0


def test_the_trainers_queues_finish_in_whole_rounds() -> None:
    s = TagInputs(
        groups=2, fragments_per_group=3, rollout=(), trainer_queues=4,
        help=10.0, train=1.0, switch=2.0, ready=0.5, commit=0.25,
    )  # fmt: skip
    # 6 fragments on 4 slots: two waves; the first group is ready before the trainer is back
    assert makespan(s, 2) == 2.0 + 20.0 + 0.5 + 1.0 + 0.25 + 0.5
    assert makespan(replace(s, trainer_queues=6), 2) == 2.0 + 10.0 + 0.5 + 2 * 1.0 + 0.25


def test_who_alone_can_generate_generates_all() -> None:
    s = pool(random.Random(1))
    assert best_groups(replace(s, rollout=())) == s.groups
    assert best_groups(replace(s, trainer_queues=0)) == 0
    assert best_groups(replace(s, rollout=(), trainer_queues=0)) == 0
    for k in (-1, s.groups + 1):
        with pytest.raises(ValueError, match="groups"):
            makespan(s, k)


@given(seed=st.integers(0, 2**32), factor=st.floats(0.1, 10))
@settings(deadline=None)
def test_time_has_no_unit(seed: int, factor: float) -> None:
    s = pool(random.Random(seed))
    scaled = replace(
        s,
        rollout=tuple(factor * each for each in s.rollout),
        **{
            name: factor * getattr(s, name)
            for name in ("help", "train", "switch", "ready", "commit")
        },
    )
    assert makespan(scaled, best_groups(s)) == pytest.approx(factor * makespan(s, best_groups(s)))
    assert makespan(scaled, best_groups(scaled)) == pytest.approx(makespan(scaled, best_groups(s)))


@pytest.mark.clock
def test_the_scan_of_a_large_pool_is_fast() -> None:
    rng = random.Random("large")
    s = replace(
        pool(rng), groups=32, fragments_per_group=16, trainer_queues=8, help=5.0, train=1.0,
        rollout=tuple(rng.uniform(5, 15) for _ in range(24)), switch=1.0,
    )  # fmt: skip
    began = time.perf_counter()
    for _ in range(20):
        best_groups(s)
    assert (time.perf_counter() - began) / 20 < 0.02

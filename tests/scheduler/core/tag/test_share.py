"""The share of a batch that several members generate."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.tag.makespan import TagInputs, makespan, member_share

INPUTS = TagInputs(
    groups=32, fragments_per_group=2, rollout=(10.0,) * 8, trainer_queues=24, help=10.0,
    train=1.5, switch=0.0, ready=0.1, commit=2.0,
)  # fmt: skip


def test_before_anything_is_learned_it_goes_by_the_number_of_devices() -> None:
    assert member_share(replace(INPUTS, train=0.0), one_step=False) == 24
    assert member_share(replace(INPUTS, rollout=()), one_step=True) == 32


@given(train=st.floats(0.1, 10), rollout=st.integers(1, 31))
def test_on_policy_it_is_the_models_best(train: float, rollout: int) -> None:
    tag_inputs = replace(
        INPUTS, train=train, rollout=(10.0,) * rollout, trainer_queues=32 - rollout
    )
    chosen = makespan(tag_inputs, member_share(tag_inputs, one_step=False))
    assert chosen <= min(makespan(tag_inputs, k) for k in (0, 1, 16, 31, 32)) + 1e-9


def test_with_one_step_it_vanishes_where_the_trainer_is_the_bottleneck() -> None:
    starved = replace(INPUTS, train=4.0)
    assert member_share(starved, one_step=True) <= 1
    # 8 devices generate a group in 2.5 s, 24 in 0.83: 9 groups balance; twice that, and one more.
    assert member_share(INPUTS, one_step=True) == 19

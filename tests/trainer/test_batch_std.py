"""The trainer's service with advantages over the standard deviation of the batch: what is trained
before its last reward, what after it, and what once more."""

import pytest

from shared.learning.advantages import batch_scale
from shared.messages.contracts import GroupFailed
from shared.run.layout import batch_folder
from tests.trainer.cluster import RUN, Start

SCALE = batch_scale([1.0, 0.0])
BEYOND = (3.0, -3.0, 0.5, -0.5)
"""Twice of it, the clip of 5 reaches two."""
BATCH = {
    "algorithm__advantage_std": "batch",
    "algorithm__kl_beta": 0.1,
    "algorithm__zero_advantages": "kept",
}


async def test_groups_are_trained_as_they_come_and_what_the_clip_reaches_once_more(
    trainer: Start,
) -> None:
    """The third has equal rewards, and its KL."""
    async with trainer(batch__groups=3, **BATCH) as run:
        run.run_freely()
        await run.send(0, 2, advantages=(0.0,) * 4)
        await run.log_holds("d0 train 0/2 0-3")
        await run.send(0, 0)
        await run.send(0, 1, advantages=BEYOND)
        record = await run.commit(1)
        assert run.training.log[1:] == [
            "d0 train 0/2 0-3", "d0 train 0/0 0-3", "d0 train 0/1 0-3", "d0 train 0/1 0-3 excess",
            "step 0",
        ]  # fmt: skip
    assert run.training.scales == [pytest.approx(SCALE)]
    assert run.training.advantages["0/1", "excess"] == BEYOND
    assert record.metrics["rows_trained_again"] == 6
    assert record.metrics["advantage_max"] == pytest.approx(3 * SCALE)


async def test_the_first_of_two_updates_waits_for_the_last_reward(trainer: Start) -> None:
    async with trainer(trainer__updates=2, **BATCH) as run:
        run.run_freely()
        await run.send(0, 0, advantages=BEYOND)
        await run.log_holds("d0 train 0/0 0-3")
        assert "d0 train 0/0 0-3 excess" not in run.training.log
        await run.send(0, 1, advantages=BEYOND)
        record = await run.commit(1)
        assert run.training.log[1:] == [
            "d0 train 0/0 0-3", "d0 train 0/0 0-3 excess", "step 0", "d0 train 0/1 0-3 final",
            "step 0",
        ]  # fmt: skip
    assert run.training.scales == [pytest.approx(SCALE), 1.0]
    assert run.training.advantages["0/1", "final"] == pytest.approx([SCALE * a for a in BEYOND])
    assert record.metrics["rows_trained_again"] == 6, "the clip of the loss reaches the others"


async def test_normalised_scores_hold_all_groups_until_the_last_is_scored(trainer: Start) -> None:
    changes = BATCH | {"algorithm__rewards": "normalised"}
    async with trainer(trainer__updates=2, **changes) as run:
        run.run_freely()
        await run.send(0, 1)
        assert await run.all_told(GroupFailed) == 0
        await run.send(0, 0)
        await run.commit(1)
        assert run.training.log[1:] == [
            "d0 train 0/0 0-3 final", "step 0", "d0 train 0/1 0-3 final", "step 0",
        ]  # fmt: skip
    assert run.training.scales == [1.0, 1.0]
    wanted = [SCALE / 2, -SCALE / 2] * 2
    assert run.training.advantages["0/1", "final"] == pytest.approx(wanted)


async def test_a_group_that_fails_once_others_are_trained_by_its_rewards_begins_the_batch_again(
    trainer: Start,
) -> None:
    async with trainer(trainer__updates=2, **BATCH) as run:
        run.run_freely()
        await run.send(0, 0)
        await run.send(0, 1, content="no group")
        await run.told(GroupFailed)
        await run.send(0, 1, attempt=1)
        record = await run.commit(1)
        assert run.training.log == [
            "restore fresh", "d0 train 0/0 0-3", "step 0",
            "restore fresh", "d0 train 0/0 0-3", "step 0", "d0 train 0/1 0-3 final", "step 0",
        ]  # fmt: skip
    assert [group.attempt for group in record.trained] == [0, 1]


async def test_samples_that_are_gone_when_they_are_needed_again_begin_the_batch_again(
    trainer: Start,
) -> None:
    async with trainer(**BATCH) as run:
        run.run_freely()
        await run.send(0, 1, advantages=BEYOND)
        await run.log_holds("d0 train 0/1 0-3")
        await run.store.delete_folder(batch_folder(RUN, 0))
        await run.send(0, 0)
        await run.told(GroupFailed)
        await run.send(0, 1, attempt=1, advantages=BEYOND)
        await run.commit(1)
        assert run.training.log == [
            "restore fresh", "d0 train 0/1 0-3", "d0 train 0/0 0-3",
            "restore fresh", "d0 train 0/0 0-3", "d0 train 0/1 0-3", "d0 train 0/1 0-3 excess",
            "step 0",
        ]  # fmt: skip

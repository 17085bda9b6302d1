"""Several updates per batch, by members with real engines on a real bus and store."""

import asyncio
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from services.trainer.engine.trainer_engine import TrainerEngine
from shared.diffusion.policy import load_policy
from shared.diffusion.weights.trained_weights import weights_digest
from shared.messages.fluid import BeginAgain, Piece, TakeStep
from tests.trainer.fluid.director import Director, Start, part, whole

TWO_UPDATES: dict[str, Any] = {"trainer__updates": 2, "batch__groups": 2}
NUM_UPDATES = 2
"""One group each."""
ALL_WEIGHTS = {"model__trained": "full", "algorithm__kl_beta": 0.0}


async def take_batch(director: Director, names: str, batch: int = 0, attempt: int = 0) -> None:
    """Train each of a batch's updates, whose groups are there: by these members, in halves, or
    whole by one of them in turn where that is the order of the bytes."""
    recipe, by_group = director.recipe, director.recipe.trainer.deterministic
    size = recipe.trained_samples
    for update in range(NUM_UPDATES):
        parts: dict[str, list[Piece]] = {name: [] for name in names}
        if by_group or len(names) == 1:
            parts[names[update % len(names)]].append(whole(recipe, update, number=2 * attempt))
        else:
            parts[names[0]].append(part(recipe, update, range(size // 2)))
            parts[names[1]].append(part(recipe, update, range(size // 2, size), number=1))
        await director.update(batch, update, parts, committer=names[0], attempt=attempt)


def versions(director: Director) -> set[int | None]:
    """Versions that the members use."""
    return {each.worker.policy_version for each in director.members.values()}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="on-policy"),
        pytest.param({"schedule__max_staleness": 1}, id="one step ahead", marks=pytest.mark.slow),
        pytest.param(ALL_WEIGHTS, id="all weights", marks=pytest.mark.slow),
        pytest.param(
            {**ALL_WEIGHTS, "schedule__max_staleness": 1}, id="all weights, one step ahead"
        ),
        pytest.param(
            {"model__trained": "full", "schedule__max_staleness": 1},
            id="all weights with KL, one step ahead",
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_the_updates_of_a_batch_are_those_of_one_trainer(
    direct: Start, changes: dict[str, Any]
) -> None:
    async with direct(**TWO_UPDATES, **changes) as director:
        recipe = director.recipe
        await director.start("a", "b")
        groups = await director.open(0, by="a")
        await take_batch(director, "ab")
        record = await director.record(1)
        assert sorted({p.group for s in record.shares for p in s.pieces}) == [0, 1]
        assert record.metrics["onpolicy_ratio_error"] < 1e-5
        assert record.metrics["stale_fraction"] > 0
        for name in "ab":
            await director.until(lambda: versions(director) == {1})
            holds = director.members[name].worker.holds
            assert holds is not None
            assert (holds.version, holds.update) == (1, 0)
            assert holds.checksum == record.checksum

        alone = TrainerEngine(recipe, load_policy(recipe, {"transformer"}, trains=True))
        alone.begin()
        for group in groups:
            alone.train(alone.read(group))
            last = alone.step(0)
        assert record.metrics["stale_fraction"] == pytest.approx(last["stale_fraction"])
        engine = director.members["b"].device.engine
        first = load_policy(recipe, {"transformer"}, trains=True).trained.parameters
        for name, each in alone._parameters.items():
            assert torch.allclose(engine._parameters[name], each, rtol=0, atol=1e-5)
        moved = [float((e - first[n]).detach().abs().max()) for n, e in alone._parameters.items()]
        assert max(moved) > 1e-4
        for name, average in alone._averages.items():
            assert torch.allclose(engine._averages[name], average, rtol=0, atol=1e-5)
        await director.open(1, by="b")
        await take_batch(director, "ba", batch=1)
        assert (await director.record(2)).metrics["onpolicy_ratio_error"] < 1e-5


@pytest.mark.slow
async def test_a_fragment_that_outlasts_the_batch_before_is_not_followed_by_weights_of_no_version(
    direct: Start,
) -> None:
    """A step ahead, a slow device still generates by version 0 when the others update version 1: it
    uses version 1 before it takes that update."""
    async with direct(**TWO_UPDATES, schedule__max_staleness=1) as director:
        recipe = director.recipe
        await director.start("a", "b")
        slow = director.members["b"]
        await director.open(0, by="a")
        await director.update(0, 0, {"a": [whole(recipe, 0)], "b": []}, committer="a")
        async with slow.lock:
            await director.update(0, 1, {"a": [whole(recipe, 1)], "b": []}, committer="a")
            await director.record(1)
            await director.open(1, by="a")
            parts: dict[str, list[Piece]] = {"a": [whole(recipe, 0)], "b": []}
            updating = asyncio.create_task(director.update(1, 0, parts, committer="a"))
            message = await director.told(TakeStep, 1, lambda each: each.batch == 1)
            assert message[0].update == 0
            await asyncio.sleep(0.3)
            assert not updating.done(), "it waits for the device"
            assert slow.worker.policy_version == 0
        await updating
        policy = await director.policy(1)
        assert slow.worker.policy_version == 1
        assert weights_digest(slow.device.engine._sets._in_use) == policy.weights_digest
        await director.update(1, 1, {"a": [whole(recipe, 1)], "b": []}, committer="a")
        record = await director.record(2)
        await director.until(lambda: versions(director) == {2})
        assert slow.worker.holds is not None
        assert slow.worker.holds.checksum == record.checksum


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, ALL_WEIGHTS], ids=["LoRA", "all weights"])
async def test_the_bytes_are_the_same_by_any_number_of_members_and_if_a_batch_begins_again(
    direct: Start, changes: dict[str, Any]
) -> None:
    async def trained(names: str, *, again: bool = False) -> tuple[Any, ...]:
        given = {**TWO_UPDATES, **changes, "trainer__deterministic": True}
        async with direct(f"{names}-{again}", **given) as director:
            recipe = director.recipe
            await director.start(*names)
            await director.open(0, by="a")
            if again:
                first = director.members["a"].worker.holds
                parts = {"a": [whole(recipe, 0)], "b": []}
                await director.update(0, 0, parts, committer="b")
                await director.kill("b")
                await director.bus.publish(BeginAgain(batch=0, attempt=1))
                worker = director.members["a"].worker
                await director.until(lambda: worker.holds == first)
                names = "a"
            await take_batch(director, names, attempt=int(again))
            record = await director.record(1)
            gold = {key: record.metrics[key] for key in ("loss", "kl", "grad_norm")}
            return record.weights.sha256, record.checkpoint.sha256, record.checksum, gold

    assert await trained("a") == await trained("abc") == await trained("ab", again=True)


async def test_a_step_is_not_compared_with_that_of_an_abandoned_attempt(direct: Start) -> None:
    """A group was generated again in between, so the second attempt has another sum."""
    async with direct(**TWO_UPDATES) as director:
        recipe = director.recipe
        await director.start("a", "b")
        groups = await director.open(0, by="a")
        parts: dict[str, list[Piece]] = {"a": [whole(recipe, 0)], "b": []}
        before = await director.update(0, 0, parts, committer="a")
        await director.bus.publish(BeginAgain(batch=0, attempt=1))
        workers = [member.worker for member in director.members.values()]
        await director.until(lambda: all(w.holds and not w.holds.update for w in workers))
        policy, others = await director.policy(0), groups[0].advantages[::-1]
        await director.send(0, 0, groups[0], policy, others, attempt=1)
        parts = {"a": [], "b": [whole(recipe, 0, attempt=1)]}
        with capture_logs() as logs:
            after = await director.update(0, 0, parts, committer="a", attempt=1)
            assert before[0].checksum not in {each.checksum for each in after}
            parts = {"a": [whole(recipe, 1)], "b": []}
            await director.update(0, 1, parts, committer="a", attempt=1)
            await director.record(1)
        assert [each for each in logs if each["event"] == "step_differs"] == []


@pytest.mark.slow
async def test_who_has_missed_an_update_waits_for_the_version(direct: Start) -> None:
    async with direct(**TWO_UPDATES) as director:
        recipe = director.recipe
        await director.start("a", "b")
        await director.open(0, by="a")
        await director.update(0, 0, {"a": [whole(recipe, 0)]}, committer="a")
        holds = director.members["b"].worker.holds
        assert holds is not None and (holds.version, holds.update) == (0, 0)
        parts = {"a": [whole(recipe, 1)]}
        await director.give(0, {"b": [whole(recipe, 1, number=1)]}, update=1)  # it drops that
        await director.update(0, 1, parts, committer="a")
        record = await director.record(1)

        def has_fetched() -> bool:
            holds = director.members["b"].worker.holds
            return holds is not None and holds.checksum == record.checksum

        await director.until(has_fetched)
        assert not director.members["b"].worker.num_done

"""Members with real engines, on a real bus and store, while a test plays the scheduler."""

import asyncio
from typing import Any

import pytest
import structlog
import torch

from services.trainer.fluid.engine import FluidEngine
from services.trainer.fluid.exchange import WHOLE_BATCH
from shared.errors import OutOfMemory, RanksLost
from shared.messages.fluid import CommitVersion, Piece, PieceReleased, Stepped
from shared.recipe.recipe import Recipe
from tests.trainer.fluid.director import WAIT_S, Director, Start, part, whole


async def test_three_members_sum_what_one_process_does(director: Director) -> None:
    await director.start("a", "b", "c")
    groups = await director.open(0, by="a")
    recipe, size = director.recipe, director.recipe.batch.group_size
    parts = {
        "a": [whole(recipe, 0), part(recipe, 2, range(size), range(0, 1), number=2)],
        "b": [part(recipe, 1, range(1)), part(recipe, 2, range(size), range(1, 3))],
        "c": [part(recipe, 1, range(1, size), number=1)],
    }
    await director.train(0, parts)
    alone = director.members["a"].device
    shares = director.shares(parts)
    message = await director.exchange(0, shares, committer="b")
    held = await director.held(message, 3)
    assert len({each.sum_id for each in held}) == 1
    own = [(await director.members[n].device.own_sum())[WHOLE_BATCH].gradient for n in parts]
    total = own[0] + own[1] + own[2]
    for name in ("b", "c"):
        await director.kill(name)
    alone.begin()
    for group in groups:
        alone.engine.train(alone.engine.read(group))
    expected = alone.engine.term().gradient
    assert expected is not None
    error = torch.linalg.vector_norm(total - expected) / torch.linalg.vector_norm(expected)
    assert float(error) <= 1e-5


async def test_all_members_step_alike_and_one_that_joins_works_in_the_next_batch(
    director: Director,
) -> None:
    recipe = director.recipe
    await director.start("a", "b")
    parts = {"a": [whole(recipe, 0), whole(recipe, 1)], "b": [whole(recipe, 2)]}
    record = await director.batch(0, parts, committer="a")
    assert record.worker == "a"
    assert [share.worker for share in record.shares] == ["a", "b"]
    assert [group.group for group in record.trained] == [0, 1, 2]
    assert {"loss", "grad_norm", "reward_mean", "step_seconds"} <= set(record.metrics)
    assert record.metrics["onpolicy_ratio_error"] < 1e-5
    await director.start("c")
    assert holds(director, "c") == (1, record.checksum)
    record = await director.batch(1, thirds(recipe), committer="c")
    assert record.worker == "c"
    assert record.metrics["onpolicy_ratio_error"] < 1e-5
    for name in "abc":
        assert holds(director, name) == (2, record.checksum)
    await director.chain_has(3)


@pytest.mark.slow
async def test_in_deterministic_mode_one_two_and_three_members_make_the_same_bytes(
    direct: Start,
) -> None:
    async def trained(count: int) -> tuple[Any, ...]:
        async with direct(f"of-{count}", trainer__deterministic=True) as director:
            recipe, names = director.recipe, "abc"[:count]
            await director.start(*names)
            for batch in range(2):
                parts: dict[str, list[Piece]] = {name: [] for name in names}
                for group in (2, 0, 1):  # in an order of their own
                    parts[names[(group + batch) % count]].append(whole(recipe, group))
                record = await director.batch(batch, parts, committer=names[-1])
            gold = {key: record.metrics[key] for key in ("loss", "kl", "grad_norm")}
            return record.weights.sha256, record.checkpoint.sha256, record.checksum, gold

    assert await trained(1) == await trained(2) == await trained(3)


async def test_if_the_committer_is_lost_after_the_step_another_commits_the_same_version(
    director: Director,
) -> None:
    await director.start("a", "b")
    director.members["a"].device.weights = never  # type: ignore[method-assign]
    parts = thirds(director.recipe, "abb")
    message = await director.summed(0, parts, committer="a")
    steps = await director.step(message, 2)
    await director.kill("a")
    await director.bus.publish(CommitVersion(batch=0, attempt=0, number=0, worker="b"))
    record = await director.record(1)
    assert record.worker == "b"
    assert {each.checksum for each in steps} == {record.checksum}
    assert [group.group for group in record.trained] == [0, 1, 2]
    told = await director.told(Stepped, 2, lambda each: each.is_reference)
    assert [each.worker for each in told] == ["a", "b"], "who was named to commit"
    assert told[1].checksum == record.checksum


async def test_a_member_whose_step_has_other_bits_says_so_and_fetches(director: Director) -> None:
    await director.start("a", "b")
    engine, take = director.members["b"].device.engine, FluidEngine.take

    def with_a_fault(*given: Any) -> dict[str, float]:
        metrics = take(engine, *given)
        [moment, *_] = [each["exp_avg"] for each in engine._optimizer.state.values()]
        moment.view(-1)[0] += 1e-3
        return metrics

    engine.take = with_a_fault  # type: ignore[assignment, method-assign]
    parts = thirds(director.recipe, "abb")
    message = await director.summed(0, parts, committer="a")
    with structlog.testing.capture_logs() as logs:
        steps = await director.step(message, 2)
        record = await director.record(1)
        assert len({each.checksum for each in steps}) == 2
        assert [each.worker for each in steps if each.is_reference] == ["a"]
        assert len({each.policy for each in steps}) == 1  # it may still generate
        await director.until(lambda: holds(director, "b") == (1, record.checksum))
    assert [each["event"] for each in logs].count("step_differs") == 1
    del engine.take
    await director.batch(1, thirds(director.recipe, "abb"), committer="b")


async def test_a_group_without_advantage_counts_with_its_rows_and_has_no_gradient(
    direct: Start,
) -> None:
    async with direct(algorithm__kl_beta=0.0, batch__groups=1) as director:
        await director.start("a", "b")
        await director.open(0, by="a", advantages=[0.0] * 4)
        parts = {"a": [part(director.recipe, 0, range(2))],
                 "b": [part(director.recipe, 0, range(2, 4), number=1)]}  # fmt: skip
        await director.train(0, parts)
        message = await director.exchange(0, director.shares(parts), committer="a")
        [held, _] = await director.held(message, 2)
        assert (held.norm, held.scale) == (0.0, 1.0)
        await director.step(message, 2)
        record = await director.record(1)
        assert record.metrics["zero_advantage_fraction"] == 1.0


@pytest.mark.slow
async def test_a_sum_that_is_spoilt_is_said_to_be_and_trained_again(director: Director) -> None:
    recipe = director.recipe
    await director.start("a", "b")
    await director.open(0, by="a")
    parts = thirds(recipe, "abb")
    engine = director.members["b"].device.engine
    train = engine.train

    def out_of_memory(*given: Any, **named: Any) -> None:
        train(*given, **named)
        engine.train = train  # type: ignore[method-assign]
        raise OutOfMemory("no room")

    await director.train(0, {"a": parts["a"], "b": parts["b"][:1]})
    engine.train = out_of_memory  # type: ignore[method-assign]
    await director.give(0, {"b": parts["b"][1:]})
    await director.told(PieceReleased, 1)
    again = [whole(recipe, 1, number=1), whole(recipe, 2, number=1)]
    message = await director.exchange(0, director.shares(parts), committer="a", seconds=1)
    assert "b" in {each.worker for each in await director.missed(message, 2)}
    await director.train(0, {"b": again}, sum_number=1)
    shares = director.shares({"a": parts["a"]})
    shares += director.shares({"b": again}, sum_number=1)
    message = await director.exchange(0, shares, committer="a", round_number=1)
    await director.step(message, 2)
    await director.record(1)


async def test_a_piece_at_which_a_shard_group_lost_a_rank_counts_as_failed(
    director: Director,
) -> None:
    await director.start("a")
    await director.open(0, by="a")
    member = director.members["a"]

    def lose_a_rank(*_: Any, **__: Any) -> None:
        raise RanksLost("no room (on rank 1)")

    member.device.engine.train = lose_a_rank  # type: ignore[method-assign]
    await director.give(0, {"a": thirds(director.recipe, "a")["a"]})
    await asyncio.wait({member.running})
    del director.members["a"]
    [released] = await director.told(PieceReleased, 1)
    assert released.reason == "failed"
    with pytest.raises(ExceptionGroup, match="TaskGroup"):
        member.running.result()


def thirds(recipe: Recipe, names: str = "abc") -> dict[str, list[Piece]]:
    """The three groups of a batch, each trained whole by the member at its place."""
    found: dict[str, list[Piece]] = {name: [] for name in names}
    for group, name in enumerate(names):
        found[name].append(whole(recipe, group))
    return found


def holds(director: Director, name: str) -> tuple[int, str] | None:
    found = director.members[name].worker.holds
    return None if found is None else (found.version, found.checksum)


async def never() -> Any:
    await asyncio.Event().wait()


async def test_a_piece_that_comes_before_its_group_waits_for_it(director: Director) -> None:
    """Commands are sent side by side: what was not there is looked for, and not given back."""
    await director.start("a")
    parts = {"a": [whole(director.recipe, 0)]}
    training = asyncio.create_task(director.train(0, parts))
    await asyncio.sleep(0.4)
    assert not training.done()
    await director.open(0, by="a")
    await training


async def test_the_watchdog_sees_that_a_member_hangs_in_its_optimizer_step(direct: Start) -> None:
    async with direct(batch__groups=1) as director:
        await director.start("a")
        await director.open(0, by="a")
        parts, member = {"a": [whole(director.recipe, 0)]}, director.members["a"]
        await director.train(0, parts)
        message = await director.exchange(0, director.shares(parts), committer="a")
        [held] = await director.held(message, 1)
        stepping = asyncio.Event()

        async def hang(*_: Any) -> None:
            stepping.set()
            await never()

        member.device.step = hang  # type: ignore[method-assign, assignment]
        await director.take(message, held)
        await asyncio.wait_for(stepping.wait(), WAIT_S)
        progress = member.worker.progress
        progress.advance(progress.deadline("the optimizer step") + 1)
        assert "the optimizer step" in progress.hangs()

"""Members that train one policy and sample with another, which follows it (DiffusionNFT)."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from services.trainer.engine.trainer_engine import TrainerEngine
from shared.diffusion.policy import LoadedPolicy, load_policy
from shared.diffusion.weights.shards import whole_tensors
from shared.diffusion.weights.trained_weights import trained_tensors
from shared.run.shards import open_tensors
from tests.trainer.fluid.director import Director, Start
from tests.trainer.fluid.test_replay import flip
from tests.trainer.fluid.test_updates import TWO_UPDATES, take_batch

NFT = {
    **TWO_UPDATES, "algorithm__name": "diffusion-nft", "algorithm__zero_advantages": "kept",
    "algorithm__nft_decay": 1, "algorithm__nft_beta": 0.3, "trainer__learning_rate": 0.01,
}  # fmt: skip
TOLERANCE = 1e-5


def sampling(loaded: LoadedPolicy) -> dict[str, Tensor]:
    with loaded.sets.sampling():
        return trained_tensors(loaded.model.transformer)


async def stored(director: Director, version: int) -> dict[str, Tensor]:
    """Return the weights that sample a version, as they are stored."""
    record = await director.record(version)
    digest = record.policy.weights_digest
    return await whole_tensors(await open_tensors(director.store, record.weights, digest))


def close(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    distance = sum(float((found[n] - each).detach().square().sum()) for n, each in wanted.items())
    size = sum(float(each.detach().square().sum()) for each in wanted.values())
    return distance <= TOLERANCE**2 * size


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="two updates", marks=pytest.mark.slow),
        pytest.param(
            {"schedule__max_staleness": 1}, id="two updates, one step ahead", marks=pytest.mark.slow
        ),
        pytest.param({"algorithm__nft_decay": 0}, id="no memory", marks=pytest.mark.slow),
        pytest.param(
            {"algorithm__nft_decay": 0, "schedule__max_staleness": 1},
            id="no memory, one step ahead", marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
async def test_members_hold_the_policies_of_one_trainer_and_so_does_one_that_joins(
    direct: Start, changes: dict[str, Any]
) -> None:
    async with direct(**NFT | changes) as director:
        recipe = director.recipe
        keeps = recipe.algorithm.nft_decay > 0
        await director.start("a", "b")
        policy = load_policy(recipe, {"transformer"}, trains=True)
        alone = TrainerEngine(recipe, policy)
        for batch in (0, 1, 2):
            groups = await director.open(batch, by="a")
            await take_batch(director, "ba", batch)
            alone.begin()
            for group in groups:
                alone.train(alone.read(group))
                alone.step(batch)
            record = await director.record(batch + 1)
            await director.until(partial(uses, director, batch + 1))
            for member in director.members.values():
                assert close(member.device.engine._parameters, alone._parameters)
                assert close(sampling(member.loaded), sampling(policy))
                assert member.worker.holds is not None
                assert member.worker.holds.checksum == record.checksum
            assert close(await stored(director, batch + 1), sampling(policy))
            assert (record.trained_weights is not None) == keeps
            assert (record.learned.digest != record.policy.weights_digest) == keeps
            if batch == 1:
                await director.start("c")
        assert not close(policy.trained.parameters, sampling(policy)) or not keeps


def uses(director: Director, version: int) -> bool:
    return all(each.worker.policy_version == version for each in director.members.values())


@pytest.mark.slow
@pytest.mark.parametrize("damaged", ["trained_weights", "checkpoint"])
async def test_a_damaged_version_is_made_again_with_its_old_policy(
    direct: Start, damaged: str
) -> None:
    async with direct(**NFT, trainer__deterministic=True) as director:
        await director.start("a", "b")
        for batch in (0, 1):
            await director.open(batch, by="a")
            await take_batch(director, "ab", batch)
            record = await director.record(batch + 1)
            await director.until(partial(uses, director, batch + 1))
        for name in "ab":
            await director.kill(name)
        flip(director.store, getattr(record, damaged))
        await director.start("c")
        holds = director.members["c"].worker.holds
        assert holds is not None and (holds.version, holds.checksum) == (2, record.checksum)
        loaded = director.members["c"].loaded
        assert close(sampling(loaded), await stored(director, 2))

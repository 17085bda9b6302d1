"""A trainer of real networks that is killed goes back to an older state of the optimizer, trains
the batches since then again, and goes on to the same bits as one that nobody has disturbed."""

from pathlib import Path

import pytest

from services.trainer.engine.threads import ReplicatedTraining
from shared.devices.protocols import GroupData
from shared.diffusion.policy import load_policy
from shared.messages.contracts import GroupTrained
from shared.recipe.recipe import Recipe
from shared.run.commits import CommitRecord, commit_chain
from tests.trainer.cluster import RUN, cluster
from tests.trainer.engine.test_algorithms import group, recipe_of

pytestmark = pytest.mark.broker
BATCHES = 3


def recipe(name: str = "flow-grpo", **changes: object) -> Recipe:
    """The same groups are trained in each batch, so that the weights may hardly move."""
    fixed = {
        "batch__groups": 2, "trainer__deterministic": True, "trainer__checkpoint_every": 5,
        "trainer__ema": 0.5, "trainer__learning_rate": 1e-7, "run__steps": BATCHES,
        "evaluation__every": None,
    }  # fmt: skip
    return recipe_of(name, **{**fixed, **changes})


RECIPES = {
    "averages": recipe(),
    "several updates": recipe(trainer__updates=2),
    "an old policy": recipe("diffusion-nft", algorithm__nft_decay=1),
    "an old policy and updates": recipe(
        "diffusion-nft", algorithm__nft_decay=1, trainer__updates=2
    ),
    "advantages over the batch": recipe(
        algorithm__advantage_std="batch", trainer__deterministic=False
    ),
    "all weights": recipe(model__trained="full", trainer__checkpoint_every=None),
}


async def trained(
    nats_url: str, folder: Path, recipe: Recipe, data: GroupData, batches: range
) -> list[CommitRecord]:
    """Train these batches in a trainer of its own, and kill it."""
    training = ReplicatedTraining(recipe, [load_policy(recipe, {"transformer"}, trains=True)])
    async with cluster(nats_url, folder, recipe, training=training) as run:
        before = await run.all_told(GroupTrained)
        for batch in batches:
            await run.send(
                batch, 0, 1, parts=data.trajectories, conditions=data.conditions,
                advantages=data.advantages,
            )  # fmt: skip
            await run.commit(batch + 1)
        told = await run.all_told(GroupTrained) - before
        assert told == len(batches) * recipe.batch.groups, "nobody is told of what is trained again"
        for batch in batches:  # what is sent of them stays in the store
            await run.bus.forget_batch(batch)
        return await commit_chain(run.store, RUN)


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k == "averages" else pytest.mark.slow) for k in RECIPES]
)
async def test_a_resumed_trainer_goes_on_to_the_same_bits(
    nats_url: str, tmp_path: Path, kind: str
) -> None:
    recipe = RECIPES[kind]
    data = group(recipe, load_policy(recipe, {"transformer", "text", "decoder"}), (2, 2))
    undisturbed = await trained(nats_url, tmp_path / "one", recipe, data, range(BATCHES))
    assert [each.resumes_from for each in undisturbed] == [0, 0, 0, BATCHES]
    await trained(nats_url, tmp_path / "two", recipe, data, range(BATCHES - 1))
    resumed = await trained(nats_url, tmp_path / "two", recipe, data, range(BATCHES - 1, BATCHES))
    assert len({each.learned.digest for each in undisturbed}) == 1 + BATCHES
    for one, other in zip(undisturbed, resumed, strict=True):
        assert (one.policy, one.objects) == (other.policy, other.objects)

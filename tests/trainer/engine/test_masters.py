"""All weights of a network in bfloat16 are trained by float32 masters; their rounded values sample.

Wan keeps some of its weights in float32, on both sides.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.trainer.engine.checkpoint import MASTER
from services.trainer.engine.storing import store_version
from services.trainer.engine.trainer_engine import TrainerEngine
from shared.diffusion.policy import LoadedPolicy, load_policy
from shared.diffusion.sampling.tensors import pack, unpack
from shared.diffusion.weights.trained_weights import Staging
from shared.errors import IntegrityError
from shared.recipe.recipe import Recipe, override
from shared.run.shards import open_tensors
from shared.store import ObjectStore
from tests.stored import as_bytes, one_object, packed, read_back
from tests.trainer.batches import fresh_groups
from tests.trainer.fluid.group_program import store_in

BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture(scope="session")
def full(recipe: Recipe, wan: Path) -> Recipe:
    """Passes take as many rows as were generated at once, so that the kernels are equal."""
    return override(
        recipe,
        {
            "model.folder": str(wan), "model.trained": "full", "model.dtype": "bfloat16",
            "model.height": 32, "model.width": 32, "algorithm.kl_beta": 0.0,
            "trainer.micro_batch": 2, "schedule.tsp_steps": 1, "schedule.fragment_size": 2,
            "trainer.learning_rate": 1e-4,
        },
    )  # fmt: skip


def types_of(tensors: dict[str, Tensor]) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in tensors.items()}


def masters_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(MASTER): each for n, each in tensors.items() if n.startswith(MASTER)}


async def generate_and_train(
    recipe: Recipe, training: TrainerEngine, generating: LoadedPolicy, batch: int,
    store: ObjectStore,
) -> dict[str, Any]:  # fmt: skip
    """Train a batch that the published weights have generated; return what is known of it."""
    snapshot = training.weights()
    weights, _ = await store_version(store, recipe.run.name, snapshot)
    staging = Staging(generating.model.transformer)
    async for part in (await open_tensors(store, weights, snapshot.digest)).parts():
        staging.add(part)
    adopted = generating.in_use.adopt(staging.finish())
    digests = [snapshot.digest, adopted, training.weights_digest()]
    training.begin()
    for group in fresh_groups(recipe, generating):
        training.train(training.read(group))
    return {"digests": digests, **training.step(batch)}


def engine_of(recipe: Recipe) -> TrainerEngine:
    return TrainerEngine(recipe, load_policy(recipe, {"transformer"}, trains=True))


def on_one(recipe: Recipe, folder: Path) -> tuple[list[dict[str, Any]], TrainerEngine]:
    training = engine_of(recipe)
    generating = load_policy(recipe, {"transformer", "text", "decoder"})
    store = store_in(folder)

    async def train() -> list[dict[str, Any]]:
        return [await generate_and_train(recipe, training, generating, n, store) for n in range(2)]

    return asyncio.run(train()), training


@pytest.fixture(scope="module")
def alone(
    full: Recipe, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], TrainerEngine]:
    return on_one(full, tmp_path_factory.mktemp("alone"))


def check_followed(seen: list[dict[str, Any]]) -> None:
    assert [each["onpolicy_ratio_error"] for each in seen] == [0.0, 0.0]
    assert all(len(set(each["digests"])) == 1 for each in seen)
    assert seen[0]["digests"] != seen[1]["digests"]
    assert all(each["grad_norm"] > 0 for each in seen)


def test_one_device_trains_what_its_published_weights_have_generated(
    alone: tuple[list[dict[str, Any]], TrainerEngine],
) -> None:
    check_followed(alone[0])


def check_masters(published: dict[str, Tensor], masters: dict[str, Tensor]) -> None:
    """What is published is the masters, rounded; Wan's float32 weights are float32 there too."""
    assert set(types_of(masters).values()) == {F32}
    assert masters.keys() == {n for n, dtype in types_of(published).items() if dtype == BF16}
    assert all(torch.equal(published[n], master.to(BF16)) for n, master in masters.items())
    assert any(not torch.equal(published[n].float(), master) for n, master in masters.items())
    kept = published.keys() - masters.keys()
    assert any("scale_shift_table" in name for name in kept)
    assert {published[name].dtype for name in kept} == {F32}


async def test_one_device_goes_on_from_its_checkpoint_to_the_last_bit(
    full: Recipe, alone: tuple[list[dict[str, Any]], TrainerEngine]
) -> None:
    _, training = alone
    saved = training.weights()
    check_masters(unpack(packed(saved.weights)), masters_of(unpack(packed(saved.checkpoint))))
    fresh = engine_of(full)
    await fresh.restore(read_back(saved.weights), read_back(saved.checkpoint))
    assert as_bytes(fresh.weights()) == as_bytes(saved)
    groups = fresh_groups(full, load_policy(full, {"transformer", "text", "decoder"}))
    for each in (training, fresh):
        each.begin()
        each.train(each.read(groups[0]))
        each.step(2)
    assert as_bytes(fresh.weights()) == as_bytes(training.weights())


async def test_masters_of_other_weights_are_seen_and_missing_ones_refused(full: Recipe) -> None:
    training = engine_of(full)
    saved = training.weights()
    state, weights = unpack(packed(saved.checkpoint)), read_back(saved.weights)
    name = next(name for name in state if name.startswith("master/"))
    others = {**state, name: state[name] + 1}
    await training.restore(weights, one_object(pack(others)))
    assert training.weights_digest() != saved.digest, "the trainer would go on from them"
    del others[name]
    with pytest.raises(IntegrityError, match=name):
        await training.restore(weights, one_object(pack(others)))


async def test_a_step_that_is_lost_in_rounding_moves_the_masters(full: Recipe) -> None:
    small = override(full, {"trainer.learning_rate": 1e-7})
    training = engine_of(small)
    before = training.weights()
    training.begin()
    groups = fresh_groups(small, load_policy(small, {"transformer", "text", "decoder"}))
    training.train(training.read(groups[0]))
    training.step(0)
    after = training.weights()
    masters, moved = (masters_of(unpack(packed(each.checkpoint))) for each in (before, after))
    changed = [name for name in masters if not torch.equal(masters[name], moved[name])]
    held, now = (unpack(packed(each.weights)) for each in (before, after))
    same = [name for name in changed if torch.equal(held[name], now[name])]
    assert len(changed) > 0.9 * len(masters)
    assert same

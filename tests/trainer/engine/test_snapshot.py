"""What is copied at a commit: to memory that is kept, digested once, and true to the devices."""

import asyncio

import pytest
import torch

from services.trainer.engine.checkpoint import Replacement
from services.trainer.engine.threads import ReplicatedTraining
from services.trainer.engine.trainer_engine import TrainerEngine
from shared.diffusion.masters import TrainedWeights
from shared.diffusion.policy import LoadedPolicy, copy_policy, load_policy
from shared.diffusion.shards import host_parts
from shared.diffusion.weight_sets import WeightSets
from shared.diffusion.weights import weights_digest
from shared.errors import IntegrityError
from shared.recipe.recipe import Recipe, override
from tests.stored import as_bytes, packed, read_back
from tests.trainer.batches import Group, make_batch, train_group
from tests.trainer.engine.test_algorithms import group, recipe_of


@pytest.fixture(scope="module")
def groups(recipe: Recipe) -> list[Group]:
    return make_batch(recipe)


@pytest.fixture
def digests(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tensors of each digest that is taken of weights on a device or of a copy."""
    taken: list[int] = []

    def counted(tensors: dict[str, torch.Tensor], *types: object) -> str:
        taken.append(len(tensors))
        return weights_digest(tensors, *types)  # type: ignore[arg-type]

    for module in ("shared.diffusion.weights", "services.trainer.engine.snapshot"):
        monkeypatch.setattr(f"{module}.weights_digest", counted)
    return taken


def train(engine: TrainerEngine, groups: list[Group], batch: int) -> None:
    engine.begin()
    for each in groups:
        train_group(engine, each.cut([4]), each.conditions, each.advantages)
    engine.step(batch)


def test_a_copy_is_what_the_engine_holds_in_the_same_memory_as_the_one_before(
    recipe: Recipe, groups: list[Group]
) -> None:
    engine = TrainerEngine(override(recipe, {"trainer.ema": 0.5}))
    train(engine, groups, 0)
    first = engine.copy()
    before = packed(first.snapshot().weights)
    train(engine, groups, 1)
    second = engine.copy()
    for one, other in ((first.weights, second.weights), (first.checkpoint, second.checkpoint)):
        assert [p.stored.data_ptr() for p in one] == [p.stored.data_ptr() for p in other]
    assert as_bytes(second.snapshot()) == as_bytes(engine.weights())
    assert packed(second.snapshot().weights) != before
    assert second.snapshot().digest == engine.weights_digest()
    assert engine.copy(states=False).checkpoint == []


def replicas(recipe: Recipe, number: int) -> tuple[ReplicatedTraining, list[LoadedPolicy]]:
    first = load_policy(recipe, {"transformer"})
    loaded = [first, *(copy_policy(first, 0) for _ in range(number - 1))]
    return ReplicatedTraining(recipe, loaded), loaded


@pytest.mark.parametrize("name", ["flow-grpo", "diffusion-nft"])
async def test_a_version_is_digested_once_whatever_uses_it(digests: list[int], name: str) -> None:
    """The weights that generate are digested besides if they are others."""
    recipe = recipe_of(name, trainer__learning_rate=0.01)
    lags = name == "diffusion-nft"
    if lags:
        recipe = override(recipe, {"algorithm.nft_decay": 1})
    training, loaded = replicas(recipe, 2)
    training.begin()
    whole = load_policy(recipe, {"transformer", "text", "decoder"})
    training._first.train(training._first.read(group(recipe, whole)))
    await training.step(0)
    digests.clear()
    snapshot = await (await training.copy(states=True))()
    assert len(digests) == 1 + lags
    generating = (snapshot.sampling or snapshot).digest
    assert training.weights_digest() == snapshot.digest
    for each in loaded:
        with each.sets.sampling():
            assert each.in_use.digest() == generating
        assert each.in_use.digest() == snapshot.digest
    assert len(digests) == 1 + lags, "nobody has digested them again"
    for each in loaded:
        found = weights_digest(each.trained.parameters, each.trained.types)
        assert found == snapshot.digest


async def test_a_device_that_has_received_other_weights_is_noticed(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, loaded = replicas(recipe, 2)
    copy = TrainerEngine.copy_weights

    def flipped(self: TrainerEngine, other: TrainerEngine) -> None:
        copy(self, other)
        with torch.no_grad():
            next(iter(loaded[1].trained.parameters.values()))[0, 0].add_(1e-6)

    monkeypatch.setattr(TrainerEngine, "copy_weights", flipped)
    training.begin()
    with pytest.raises(IntegrityError, match="two devices hold other weights"):
        await training.step(0)


async def test_committed_weights_replace_others_and_leave_the_states(
    recipe: Recipe, groups: list[Group]
) -> None:
    engine = TrainerEngine(recipe)
    train(engine, groups, 0)
    committed = engine.weights()
    train(engine, groups, 1)
    states = engine.weights()
    await engine.replace(read_back(committed.weights), None)
    found = engine.weights()
    assert found.digest == committed.digest != states.digest
    assert as_bytes(found)[2] == as_bytes(states)[2]


def test_masters_that_round_to_the_committed_weights_stay() -> None:
    """Others become them."""
    network = torch.nn.Linear(4, 1, bias=False, dtype=torch.bfloat16)
    master = torch.nn.Parameter(torch.tensor([[1.0, 1.001, 2.0, 3.0]]))
    trained = TrainedWeights(network, {"weight": master})
    trained.put_in_use()
    committed = {"weight": torch.tensor([[1.0, 1.0, 2.0, 3.5]], dtype=torch.bfloat16)}
    version = Replacement(trained, WeightSets(network))
    [part] = host_parts(committed, {}, shard_bytes=1 << 20, is_first=True)

    async def add() -> None:
        async for each in read_back([part]).parts():
            version.add_weights(each)

    asyncio.run(add())
    version.finish()
    assert torch.equal(network.weight, committed["weight"])
    assert master.tolist() == torch.tensor([[1.0, 1.001, 2.0, 3.5]]).tolist()

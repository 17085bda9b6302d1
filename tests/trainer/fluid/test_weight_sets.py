"""Steps ahead of the weights in use: of an adapter, of one with an old policy, of all weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from services.trainer.fluid.engine import FluidEngine, StepScale
from services.trainer.fluid.sums import Term
from shared.diffusion.policy import load_policy
from shared.diffusion.training.tally import Tally
from shared.diffusion.weights.trained_weights import trained_parameters
from shared.recipe.recipe import Recipe, override
from tests.stored import read_back

FLUID = {
    "schedule.mode": "fluid", "rollout.workers": 0, "trainer.updates": 1, "trainer.ema": 0.9,
    "trainer.decay_steps": 1000,
}  # fmt: skip
NFT = {"algorithm.name": "diffusion-nft", "batch.groups": 2}
KINDS: dict[str, dict[str, Any]] = {
    "adapter": {},
    "old policy": {**NFT, "algorithm.nft_decay": 2},
    "old policy, two updates": {**NFT, "algorithm.nft_decay": 1, "trainer.updates": 2},
    "old policy without memory": {**NFT, "algorithm.nft_decay": 0, "trainer.updates": 2},
    "all weights": {"model.trained": "full", "algorithm.kl_beta": 0.0},
    "all weights, with masters": {
        "model.trained": "full", "algorithm.kl_beta": 0.0, "model.dtype": "bfloat16",
    },
}  # fmt: skip
FIRST_BATCH = 100
"""The old policy has a memory of its own by then, whatever its kind."""
Pair = tuple[FluidEngine, FluidEngine]
Weights = dict[str, torch.Tensor]


@pytest.fixture
def made(recipe: Recipe) -> Callable[[str], Pair]:
    """Return one engine that steps in place, and one that steps ahead."""

    def pair(kind: str) -> Pair:
        return engine(kind, 0), engine(kind, 1)

    def engine(kind: str, staleness: int) -> FluidEngine:
        changes = {**FLUID, **KINDS[kind], "schedule.max_staleness": staleness}
        given = override(recipe, changes)
        return FluidEngine(given, load_policy(given, {"transformer"}, trains=True))

    return pair


def total_of(engine: FluidEngine, seed: int) -> Term:
    generator = torch.Generator().manual_seed(seed)
    gradient = torch.randn(engine.layout.size, generator=generator).to(engine.layout.dtype)
    return Term(gradient, Tally().as_dict())


def held(engine: FluidEngine) -> Weights:
    network = engine._loaded.model.transformer
    return {n: p.detach().clone() for n, p in trained_parameters(network).items()}


def sampling(engine: FluidEngine) -> Weights:
    with engine._sets.sampling():
        return held(engine)


def are_equal(one: Weights, other: Weights) -> bool:
    return all(torch.equal(each, other[name]) for name, each in one.items())


@pytest.mark.parametrize("kind", KINDS)
def test_stepping_ahead_makes_the_bits_of_stepping_in_place(
    made: Callable[[str], Pair], kind: str
) -> None:
    in_place, ahead = made(kind)
    updates, given = in_place._recipe.trainer.updates, StepScale(2.0, 0.5)
    for batch in range(FIRST_BATCH, FIRST_BATCH + 3):
        before, sampled = held(ahead), sampling(ahead)
        assert are_equal(sampling(in_place), sampled)
        for update in range(updates):
            seed = 10 * batch + update
            in_place.take(batch, total_of(in_place, seed), given)
            ahead.take_concurrently(batch, total_of(ahead, seed), given)
            assert are_equal(held(ahead), before) and are_equal(sampling(ahead), sampled)
            assert ahead.checksum() == in_place.checksum()
            if update < updates - 1:
                with ahead.in_training():
                    assert are_equal(held(ahead), held(in_place))
                    assert ahead._sets.training_differs == in_place._sets.training_differs
        assert ahead.newest_digest() == in_place.newest_digest()
        ahead.take_ahead()
        assert ahead.newest_digest() == in_place.newest_digest()
        assert are_equal(held(ahead), held(in_place))
        assert are_equal(sampling(ahead), sampling(in_place))
        with ahead.before():
            assert are_equal(sampling(ahead), sampled)
    assert not are_equal(held(ahead), before)


@pytest.mark.parametrize("kind", ["old policy", "all weights, with masters"])
async def test_a_version_that_was_made_ahead_is_restored_to_the_last_bit(
    made: Callable[[str], Pair], kind: str
) -> None:
    other, ahead = made(kind)
    given = StepScale(2.0, 0.5)
    for batch in range(FIRST_BATCH, FIRST_BATCH + 2):
        ahead.take_ahead() if batch > FIRST_BATCH else None
        ahead.take_concurrently(batch, total_of(ahead, batch), given)
    saved = ahead.weights()
    assert (saved.sampling is not None) == (kind == "old policy")
    assert saved.digest == ahead._digest(ahead._sets.newest.trained)
    other.take(0, total_of(other, 0), given)
    await other.restore(read_back(saved.weights), read_back(saved.checkpoint))
    assert (other.newest_digest(), other.checksum()) == (ahead.newest_digest(), ahead.checksum())
    await ahead.restore(read_back(saved.weights), read_back(saved.checkpoint))
    assert (other.newest_digest(), other.checksum()) == (ahead.newest_digest(), ahead.checksum())
    other.take(FIRST_BATCH + 2, total_of(other, 3), given)
    ahead.take_concurrently(FIRST_BATCH + 2, total_of(ahead, 3), given)
    assert other.checksum() == ahead.checksum()


@pytest.mark.parametrize("kind", ["adapter", "old policy"])
def test_what_is_stored_is_the_newest_version_whatever_is_in_use(
    made: Callable[[str], Pair], kind: str
) -> None:
    in_place, ahead = made(kind)
    given = StepScale(2.0, 0.5)
    in_place.take(FIRST_BATCH, total_of(in_place, 0), given)
    ahead.take_concurrently(FIRST_BATCH, total_of(ahead, 0), given)
    one, other = in_place.weights(), ahead.weights()
    assert one.digest == other.digest
    pairs = [(one.weights, other.weights), (one.checkpoint, other.checkpoint)]
    if kind == "old policy":
        assert one.sampling is not None and other.sampling is not None
        assert one.sampling.digest == other.sampling.digest == ahead.newest_digest()
        pairs.append((one.sampling.weights, other.sampling.weights))
    for mine, theirs in pairs:
        assert [bytes(part.pack()) for part in mine] == [bytes(part.pack()) for part in theirs]

"""Steps beside the weights in use."""

import pytest
import torch

from services.trainer.engine import snapshot
from services.trainer.fluid.engine import FluidEngine, StepScale
from services.trainer.fluid.sums import Term
from shared.diffusion.policy import load_policy
from shared.diffusion.training.tally import Tally
from shared.diffusion.weights import trained_parameters
from shared.recipe.recipe import Recipe, override

FLUID = {
    "schedule.mode": "fluid", "rollout.workers": 0, "trainer.updates": 1, "trainer.ema": 0.9,
}  # fmt: skip


@pytest.fixture
def engines(recipe: Recipe) -> tuple[FluidEngine, FluidEngine]:
    """One that steps in place, and one that steps beside."""

    def engine(staleness: int) -> FluidEngine:
        given = override(recipe, {**FLUID, "schedule.max_staleness": staleness})
        return FluidEngine(given, load_policy(given, {"transformer"}, trains=True))

    return engine(0), engine(1)


def total_of(engine: FluidEngine, seed: int) -> Term:
    generator = torch.Generator().manual_seed(seed)
    gradient = torch.randn(engine.layout.size, generator=generator).to(engine.layout.dtype)
    return Term(gradient, Tally().as_dict())


def held(engine: FluidEngine) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in trained_parameters(engine._network).items()}


def test_stepping_beside_makes_the_bits_of_stepping_in_place(
    engines: tuple[FluidEngine, FluidEngine],
) -> None:
    in_place, beside = engines
    for batch in range(3):
        given, before = StepScale(2.0, 0.5), held(beside)
        in_place.take(batch, total_of(in_place, batch), given)
        beside.take_beside(batch, total_of(beside, batch), given)
        assert all(torch.equal(each, before[n]) for n, each in held(beside).items())
        assert beside.checksum() == in_place.checksum()
        assert beside.newest_digest() == in_place.weights_digest()
        beside.take_ahead()
        assert beside.weights_digest() == in_place.weights_digest()
        with beside.before():
            assert all(torch.equal(each, before[n]) for n, each in held(beside).items())
        now = held(in_place)
        assert all(torch.equal(each, now[n]) for n, each in held(beside).items())


def test_a_copy_is_named_by_the_checksum_and_not_hashed_for_it(
    engines: tuple[FluidEngine, FluidEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hashed(_: object) -> str:
        raise AssertionError("a second pass over all weights, for a name that nobody reads")

    monkeypatch.setattr(snapshot, "digest_of_parts", hashed)
    for engine in engines:
        engine.take(0, total_of(engine, 1), StepScale(2.0, 0.5))
        assert engine.weights().digest == engine.newest_digest()


def test_what_is_stored_is_the_newest_set_whatever_is_in_use(
    engines: tuple[FluidEngine, FluidEngine],
) -> None:
    in_place, beside = engines
    given = StepScale(2.0, 0.5)
    in_place.take(0, total_of(in_place, 0), given)
    beside.take_beside(0, total_of(beside, 0), given)
    one, other = in_place.weights(), beside.weights()
    assert one.digest == other.digest
    for mine, theirs in ((one.weights, other.weights), (one.checkpoint, other.checkpoint)):
        assert [bytes(part.pack()) for part in mine] == [bytes(part.pack()) for part in theirs]

"""DiffusionNFT's old policy: it generates, follows the trained one, and holds it back."""

import asyncio
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from services.trainer.engine.checkpoint import OLD_POLICY_PREFIX
from services.trainer.engine.trainer_engine import TrainerEngine
from shared.devices.chunks import Chunk
from shared.devices.protocols import GroupData, Snapshot
from shared.diffusion.generation import Generator
from shared.diffusion.policy import LoadedPolicy, load_policy
from shared.diffusion.sampling.tensors import pack, unpack
from shared.diffusion.training.forward_process import NoisedSamples, branches
from shared.diffusion.weights.trained_weights import load_weights, trained_tensors, weights_digest
from shared.diffusion.weights.weight_sets import WeightSets
from shared.learning.algorithms import old_policy_decay
from shared.recipe.recipe import Recipe
from tests.stored import as_bytes, packed, read_back
from tests.trainer.engine.test_algorithms import (
    SIZE,
    WINDOW,
    differences,
    error,
    gradient,
    group,
    recipe_of,
)


def nft(decay: int = 1, **changes: object) -> Recipe:
    """A recipe whose passes are always of the same size."""
    keys = {
        "algorithm__nft_decay": decay,
        "algorithm__nft_beta": 0.3,
        "algorithm__zero_advantages": "kept",
        "trainer__micro_batch": SIZE,
        "schedule__tsp_steps": WINDOW,
    } | changes
    return recipe_of("diffusion-nft", **keys)


@pytest.fixture(scope="module")
def loaded() -> tuple[LoadedPolicy, dict[str, Tensor]]:
    torch.set_num_threads(1)
    made = load_policy(nft(), {"transformer", "text", "decoder"})
    return made, trained_tensors(made.model.transformer)


@pytest.fixture
def policy(loaded: tuple[LoadedPolicy, dict[str, Tensor]]) -> LoadedPolicy:
    """Return the policy as it was loaded."""
    made, first = loaded
    made.sets.forget_old()
    load_weights(made.model.transformer, first)
    return made


def moved(tensors: dict[str, Tensor], by: float, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: t + by * torch.randn(t.shape, generator=generator) for n, t in tensors.items()}


def restore(engine: TrainerEngine, saved: Snapshot) -> None:
    asyncio.run(engine.restore(read_back(saved.weights), read_back(saved.checkpoint)))


def train(engine: TrainerEngine, data: GroupData, batch: int) -> None:
    engine.begin()
    engine.train(engine.read(data))
    engine.step(batch)


def test_the_published_decays() -> None:
    found = [[old_policy_decay(kind, step) for step in (1, 75, 76, 100, 600)] for kind in (0, 1, 2)]
    assert found[0] == [0.0] * 5
    assert found[1] == pytest.approx([0.001, 0.075, 0.076, 0.1, 0.5])
    assert found[2] == pytest.approx([0.0, 0.0, 0.0075, 0.1875, 0.999])


def rows() -> NoisedSamples:
    generator = torch.Generator().manual_seed(2)
    clean, noise = torch.randn(2, 4, 3, 2, generator=generator, dtype=torch.float64)
    sigma = torch.tensor([1.0, 0.7, 0.4, 0.1], dtype=torch.float64)
    s = sigma.reshape(-1, 1, 1)
    advantage = torch.tensor([2.0, -1.0, 0.0, 7.0], dtype=torch.float64)
    noised = (1 - s) * clean + s * noise
    return NoisedSamples(
        noised=noised, sigma=sigma, clean=clean, advantage=advantage, conditions={}
    )


@pytest.mark.parametrize("beta", [0.1, 1.0, 3.0])
def test_the_loss_away_from_the_old_policy_is_its_formula(beta: float) -> None:
    """Values are compared with the paper's code in float64, and gradients with differences."""
    given, clip = rows(), 5.0
    generator = torch.Generator().manual_seed(4)
    old, velocity = torch.randn(2, 4, 3, 2, generator=generator, dtype=torch.float64)
    s = given.sigma.reshape(-1, 1, 1)

    def clean_by(v: Tensor) -> Tensor:
        return given.noised - s * v

    plus, minus = beta * velocity + (1 - beta) * old, (1 + beta) * old - beta * velocity
    divisors = [(clean_by(v) - given.clean).abs().flatten(1).mean(1) for v in (plus, minus)]

    def published(v: Tensor) -> Tensor:
        p = (given.advantage.clamp(-clip, clip) / clip) / 2 + 0.5
        towards, away = beta * v + (1 - beta) * old, (1 + beta) * old - beta * v
        good, bad = (
            ((clean_by(branch) - given.clean) ** 2).flatten(1).mean(1) / divisor
            for branch, divisor in zip((towards, away), divisors, strict=True)
        )
        return clip * (p * good / beta + (1 - p) * bad / beta)

    at = velocity.clone().requires_grad_()
    found = branches(at, old, given, beta=beta, advantage_clip=clip)
    whole = found.surrogate.per_row + found.constant
    torch.testing.assert_close(whole.detach(), published(velocity), rtol=1e-12, atol=0)
    whole.sum().backward()
    assert at.grad is not None
    torch.testing.assert_close(at.grad, differences(published, velocity), rtol=1e-5, atol=1e-7)
    assert at.grad[2].abs().max() > 1e-3, "a row without advantage is held near the old policy"


def test_the_gradient_depends_on_beta_once_the_policies_differ(policy: LoadedPolicy) -> None:
    data = group(nft(), policy)
    load_weights(policy.model.transformer, moved(trained_tensors(policy.model.transformer), 0.1, 5))
    whole = Chunk(SIZE, WINDOW)
    found = [gradient(nft(algorithm__nft_beta=b), policy, data, whole)[0] for b in (0.1, 1.0)]
    assert error(*found) < 1e-5, "v_old is v: b cancels out"
    policy.sets.keep_old()
    load_weights(policy.model.transformer, moved(trained_tensors(policy.model.transformer), 0.1, 6))
    policy.sets.compare_old()
    held = [gradient(nft(algorithm__nft_beta=b), policy, data, whole)[0] for b in (0.1, 1.0)]
    assert error(*held) > 0.1
    for cut, chunk in (((1, 3), Chunk(1, 1)), ((SIZE,), Chunk(2, 3))):
        before = trained_tensors(policy.model.transformer)
        pieces, _ = gradient(nft(algorithm__nft_beta=1.0), policy, group_of(data, cut), chunk)
        assert error(pieces, held[1]) < 1e-5
        assert weights_digest(before) == weights_digest(trained_tensors(policy.model.transformer))


def group_of(data: GroupData, cut: tuple[int, ...]) -> GroupData:
    """Cut a group's one fragment into several."""
    whole = unpack(data.trajectories[0])
    ends = [sum(cut[: place + 1]) for place in range(len(cut))]
    parts = [slice(end - size, end) for end, size in zip(ends, cut, strict=True)]
    packed_parts = (pack({n: t[part].clone() for n, t in whole.items()}) for part in parts)
    return replace(data, trajectories=tuple(packed_parts))


def test_the_old_policy_follows_after_each_batch_and_generates(policy: LoadedPolicy) -> None:
    recipe = nft(1, trainer__learning_rate=0.01)
    engine = TrainerEngine(recipe, policy)
    first = trained_tensors(policy.model.transformer)
    data = group(recipe, policy)
    assert engine.sampling_digest() == engine.weights_digest() == weights_digest(first)
    assert engine.weights().sampling is None, "version 0 is generated by what is trained"
    train(engine, data, 0)
    second = trained_tensors(policy.model.transformer)
    wanted = {name: 0.001 * first[name] + (1 - 0.001) * second[name] for name in first}
    saved = engine.weights()
    assert saved.sampling is not None and saved.digest == weights_digest(second)
    found = unpack(packed(saved.sampling.weights))
    assert all(torch.allclose(found[name], wanted[name], atol=1e-7) for name in wanted)
    assert weights_digest(found) == saved.sampling.digest == engine.sampling_digest()
    assert saved.sampling.digest != saved.digest
    assert unpack(packed(saved.checkpoint))[f"{OLD_POLICY_PREFIX}{min(found)}"].equal(
        found[min(found)]
    )


@pytest.mark.parametrize("decay", [0, 1])
def test_with_two_updates_the_old_policy_stays_that_of_the_version(
    policy: LoadedPolicy, decay: int
) -> None:
    recipe = nft(decay, trainer__updates=2, batch__groups=2, trainer__learning_rate=0.01)
    engine = TrainerEngine(recipe, policy)
    generator, before = Generator(recipe, policy), engine.weights_digest()
    data = group(recipe, policy)
    engine.begin()
    engine.train(engine.read(data))
    engine.step(0)
    assert engine.weights_digest() != before == engine.sampling_digest()
    assert group(recipe, policy) == data, "a lent device goes on with the version's weights"
    assert generator.weights_digest() == before
    engine.train(engine.read(data))
    engine.step(0)
    assert (engine.sampling_digest() == engine.weights_digest()) == (decay == 0)
    assert before != engine.sampling_digest()


def test_a_lagging_trainer_goes_on_to_the_last_bit(policy: LoadedPolicy) -> None:
    recipe = nft(1, trainer__learning_rate=0.01)
    straight = TrainerEngine(recipe, policy)
    data = group(recipe, policy)
    for batch in range(3):
        train(straight, data, batch)
        if batch == 1:
            saved = straight.weights()
    resumed = TrainerEngine(recipe)
    train(resumed, data, 0)  # something else was in its memory
    restore(resumed, saved)
    assert saved.sampling is not None
    digests = (resumed.weights_digest(), resumed.sampling_digest())
    assert digests == (saved.digest, saved.sampling.digest)
    train(resumed, data, 2)
    both = [each.weights() for each in (resumed, straight)]
    assert as_bytes(both[0]) == as_bytes(both[1])
    assert both[0].sampling is not None and both[1].sampling is not None
    assert both[0].sampling.digest == both[1].sampling.digest


def test_a_lent_device_generates_by_the_old_policy_and_goes_back(policy: LoadedPolicy) -> None:
    recipe = nft(1, trainer__learning_rate=0.05)
    engine = TrainerEngine(recipe, policy)
    data = group(recipe, policy)
    train(engine, data, 0)
    saved = engine.weights()
    assert saved.sampling is not None
    trained = trained_tensors(policy.model.transformer)
    lent = group(recipe, policy)
    assert weights_digest(trained_tensors(policy.model.transformer)) == saved.digest
    rollout = load_policy(recipe, {"transformer", "text", "decoder"})
    Generator(recipe, rollout).load(packed(saved.sampling.weights))
    assert group(recipe, rollout) == lent
    load_weights(rollout.model.transformer, trained)
    assert group(recipe, rollout) != lent


def test_weights_that_change_places_are_digested_once_each(policy: LoadedPolicy) -> None:
    sets, in_use = policy.sets, policy.in_use
    first = trained_tensors(policy.model.transformer)
    sets.keep_old()
    load_weights(policy.model.transformer, moved(first, 0.1, 5))
    sets.compare_old()
    second = in_use.digest()
    seen = []
    for _ in range(2):
        with sets.sampling():
            seen.append(in_use.digest())
        seen.append(in_use.digest())
    assert seen == [weights_digest(first), second] * 2 and len(in_use._seen) == 2
    other = WeightSets(policy.model.transformer)
    with other.sampling():
        assert in_use.digest() == second

"""Every objective against its formula; and the same gradient however a batch is cut."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shared.devices.chunks import Chunk
from shared.devices.protocols import GroupData
from shared.diffusion.generation import Generator
from shared.diffusion.policy import LoadedPolicy, load_policy
from shared.diffusion.sampling.tensors import pack, unpack, unpack_trajectory
from shared.diffusion.sampling.transition import NoiseStep, transition
from shared.diffusion.training.forward_process import NoisedSamples, branches
from shared.diffusion.training.gradient import GradientTransaction
from shared.diffusion.training.loss import guarded_surrogate
from shared.diffusion.training.rows import read_group
from shared.errors import ContractError
from shared.recipe.recipe import Recipe, override
from tests.shared.diffusion.digits import PROMPT, RECIPE, task
from tests.shared.diffusion.shared_noise import move

SIZE, WINDOW = 4, 3
NAMES = ("flow-grpo", "cps", "dance-grpo", "grpo-guard", "diffusion-nft", "awm", "dpo")


def recipe_of(name: str, **changes: object) -> Recipe:
    variants = {"cps": "cps", "dance-grpo": "dance"}
    return override(
        RECIPE,
        {
            "algorithm.name": name,
            "sampling.variant": variants.get(name, "flow"),
            "sampling.window": WINDOW,
            "sampling.first_window_starts": (0, 0),
            "algorithm.kl_beta": 0.0,
            "batch.groups": 1,
            "batch.group_size": SIZE,
            "schedule.fragment_size": "auto",
            "schedule.tsp_steps": "auto",
            "schedule.tag": "auto",
            "trainer.micro_batch": "auto",
        }
        | {key.replace("__", "."): value for key, value in changes.items()},
    )


@pytest.fixture(scope="module")
def policy(recipe: Recipe) -> LoadedPolicy:
    """Load two blocks of the network with an adapter that changes what is sampled."""
    small = override(recipe_of("flow-grpo"), {"model.folder": recipe.model.folder})
    loaded = load_policy(small, {"transformer", "text", "decoder"})
    move(loaded, 0.1)
    return loaded


def group(recipe: Recipe, policy: LoadedPolicy, cut: tuple[int, ...] = (SIZE,)) -> GroupData:
    """Return a group as rollout leaves it."""
    generator = Generator(recipe, policy)
    ends = [sum(cut[: place + 1]) for place in range(len(cut))]
    tasks = [
        task(first_sample=end - size, num_samples=size) for end, size in zip(ends, cut, strict=True)
    ]
    return GroupData(
        trajectories=tuple(generator.generate(each).trajectory for each in tasks),
        conditions=generator.conditions(PROMPT),
        advantages=(1.5, -0.5, 0.25, -1.25),
    )


def gradient(
    recipe: Recipe, policy: LoadedPolicy, data: GroupData, chunk: Chunk
) -> tuple[dict[str, Tensor], dict[str, float]]:
    transaction = GradientTransaction.from_recipe(recipe, policy.model, policy.sets)
    transaction.begin()
    transaction.accumulate(read_group(recipe, data), chunk)
    parameters = policy.model.transformer.named_parameters()
    found = {name: p.grad.clone() for name, p in parameters if p.grad is not None}
    return found, transaction.metrics()


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    difference = sum(float((found[name] - wanted[name]).square().sum()) for name in wanted)
    return math.sqrt(difference / sum(float(tensor.square().sum()) for tensor in wanted.values()))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "beta", [pytest.param(0.0, id="alone", marks=pytest.mark.slow), pytest.param(0.04, id="kl")]
)
def test_the_gradient_does_not_depend_on_how_a_batch_is_cut(
    policy: LoadedPolicy, name: str, beta: float
) -> None:
    recipe = recipe_of(name, algorithm__kl_beta=beta)
    whole = group(recipe, policy)
    wanted, metrics = gradient(recipe, policy, whole, Chunk(SIZE, WINDOW))
    assert metrics["onpolicy_ratio_error"] <= 1e-6
    assert any(tensor.any() for tensor in wanted.values())
    assert (metrics["kl"] > 0) == (beta > 0)
    for cut, chunk in (((1, 3), Chunk(1, 1)), ((2, 2), Chunk(3, 2)), ((SIZE,), Chunk(2, 3))):
        found, _ = gradient(recipe, policy, group(recipe, policy, cut), chunk)
        assert error(found, wanted) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_a_group_without_advantages_has_no_gradient(policy: LoadedPolicy, name: str) -> None:
    recipe = recipe_of(name)
    data = replace(group(recipe, policy), advantages=(0.0,) * SIZE)
    found, metrics = gradient(recipe, policy, data, Chunk(SIZE, WINDOW))
    assert all(float(tensor.abs().max()) < 1e-9 for tensor in found.values())
    assert metrics["zero_advantage_fraction"] == 1


def differences(loss: Callable[[Tensor], Tensor], at: Tensor, width: float = 1e-6) -> Tensor:
    """Central differences of a sum over rows, element by element."""
    found = torch.zeros_like(at)
    for place in range(at.numel()):
        shift = torch.zeros_like(at).flatten()
        shift[place] = width
        shift = shift.reshape(at.shape)
        up, down = float(loss(at + shift).sum()), float(loss(at - shift).sum())
        found.view(-1)[place] = (up - down) / (2 * width)
    return found


def steps(variant: str) -> tuple[NoiseStep, Tensor, Tensor, Tensor]:
    """Three rows in float64: the step, the latents, the old velocity, where it arrived."""
    generator = torch.Generator().manual_seed(11)
    x, v, z = torch.randn(3, 3, 2, 2, generator=generator, dtype=torch.float64)
    step = NoiseStep(
        sigma=torch.tensor([1.0, 0.75, 0.5]), sigma_next=torch.tensor([0.75, 0.5, 0.25]),
        sigma_max=0.75, noise_level=0.7, variant=variant,  # type: ignore[arg-type]
    )  # fmt: skip
    return step, x, v, transition(v, x, step, noise=z).latents


@pytest.mark.parametrize("variant", ["flow", "dance"])
def test_the_guarded_loss_is_its_formula(variant: str) -> None:
    step, x, old, arrived = steps(variant)
    before = transition(old, x, step, arrived=arrived)
    advantage, clip = torch.tensor([1.0, -2.0, 9.0], dtype=torch.float64), 0.02
    velocity = old + 0.05 * torch.randn(old.shape, generator=torch.Generator().manual_seed(5))

    def written_out(v: Tensor) -> Tensor:
        taken = transition(v, x, step, arrived=arrived)
        scale = (taken.noise_scale * taken.sqrt_neg_dt).reshape(-1, 1, 1)
        drift = (((taken.mean - before.mean) ** 2) / (2 * scale)).flatten(1).mean(1)
        normal = torch.distributions.Normal
        gained = (
            normal(taken.mean, scale).log_prob(arrived)
            - normal(before.mean, scale).log_prob(arrived)
        ).flatten(1).mean(1)  # fmt: skip
        ratio = torch.exp(scale.flatten() * gained + drift)
        bounded = advantage.clamp(-5, 5)
        worst = torch.minimum(bounded * ratio, bounded * ratio.clamp(1 - clip, 1 + clip))
        return -worst / (step.sigma - step.sigma_next)

    at = velocity.clone().requires_grad_()
    found = guarded_surrogate(
        transition(at, x, step, arrived=arrived), before.log_prob, before.mean, advantage,
        clip_range=clip, advantage_clip=5.0,
    )  # fmt: skip
    torch.testing.assert_close(found.per_row.detach(), written_out(velocity), rtol=1e-9, atol=0)
    found.per_row.sum().backward()
    assert at.grad is not None
    torch.testing.assert_close(at.grad, differences(written_out, velocity), rtol=1e-5, atol=1e-8)


def test_a_guarded_ratio_does_not_drift_below_one() -> None:
    """The mean log-prob falls by the square of the move; the guarded ratio makes up for it."""
    generator = torch.Generator().manual_seed(0)
    x, v, z = torch.randn(3, 4000, 64, generator=generator, dtype=torch.float64)
    ones = torch.ones(4000)
    step = NoiseStep(sigma=0.6 * ones, sigma_next=0.5 * ones, sigma_max=0.9, noise_level=0.7)
    before = transition(v, x, step, noise=z)
    after = transition(v + 0.6, x, step, arrived=before.latents)
    plain = torch.exp(after.log_prob - before.log_prob).log().mean()
    found = guarded_surrogate(
        after, before.log_prob, before.mean, torch.ones(4000), clip_range=0.1, advantage_clip=5.0
    )
    assert float(plain) < -0.01
    assert abs(float(found.ratio.log().mean())) < 0.001


def test_the_nft_loss_is_its_formula() -> None:
    generator = torch.Generator().manual_seed(2)
    clean, noise, old = torch.randn(3, 4, 3, 2, generator=generator, dtype=torch.float64)
    sigma = torch.tensor([1.0, 0.7, 0.4, 0.1], dtype=torch.float64)
    s = sigma.reshape(-1, 1, 1)
    noised = (1 - s) * clean + s * noise
    advantage, beta, clip = torch.tensor([2.0, -1.0, 0.0, 7.0]), 0.4, 5.0
    rows = NoisedSamples(
        noised=noised, sigma=sigma, clean=clean, advantage=advantage, conditions={}
    )
    share = 0.5 + advantage.double().clamp(-clip, clip) / (2 * clip)

    def scale(v: Tensor) -> Tensor:
        distance: Tensor = (noised - s * v - clean).abs().flatten(1).mean(1)
        return distance

    fixed = scale(old)  # at the old policy both branches are there

    def written_out(v: Tensor) -> Tensor:
        def error(branch: Tensor) -> Tensor:
            squares: Tensor = ((noised - s * branch - clean) ** 2).flatten(1).mean(1)
            return squares / fixed

        good, bad = error(beta * v + (1 - beta) * old), error((1 + beta) * old - beta * v)
        return clip * (share * good + (1 - share) * bad) / beta

    at = old.clone().requires_grad_()
    found = branches(at, old, rows, beta=beta, advantage_clip=clip)
    whole = found.surrogate.per_row + found.constant
    torch.testing.assert_close(whole.detach(), written_out(old), rtol=1e-9, atol=0)
    whole.sum().backward()
    assert at.grad is not None
    torch.testing.assert_close(at.grad, differences(written_out, old), rtol=1e-5, atol=1e-8)
    # What the module says of it: A times the gradient of a denoising loss.
    denoising = -2 * s * (noised - s * old - clean) / (fixed.reshape(-1, 1, 1) * 6)
    wanted = advantage.double().clamp(-clip, clip).reshape(-1, 1, 1) * denoising
    torch.testing.assert_close(at.grad, wanted, rtol=1e-9, atol=1e-12)


def test_samples_are_noised_alike_however_they_are_cut(policy: LoadedPolicy) -> None:
    recipe = recipe_of("diffusion-nft")
    device = torch.device("cpu")
    whole, cut = (read_group(recipe, group(recipe, policy, c)) for c in ((SIZE,), (1, 2, 1)))
    [rows] = whole.rows(Chunk(SIZE, WINDOW), device)
    assert isinstance(rows, NoisedSamples)
    pieces = [each.noised for each in cut.rows(Chunk(1, 2), device)]  # type: ignore[attr-defined]
    torch.testing.assert_close(torch.cat(pieces), rows.noised, rtol=0, atol=1e-5)
    sigmas = rows.sigma.reshape(SIZE, WINDOW)
    assert all(len(set(row.tolist())) == WINDOW for row in sigmas)
    assert len({tuple(row.tolist()) for row in sigmas}) > 1, "each sample has its own"


def test_a_guarded_run_keeps_means_and_refuses_paths_without(policy: LoadedPolicy) -> None:
    guarded, plain = recipe_of("grpo-guard"), recipe_of("flow-grpo")
    [kept] = group(guarded, policy).trajectories
    path = unpack_trajectory(kept)
    assert path.means is not None and path.means.shape == path.latents[:, 1:].shape
    with pytest.raises(ContractError, match="means"):
        read_group(guarded, group(plain, policy))
    tensors = unpack(kept)
    with pytest.raises(ContractError, match=r"do not fit each other.*means"):
        unpack_trajectory(pack({**tensors, "means": tensors["means"][:, :1]}))
    with pytest.raises(ContractError, match="not finite"):
        unpack_trajectory(pack({**tensors, "means": tensors["means"] / 0}))


@pytest.mark.parametrize("broken", ["names", "seeds", "values", "size"])
def test_broken_finished_samples_are_refused(policy: LoadedPolicy, broken: str) -> None:
    recipe = recipe_of("diffusion-nft")
    data = group(recipe, policy)
    tensors = unpack(data.trajectories[0])
    match broken:
        case "names":
            tensors["more"] = torch.zeros(1)
        case "seeds":
            tensors["seeds"] = tensors["seeds"][:2]
        case "values":
            tensors["samples"] = tensors["samples"] / 0
        case _:
            tensors = {name: tensor[:2] for name, tensor in tensors.items()}
    with pytest.raises(ContractError):
        read_group(recipe, replace(data, trajectories=(pack(tensors),)))

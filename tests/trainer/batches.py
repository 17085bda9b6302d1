"""A batch as rollout would leave it: real trajectories of the demo's model, cut as wished."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from services.trainer.engine.trainer_engine import TrainerEngine
from shared.devices.protocols import GroupData
from shared.diffusion.generation import Generator
from shared.diffusion.loading.models import Conditions, repeat_rows
from shared.diffusion.policy import LoadedPolicy, load_policy, sampling_plan
from shared.diffusion.sampling.sampler import Denoising, Trajectory, denoise
from shared.diffusion.sampling.tensors import pack, pack_trajectory, unpack
from shared.learning.algorithms import ALGORITHMS
from shared.messages.contracts import Prompt
from shared.recipe.recipe import Recipe
from tests import examples

PROMPTS = ("a handwritten three", "a handwritten seven", "a handwritten zero")


@dataclass(frozen=True)
class Group:
    trajectory: Trajectory
    conditions: bytes
    advantages: list[float]

    def cut(self, sizes: Sequence[int]) -> list[bytes]:
        """Return its fragments, of these sizes, as they are stored."""
        path, ends = self.trajectory, list(accumulate(sizes))
        samples = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        return [
            pack_trajectory(
                replace(
                    path,
                    latents=path.latents[each],
                    log_probs=path.log_probs[each],
                    means=None if path.means is None else path.means[each],
                    trained=None if path.trained is None else path.trained[each],
                )
            )
            for each in samples
        ]


def train_group(
    engine: TrainerEngine,
    trajectories: Sequence[bytes],
    conditions: bytes,
    advantages: Sequence[float],
) -> None:
    """Read and train a group, given its fragments in order."""
    data = GroupData(
        trajectories=tuple(trajectories), conditions=conditions, advantages=tuple(advantages)
    )
    engine.train(engine.read(data))


def make_batch(
    recipe: Recipe, *, off_policy: float = 0.0, loaded: LoadedPolicy | None = None
) -> list[Group]:
    """Groups with windows of their own; ``off_policy`` moves the stored log-probs by about that
    much, so that the clip acts on some rows."""
    loaded = loaded or load_policy(recipe, {"transformer", "text", "decoder"})
    generator = torch.Generator().manual_seed(7)
    size = recipe.batch.group_size
    groups = []
    for number, prompt in enumerate(PROMPTS):
        conditions = loaded.model.encode(prompt, guidance=recipe.model.guidance)
        made = generate(recipe, loaded, conditions, window_start=number)
        moved = off_policy * torch.randn(made.log_probs.shape, generator=generator)
        trajectory = replace(made, log_probs=made.log_probs + moved)
        advantages = torch.randn(size, generator=generator).tolist()
        groups.append(Group(trajectory, pack(conditions), advantages))
    return groups


def groups_of(recipe: Recipe) -> list[GroupData]:
    """Return three groups of two fragments, each with a sample without advantage; if they share
    noise, one group is of unlike devices."""
    groups = [
        GroupData(
            trajectories=tuple(group.cut((2, 2))),
            conditions=group.conditions,
            advantages=(0.0, *group.advantages[1:]),
            staleness=int(number == 2),
        )
        for number, group in enumerate(make_batch(recipe, off_policy=3e-3))
    ]
    if recipe.sampling.shared_noise:
        first, second = groups[1].trajectories
        tensors = unpack(second)
        tensors["start"] += 1e-3
        groups[1] = replace(groups[1], trajectories=(first, pack(tensors)))
    return groups


def fresh_groups(recipe: Recipe, loaded: LoadedPolicy) -> list[GroupData]:
    """Return groups by the network as it is, in fragments of `Schedule.fragment_size` samples."""
    size, fragment = recipe.batch.group_size, recipe.schedule.fragment_size
    assert isinstance(fragment, int)
    if not ALGORITHMS[recipe.algorithm.name].has_window:
        return finished_groups(recipe, loaded, range(0, size, fragment))
    groups = []
    for number, prompt in enumerate(PROMPTS[: recipe.batch.groups]):
        conditions = loaded.model.encode(prompt, guidance=recipe.model.guidance)
        made = [
            generate(
                recipe,
                loaded,
                conditions,
                window_start=number,
                seeds=range(first, first + fragment),
            )
            for first in range(number * size, (number + 1) * size, fragment)
        ]
        groups.append(
            GroupData(
                trajectories=tuple(map(pack_trajectory, made)),
                conditions=pack(conditions),
                advantages=tuple((-1.0) ** sample for sample in range(size)),
            )
        )
    return groups


def finished_groups(
    recipe: Recipe, loaded: LoadedPolicy, first_samples: Sequence[int]
) -> list[GroupData]:
    """Return groups without stochastic steps, by the policy that samples."""
    size, generator = recipe.batch.group_size, Generator(recipe, loaded)

    def trajectory(group: int, first: int) -> bytes:
        task = examples.task(
            group=group, first_sample=first, num_samples=first_samples[1],
            prompt=Prompt(text=PROMPTS[group]),
        )  # fmt: skip
        return generator.generate(task).trajectory

    return [
        GroupData(
            trajectories=tuple(trajectory(number, first) for first in first_samples),
            conditions=generator.conditions(PROMPTS[number]),
            advantages=tuple(0.5 * (-1.0) ** sample for sample in range(size)),
        )
        for number in range(recipe.batch.groups)
    ]


def noise_group(recipe: Recipe, loaded: LoadedPolicy) -> GroupData:
    """Return a group that all ranks generate at the same time, each all of it, by a network of Wan
    that lies on all of them, without text encoders and decoder: its prompt is noise."""
    config: Any = loaded.model.transformer.config
    conditions = {
        "text": torch.randn(1, 4, config.text_dim, generator=torch.Generator().manual_seed(5))
    }
    shape = (config.in_channels, 1, recipe.model.height // 8, recipe.model.width // 8)
    seeds = range(recipe.batch.group_size)
    made = [
        generate(recipe, loaded, conditions, window_start=0, seeds=[seed], shape=shape)
        for seed in seeds
    ]
    return GroupData(
        trajectories=tuple(map(pack_trajectory, made)),
        conditions=pack(conditions),
        advantages=tuple((-1.0) ** seed for seed in seeds),
    )


def generate(
    recipe: Recipe,
    loaded: LoadedPolicy,
    conditions: Conditions,
    *,
    window_start: int,
    seeds: Sequence[int] = (),
    shape: tuple[int, ...] | None = None,
) -> Trajectory:
    """A group's samples, or those of these seeds, by the network as it is."""
    size = recipe.batch.group_size
    seeds = seeds or range(window_start * size, (window_start + 1) * size)
    rows = repeat_rows(conditions, len(seeds))
    denoising = Denoising(
        sampling_plan(recipe, window_start=window_start),
        seeds=seeds,
        shape=shape
        or loaded.model.latent_shape(height=recipe.model.height, width=recipe.model.width),
        device=loaded.device,
        shared_seed=window_start if recipe.sampling.shared_noise else None,
    )
    denoise(
        lambda latents, sigma: loaded.model.velocity(
            latents,
            sigma,
            {name: each[: len(latents)] for name, each in rows.items()},
            guidance=recipe.model.guidance,
        ),
        denoising,
    )
    return denoising.trajectory()

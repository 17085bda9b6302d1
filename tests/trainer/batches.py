"""A batch as rollout would leave it: real trajectories of the demo's model, cut as wished."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.rollout.engine import RolloutEngine
from shared.contracts import Fragment, GenerateFragment, Policy, Prompt
from shared.diffusion.sampler import Trajectory
from shared.diffusion.tensors import pack_trajectory, unpack_trajectory
from shared.recipe import Recipe

PROMPTS = ("a handwritten three", "a handwritten seven", "a handwritten zero")


@dataclass(frozen=True)
class Group:
    trajectory: Trajectory
    conditions: bytes
    advantages: list[float]

    def cut(self, sizes: Sequence[int]) -> list[bytes]:
        """As fragments of these sizes, as they lie in the store."""
        parts = zip(
            self.trajectory.latents.split(list(sizes)),
            self.trajectory.log_probs.split(list(sizes)),
            strict=True,
        )
        return [
            pack_trajectory(
                Trajectory(
                    latents=latents,
                    log_probs=log_probs,
                    step_indices=self.trajectory.step_indices,
                    sigmas=self.trajectory.sigmas,
                )
            )
            for latents, log_probs in parts
        ]


def make_batch(recipe: Recipe, *, off_policy: float = 0.0) -> list[Group]:
    """Groups with windows of their own; ``off_policy`` moves the stored log-probs by about that
    much, so that the clip acts on some rows."""
    engine = RolloutEngine(recipe)
    generator = torch.Generator().manual_seed(7)
    size = recipe.batch.group_size
    groups = []
    for number, prompt in enumerate(PROMPTS):
        conditions = engine.conditions(prompt)
        task = GenerateFragment(
            fragment=Fragment(batch=0, group=number, first_sample=0, num_samples=size),
            policy=Policy(version=0, weights_digest="0" * 64),
            prompt=Prompt(text=prompt),
            window_start=number,
        )
        made = unpack_trajectory(engine.generate(task).trajectory)
        moved = off_policy * torch.randn(made.log_probs.shape, generator=generator)
        trajectory = Trajectory(
            latents=made.latents,
            log_probs=made.log_probs + moved,
            step_indices=made.step_indices,
            sigmas=made.sigmas,
        )
        advantages = torch.randn(size, generator=generator).tolist()
        groups.append(Group(trajectory, conditions, advantages))
    return groups

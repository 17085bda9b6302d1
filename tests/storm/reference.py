"""Computes what a run on the emulated cluster must come to: every sample trained once.

At a staleness of 0 nothing of it depends on which device does what, when, in which attempt.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import safetensors.numpy

from bench.cluster.blobs import EmulatedWeights, media_blob, samples_of, trajectory_blob
from bench.cluster.build import Emulation
from bench.cluster.ledger import Ledger, entries_of
from bench.cluster.scoring import EmulatedScorer
from bench.cluster.setting import Setting
from shared.devices.protocols import GroupData
from shared.devices.slices import GroupSlice
from shared.messages.contracts import Fragment, GenerateFragment, Policy
from shared.recipe.recipe import Recipe
from shared.run.run_recipe import prompt_order


@dataclass(frozen=True, slots=True)
class Expected:
    """One version."""

    weights_digest: str
    """Digest of the weights that generate."""
    trained_digest: str
    rewards: tuple[tuple[float, ...], ...] = ()
    """Rewards of the batch that it was trained from: one row per group."""


def versions(setting: Setting, recipe: Recipe) -> Iterator[Expected]:
    """0, 1, 2, ..., without end."""
    emulation = Emulation.of(setting)
    shape, sizes = emulation.profile.shape, emulation.sizes
    prompts = prompt_order(recipe)
    ledger = Ledger(shape.group_size, shape.trained_steps)
    whole, batch = range(shape.group_size), 0
    part = shape.groups // setting.updates
    sampling = EmulatedWeights.first(setting.seed)
    weights, trained = sampling.digest, sampling.digest
    yield Expected(weights, trained)
    while True:
        rewards = []
        for group in range(shape.groups):
            task = GenerateFragment(
                fragment=Fragment(
                    batch=batch, group=group, first_sample=0, num_samples=len(whole), attempt=0
                ),
                policy=Policy(version=batch, weights_digest=weights),
                prompt=prompts.of_group(batch, group, shape.groups),
                window_start=0,
                worker="reference",
            )
            samples = samples_of(task, weights)
            images = safetensors.numpy.load(media_blob(samples, sizes.media))["images"]
            scores = EmulatedScorer().score(images, [{}] * len(whole))
            data = GroupData(
                trajectories=(trajectory_blob(samples, sizes.window, sizes.start),),
                conditions=b"",
                advantages=recipe.advantages.of(scores, {"emulated": scores}),
            )
            ledger.take(entries_of(data, whole, sizes.start), GroupSlice(whole))
            rewards.append(tuple(scores))
            if (group + 1) % part == 0:
                trained = ledger.close(batch, shape.samples // setting.updates, trained)
                ledger.clear()
        follows = sampling.following(trained) if setting.lags else EmulatedWeights(trained)
        sampling, weights = follows, follows.digest
        batch += 1
        yield Expected(weights, trained, tuple(rewards))

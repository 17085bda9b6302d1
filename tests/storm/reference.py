"""Computes versions from the commit records before them, on one device and in order.

A sample's bytes follow from its seed, its prompt and the weights that the record names for its
group, and a version's digest from the bytes that were trained. So nothing depends on which device
generated, scored and trained a sample, when, or in which attempt.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import safetensors.numpy

from bench.cluster.blobs import EmulatedWeights, media_blob, samples_of, trajectory_blob
from bench.cluster.build import Emulation
from bench.cluster.ledger import entries_of
from bench.cluster.scoring import EmulatedScorer
from shared.devices.protocols import GroupData
from shared.messages.contracts import Fragment, GenerateFragment
from shared.recipe.recipe import Recipe
from shared.run.commits import CommitRecord, TrainedGroup
from shared.run.run_recipe import prompt_order
from tests.world.members import add_rows, layout_of, next_digest


@dataclass(frozen=True, slots=True)
class Expected:
    """One version."""

    weights_digest: str
    """Digest of the weights that generate."""
    trained_digest: str
    rewards: tuple[tuple[float, ...], ...]
    """Rewards of the batch that it was trained from: one row per group."""


class Reference:
    def __init__(self, emulation: Emulation, recipe: Recipe) -> None:
        self._setting, self._recipe = emulation.setting, recipe
        self._shape, self._sizes = emulation.profile.shape, emulation.sizes
        self._prompts = prompt_order(recipe)
        self._layout = layout_of(self._shape)

    def first(self) -> str:
        """Return the digest of version 0."""
        return EmulatedWeights.first(self._setting.seed).digest

    def next(self, records: Sequence[CommitRecord], trained: Sequence[TrainedGroup]) -> Expected:
        """Return the version that these groups lead to after the last of the records."""
        before = records[-1]
        groups = [self._group(records, group) for group in trained]
        digest = self._counted(before, [data for data, _ in groups])
        rewards = tuple(scores for _, scores in groups)
        return Expected(self._sampling(before, digest), digest, rewards)

    def _sampling(self, before: CommitRecord, trained: str) -> str:
        """Return the digest of what samples a version."""
        old = EmulatedWeights(before.policy.weights_digest)
        return old.following(trained).digest if self._recipe.algorithm.nft_decay else trained

    def compare(
        self, records: Sequence[CommitRecord], flawed: Collection[tuple[str, int]] = ()
    ) -> list[str]:
        """Return how versions differ from what their batches must lead to.

        Args:
            flawed: names of devices and the versions that they have made with other bits: if such a
                device commits, the others take its version.
        """
        found = [] if records[0].policy.weights_digest == self.first() else ["other first weights"]
        for number, (_, record) in enumerate(pairwise(records), 1):
            expected = self.next(records[:number], record.trained)
            if (record.worker.rpartition("-")[0], number) in flawed:
                trained = record.learned.digest
                sampling = self._sampling(records[number - 1], trained)
                expected = replace(expected, weights_digest=sampling, trained_digest=trained)
            found += [f"version {number}: {each}" for each in _differences(record, expected)]
        return found

    def _group(
        self, records: Sequence[CommitRecord], group: TrainedGroup
    ) -> tuple[GroupData, tuple[float, ...]]:
        shape, batch = self._shape, len(records) - 1
        policy = records[group.policy_version].policy
        task = GenerateFragment(
            fragment=Fragment(
                batch=batch, group=group.group, first_sample=0, num_samples=shape.group_size,
                attempt=0,
            ),
            policy=policy,
            prompt=self._prompts.of_group(batch, group.group, shape.groups),
            window_start=0,
            worker="reference",
        )  # fmt: skip
        samples = samples_of(task, policy.weights_digest)
        images = safetensors.numpy.load(media_blob(samples, self._sizes.media))["images"]
        scores = EmulatedScorer().score(images, [{}] * shape.group_size)
        advantages = self._recipe.advantages.for_group(scores, {"emulated": scores})
        blob = trajectory_blob(samples, self._sizes.window, self._sizes.start)
        data = GroupData(trajectories=(blob,), conditions=b"", advantages=advantages)
        return data, tuple(scores)

    def _counted(self, before: CommitRecord, groups: Sequence[GroupData]) -> str:
        shape, digest = self._shape, before.learned.digest
        gradient = self._layout.zeros()
        for number, group in enumerate(groups, 1):
            entries = entries_of(group, range(shape.group_size), self._sizes.start)
            add_rows(gradient, shape, range(shape.trained_steps), entries, digest)
            if number % (len(groups) // self._recipe.trainer.updates) == 0:
                digest = next_digest(digest, before.policy.version, gradient)
                gradient = self._layout.zeros()
        return digest


def _differences(record: CommitRecord, expected: Expected) -> Iterator[str]:
    if tuple(tuple(group.rewards) for group in record.trained) != expected.rewards:
        yield "other rewards than its samples'"
    if record.learned.digest != expected.trained_digest:
        yield "trained to others than its samples lead to"
    if record.policy.weights_digest != expected.weights_digest:
        yield "other weights generate than follow from the trained ones"

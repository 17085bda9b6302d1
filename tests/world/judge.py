"""Judges what a world has come to: by its commit records alone, from what each batch must lead to.

A sample's bytes follow from its seed, its prompt and the weights that the record names for its
group, and a version's digest from the bytes that were trained. So each version is computed from
those before it, whoever generated, scored and trained it, and in whatever order.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import safetensors.numpy

from bench.cluster.blobs import EmulatedWeights, media_blob, samples_of, trajectory_blob
from bench.cluster.ledger import Ledger, entries_of
from bench.cluster.scoring import EmulatedScorer
from shared.devices.protocols import GroupData
from shared.devices.slices import GroupSlice
from shared.messages.contracts import Fragment, GenerateFragment
from shared.run.commits import CommitRecord, TrainedGroup
from shared.run.run_recipe import prompt_order
from shared.store import ObjectStore
from tests.storm.judge import Rules, judge, judge_conditions, judge_objects
from tests.world.members import add_rows, layout_of, next_digest
from tests.world.services import Site


async def violations(
    site: Site, records: Sequence[CommitRecord], store: ObjectStore, *, may_be_false: bool = False
) -> list[str]:
    """Return every rule that the run has broken, as sentences.

    Args:
        may_be_false: whether an intruder has chosen samples, scores or conditions: digests and
            rewards are not compared then.
    """
    recipe = site.recipe
    if not records:
        return ["no version was made"]
    rules = Rules(
        recipe.batch.groups, recipe.batch.group_size, recipe.schedule.staleness_limit,
        recipe.checkpoint_every,
    )  # fmt: skip
    found = judge(records, rules)
    if not found:
        found += [] if may_be_false else Reference(site).compare(records)
        kept = max(recipe.run.keep_last, 1 + recipe.schedule.staleness_limit)
        found += await judge_objects(records, store, kept=kept)
    if site.emulation.setting.encoders and not may_be_false:
        found += await judge_conditions(store, recipe.run.name)
    return found


class Reference:
    """Computes versions one after the other, on one device and in order."""

    def __init__(self, site: Site) -> None:
        self._setting, self._recipe = site.emulation.setting, site.recipe
        self._shape, self._sizes = site.emulation.profile.shape, site.emulation.sizes
        self._prompts = prompt_order(site.recipe)
        self._layout = layout_of(self._shape)

    def compare(self, records: Sequence[CommitRecord]) -> list[str]:
        """Return how versions differ from what their batches must lead to."""
        first = EmulatedWeights.first(self._setting.seed).digest
        found = [] if records[0].policy.weights_digest == first else ["version 0: other weights"]
        for before, record in pairwise(records):
            found += self._differences(records, before, record)
        return found

    def _differences(
        self, records: Sequence[CommitRecord], before: CommitRecord, record: CommitRecord
    ) -> Iterator[str]:
        version = record.policy.version
        groups = [self._group(records, version - 1, group) for group in record.trained]
        for group, (_, scores) in zip(record.trained, groups, strict=True):
            if tuple(group.rewards) != tuple(scores):
                yield f"version {version}, group {group.group}: other rewards than its samples'"
        data = [each for each, _ in groups]
        is_fluid = self._setting.is_fluid
        trained = (self._counted if is_fluid else self._closed)(before, version - 1, data)
        if record.learned.digest != trained:
            yield f"version {version}: trained to others than its samples lead to"
        sampling = EmulatedWeights(before.policy.weights_digest)
        follows = sampling.following(trained).digest if self._setting.lags else trained
        if record.policy.weights_digest != follows:
            yield f"version {version}: other weights generate than follow from the trained ones"

    def _group(
        self, records: Sequence[CommitRecord], batch: int, group: TrainedGroup
    ) -> tuple[GroupData, list[float]]:
        shape = self._shape
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
        advantages = self._recipe.advantages.of(scores, {"emulated": scores})
        blob = trajectory_blob(samples, self._sizes.window, self._sizes.start)
        return GroupData(trajectories=(blob,), conditions=b"", advantages=advantages), scores

    def _closed(self, before: CommitRecord, batch: int, groups: Sequence[GroupData]) -> str:
        shape, updates = self._shape, self._setting.updates
        ledger = Ledger(shape.group_size, shape.trained_steps)
        digest, part = before.learned.digest, len(groups) // updates
        for number, group in enumerate(groups, 1):
            samples = range(shape.group_size)
            ledger.take(entries_of(group, samples, self._sizes.start), GroupSlice(samples))
            if number % part == 0:
                digest = ledger.close(batch, shape.samples // updates, digest)
                ledger.clear()
        return digest

    def _counted(self, before: CommitRecord, batch: int, groups: Sequence[GroupData]) -> str:
        shape, updates = self._shape, self._setting.updates
        digest, part = before.learned.digest, len(groups) // updates
        gradient = self._layout.zeros()
        for number, group in enumerate(groups, 1):
            entries = entries_of(group, range(shape.group_size), self._sizes.start)
            add_rows(gradient, shape, range(shape.trained_steps), entries)
            if number % part == 0:
                digest = next_digest(digest, batch, gradient)
                gradient = self._layout.zeros()
        return digest

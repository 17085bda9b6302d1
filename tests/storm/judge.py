"""Judges by its commit records and their objects whether a run has trained what it should have."""

import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.cluster.blobs import check_conditions, digest_of, joined
from bench.cluster.build import Emulation
from bench.cluster.processes import ENCODING
from shared.errors import DigenRLError, FaultyConditions, IntegrityError
from shared.messages.contracts import ObjectRef
from shared.recipe.recipe import Recipe
from shared.run.commits import CommitRecord, StoredWeights, TrainedGroup, record_digest
from shared.run.conditions import ConditionsRecord
from shared.run.garbage import delete_garbage, find_garbage
from shared.run.layout import conditions_key
from shared.run.retention import Manifests, named_by, retention_from, version_folders
from shared.run.shards import open_tensors
from shared.store import ObjectStore
from tests.storm.cluster import Cluster
from tests.storm.reference import Reference

KEPT = 3
"""Newest versions whose objects must be there."""
CLOCK_S = 60.0
"""Seconds by which a store's clock may differ."""


@dataclass(frozen=True, slots=True)
class Rules:
    num_groups: int
    group_size: int
    max_staleness: int = 0

    @classmethod
    def of(cls, recipe: Recipe) -> "Rules":
        batch, staleness = recipe.batch, recipe.schedule.staleness_limit
        return cls(batch.groups, batch.group_size, staleness)


async def violations_of(run: Cluster) -> list[str]:
    """Every rule that the run has broken.

    The run goes no further: its members are stopped, so that nothing is deleted meanwhile.
    """
    for name in run.members:
        run.send(name, signal.SIGSTOP)
    records = await run.commits()
    found = judge(records, Rules.of(run.recipe))
    found = found or Reference(Emulation.of(run.setting), run.recipe).compare(records)
    found += await judge_objects(records, run.store)
    if run.setting.encoders:
        found += await judge_conditions(run.store, run.recipe.run.name)
    return found + await judge_garbage(records, run)


def judge(records: Sequence[CommitRecord], rules: Rules) -> list[str]:
    """What is wrong with the chain, and with what was trained."""
    found = []
    parent = None
    for number, record in enumerate(records):
        if record.policy.version != number:
            found.append(f"version {record.policy.version} is in the place of {number}")
        if record.parent != parent:
            found.append(f"version {number} does not name the record before it")
        parent = record_digest(record.encode())
        if number:
            found += [f"version {number}: {fault}" for fault in _faults(record, rules)]
    return found


def _faults(record: CommitRecord, rules: Rules) -> Iterator[str]:
    counts = Counter(group.group for group in record.trained)
    for group in sorted({*counts, *range(rules.num_groups)}):
        wanted = int(group < rules.num_groups)
        if counts[group] != wanted:
            yield f"group {group} is trained {counts[group]} times, not {wanted}"
    for group_record in record.trained:
        yield from _faults_of_group(record, group_record, rules)


def _faults_of_group(record: CommitRecord, group: TrainedGroup, rules: Rules) -> Iterator[str]:
    samples = Counter(
        sample for first, number, _ in group.fragments for sample in range(first, first + number)
    )
    if samples != Counter(range(rules.group_size)):
        yield f"group {group.group} is made of the samples {sorted(samples.elements())}"
    if len(group.rewards) != rules.group_size or None in group.rewards:
        yield f"group {group.group} has the rewards {group.rewards}"
    staleness = record.policy.version - 1 - group.policy_version
    if not 0 <= staleness <= rules.max_staleness:
        yield f"group {group.group} has a staleness of {staleness}"


async def judge_objects(
    records: Sequence[CommitRecord], store: ObjectStore, *, kept: int = KEPT
) -> list[str]:
    """What is wrong with weights and checkpoints; those of older versions than the ``kept`` newest
    may be gone."""
    found = []
    for record in records:
        is_new = record.policy.version >= len(records) - kept
        trained = record.learned
        objects = [trained, StoredWeights(record.checkpoint, trained.digest)]
        if record.trained_weights is not None:
            objects.append(StoredWeights(record.weights, record.policy.weights_digest))
        for ref, digest in objects:
            fault = await _fault_of(ref, digest, store, must_be_there=is_new)
            if fault is not None:
                found.append(f"version {record.policy.version}: {fault}")
    return found


async def judge_conditions(store: ObjectStore, run: str) -> list[str]:
    """What is wrong with the conditions that encoders have made of some prompts."""
    keys = await store.keys(conditions_key(run, "").rsplit("/", 1)[0])
    if not keys:
        return ["no encoder has made any conditions"]
    found = []
    for key in keys[::100]:
        record = ConditionsRecord.model_validate_json(await store.read(key) or b"")
        digest = key.rsplit("/", 1)[1].removesuffix(".json")
        try:
            check_conditions(await store.get(record.conditions), record.prompt)
        except (FaultyConditions, IntegrityError) as error:
            found.append(f"{key}: {error}")
        if digest != ENCODING.digest(record.prompt):
            found.append(f"{key} is of another prompt than it says")
    return found


async def _fault_of(
    ref: ObjectRef, weights: str, store: ObjectStore, *, must_be_there: bool
) -> str | None:
    try:
        digest = digest_of(await joined(await open_tensors(store, ref, weights)))
    except DigenRLError as error:
        is_whole = must_be_there or await _is_there(ref, weights, store)
        return str(error) if is_whole else None
    if digest != weights:
        return f"{ref.key} is of other weights than the record says"
    return None


async def _is_there(ref: ObjectRef, weights: str, store: ObjectStore) -> bool:
    """Whether nothing of it has been deleted, shards first, since somebody wanted to read it."""
    try:
        shards = (await open_tensors(store, ref, weights)).shards or ()
    except DigenRLError:
        return await store.read(ref.key) is not None
    keys = [ref.key, *(shard.object.key for shard in shards)]
    return None not in [await store.backend.size(key) for key in keys]


async def judge_garbage(records: Sequence[CommitRecord], run: Cluster) -> list[str]:
    """What is wrong with what `digenrl gc` leaves: it must be the versions that are kept, whole.

    It is asked after everything that stores was stopped, so that what is young is garbage as well.
    """
    store, name = run.store, run.recipe.run.name
    for each in await find_garbage(store, name, now=time.time() + CLOCK_S, min_age=0.0):
        await delete_garbage(store, each)
    there = {key for folder in version_folders(name) for key in await store.keys(folder)}
    kept = retention_from(run.recipe).kept(len(records) - 1)
    wanted = [each for each in records if each.policy.version in kept]
    shards = await Manifests(store).shards(wanted, there, kept)
    named = named_by(wanted, shards)
    return [
        *(f"{key} is left, and no kept version has it" for key in sorted(there - named)),
        *(f"{key} of a kept version is gone" for key in sorted(named - there)),
    ]

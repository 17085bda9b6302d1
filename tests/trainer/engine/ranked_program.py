"""The program of the tests of ranks: the trainer's own ranks, with batches from here.

    python -m digenrl.local.ranks 2 tests.trainer.engine.ranked_program PIPES

Importing takes most of the time, so the two ranks serve many jobs, each in processes of its own
that they fork. A rank reads jobs from the pipe ``PIPES/jobs-RANK`` and answers each with an exit
code in ``PIPES/answers-RANK``.

In the job ``train`` the first rank reads ``recipe.json`` of the job's folder, goes back to the
newest commit in its store, if there is one, trains ``job.json``'s batches and commits each; it
writes to ``versions.json`` what it had before the first, and after each; ``kill.json`` may say
when a rank is killed meanwhile. In the job ``follow_policy`` it generates batches itself, by the
weights that are published, and writes what they and their ratios are. In the job ``count`` each
rank writes how many exchanges a batch takes, in the job ``lack`` one of them has no memory for its
part, in the jobs ``load_in`` and ``train_in`` they load, or train, in little memory.
"""

import asyncio
import itertools
import json
import os
import resource
import sys
import traceback
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter
from torch.utils._python_dispatch import TorchDispatchMode

from services.trainer.engine.follower import follow, join, load_engine
from services.trainer.engine.ranked import RankedTraining, start_ranks
from services.trainer.engine.threads import ReplicatedTraining
from services.trainer.engine.trainer_engine import TrainerEngine
from services.trainer.engine.world import this_rank
from services.trainer.versions import NewVersion, store_version
from shared.devices.protocols import GroupData, Snapshot
from shared.devices.slices import GroupSlice, slice_group
from shared.diffusion.policy import LoadedPolicy, load_policy
from shared.diffusion.ranks import local_shard
from shared.diffusion.tensors import pack, unpack
from shared.diffusion.weights import Staging
from shared.errors import OutOfMemory, RanksLost
from shared.messages.contracts import ObjectRef
from shared.recipe.recipe import Recipe, load_recipe
from shared.run.commits import CommitRecord, commit, newest_commit, record_digest
from shared.run.shards import open_tensors
from shared.store import ObjectStore, StoreSettings, open_store
from shared.store.folder import FolderBackend
from tests.paths import DIGITS
from tests.trainer.batches import fresh_groups, make_batch, noise_group
from tests.trainer.fluid.group_program import be_a_group

OnThreads = RankedTraining | ReplicatedTraining
VERSIONS = TypeAdapter(list[CommitRecord])
STORED = TypeAdapter(list[tuple[ObjectRef, ObjectRef]])


class Exchanges(TorchDispatchMode):
    """Counts reductions among ranks in this thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func.namespace == "c10d" and "reduce" in func.__name__
        return func(*args, **(kwargs or {}))


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


async def train_batch(
    training: OnThreads,
    groups: list[GroupData],
    batch: int,
    merged_steps: int = 0,
    scale: float = 1.0,
    updates: int = 1,
) -> Snapshot:
    """Train a batch: slices go to the devices in turn, several at a time; each update has as many
    of the groups."""
    training.begin()
    for number, group in enumerate(groups):
        group = replace(group, staleness=min(batch, 1))  # the first weights have generated all
        devices = training.devices
        is_last = number == len(groups) - 1
        slices = slice_group(4, len(devices), 3, is_last=is_last, merged_steps=merged_steps)
        queues = [slices[index :: len(devices)] for index in range(len(devices))]

        async def drain(index: int, group: GroupData, queue: list[GroupSlice]) -> None:
            for cut in queue:
                await training.devices[index].accumulate(group, cut)

        await asyncio.gather(*(drain(i, group, queue) for i, queue in enumerate(queues)))
        if (number + 1) % (len(groups) // updates) == 0:
            metrics = await training.step(batch, scale)
            assert metrics["skipped_not_finite"] == 0
    return await training.weights()


async def train_batches(
    training: OnThreads, store: ObjectStore, recipe: Recipe, batches: Sequence[int]
) -> list[CommitRecord]:
    """Go on from the newest commit, and commit each batch. First comes the record of where it
    begins, with what these ranks store of it when they have restored it."""
    groups = groups_of(recipe)
    record = await newest_commit(store, recipe.run.name)
    if record is None:
        record = await commit_next(store, recipe.run.name, None, await training.weights())
    else:
        digest = record.policy.weights_digest
        await training.restore(
            await open_tensors(store, record.weights, digest),
            await open_tensors(store, record.checkpoint, digest),
        )
        assert training.weights_digest() == digest
    weights, checkpoint = await store_version(store, recipe.run.name, await training.weights())
    records = [record.model_copy(update={"weights": weights, "checkpoint": checkpoint})]
    for batch in batches:
        scale = 3.0 if recipe.batch_std == "late" else 1.0
        merged = recipe.sampling.merged_steps
        snapshot = await train_batch(training, groups, batch, merged, scale, recipe.trainer.updates)
        record = await commit_next(store, recipe.run.name, record, snapshot)
        records.append(record)
    return records


async def commit_next(
    store: ObjectStore, run: str, parent: CommitRecord | None, snapshot: Snapshot
) -> CommitRecord:
    new = NewVersion(snapshot, parent)
    weights, checkpoint = await store_version(store, run, snapshot)
    record = CommitRecord(
        run=run,
        policy=new.policy,
        parent=None if parent is None else record_digest(parent.encode()),
        weights=weights,
        checkpoint=checkpoint,
        worker="trainer",
    )
    await commit(store, record)
    return record


def store_in(folder: Path) -> ObjectStore:
    return open_store(settings_in(folder))


def settings_in(folder: Path) -> StoreSettings:
    return StoreSettings(url=f"file://{folder}/objects")


async def generate_and_train(
    recipe: Recipe,
    training: OnThreads,
    generating: LoadedPolicy,
    batch: int,
    store: ObjectStore,
) -> dict[str, Any]:
    """Train a batch that the published weights have generated; return what is known of it."""
    snapshot = await training.weights()
    weights, _ = await store_version(store, recipe.run.name, snapshot)
    staging = Staging(generating.model.transformer)
    async for part in (await open_tensors(store, weights, snapshot.digest)).parts():
        staging.add(part)
    adopted = generating.in_use.adopt(staging.finish())
    digests = [snapshot.digest, adopted, training.weights_digest()]
    training.begin()
    [device] = training.devices
    for group in fresh_groups(recipe, generating):
        await device.accumulate(group, GroupSlice(range(recipe.batch.group_size)))
    return {"digests": digests, **await training.step(batch)}


async def follow_policy(folder: Path, recipe: Recipe, training: OnThreads) -> None:
    """Write what is stored at the end as well, and again after it was restored."""
    generating, store = load_policy(recipe, {"transformer", "text", "decoder"}), store_in(folder)
    seen = [
        await generate_and_train(recipe, training, generating, batch, store) for batch in range(2)
    ]
    (folder / "seen.json").write_text(json.dumps(seen))
    before = await store_version(store, recipe.run.name, await training.weights())
    await training.restore(*[await open_tensors(store, ref) for ref in before])
    after = await store_version(store, recipe.run.name, await training.weights())
    (folder / "stored.json").write_bytes(STORED.dump_json([before, after]))


async def train(folder: Path, recipe: Recipe, training: OnThreads) -> None:
    batches = range(*json.loads((folder / "job.json").read_text()))
    records = await train_batches(training, store_in(folder), recipe, batches)
    (folder / "versions.json").write_bytes(VERSIONS.dump_json(records))


def exchanges_of_a_batch(engine: TrainerEngine, groups: list[GroupData]) -> list[int]:
    """Count the exchanges of each pass and of the step; every rank trains the same."""
    counts = []
    engine.begin()
    with Exchanges() as passes:
        for group in groups:
            engine.train(engine.read(group))
    counts.append(passes.count)
    with Exchanges() as step:
        engine.step(0)
    return [*counts, step.count]


def as_ranks(
    do: Callable[[Path, Recipe, RankedTraining], Coroutine[Any, Any, None]], folder: Path
) -> None:
    """Do a job on the first rank; the other follows."""
    if this_rank():
        follow(settings_in(folder))
        return
    recipe = load_recipe(folder / "recipe.json")
    training = start_ranks(recipe)
    asyncio.run(do(folder, recipe, training))
    training.end()


def lack(folder: Path) -> None:
    """Let the rank that job.json names find no memory, in a pass or in the optimizer step; the
    first one writes what it raises."""
    where, lost = json.loads((folder / "job.json").read_text())
    if this_rank() == lost:
        whole = getattr(TrainerEngine, where)

        def short(engine: TrainerEngine, *what: Any, **how: Any) -> Any:
            if where == "train":  # the others are in the middle of it
                engine._loaded.model.velocity = no_memory  # type: ignore[method-assign]
                return whole(engine, *what, **how)
            raise OutOfMemory("out of memory: the optimizer step; train fewer weights")

        setattr(TrainerEngine, where, short)
    if this_rank():
        follow(settings_in(folder))
        return
    recipe = load_recipe(folder / "recipe.json")
    training = start_ranks(recipe)
    try:
        asyncio.run(train_batch(training, groups_of(recipe), 0))
    except RanksLost as error:
        (folder / "lost").write_text(str(error))


def no_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def count(folder: Path) -> None:
    join()
    recipe = load_recipe(folder / "recipe.json")
    counts = exchanges_of_a_batch(load_engine(recipe), groups_of(recipe))
    (folder / f"exchanges-{this_rank()}.json").write_text(json.dumps(counts))


def memory(name: str) -> int:
    """Bytes that the kernel counts for this process."""
    status = Path("/proc/self/status").read_text()
    [line] = [each for each in status.splitlines() if each.startswith(f"{name}:")]
    return 1024 * int(line.split()[1])


def limit_memory(num_bytes: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, hard))


def load_in(folder: Path) -> None:
    """Load in so many bytes beside those that this rank began with, which is what was imported."""
    import peft  # noqa: F401 -- as the next: what is imported does not count
    from diffusers import WanPipeline, WanTransformer3DModel  # noqa: F401

    recipe = load_recipe(folder / "recipe.json")
    join()
    limit_memory(memory("VmData") + int((folder / "limit").read_text()))
    engine = load_engine(recipe)
    limit_memory(resource.RLIM_INFINITY)
    found = {"digest": engine.weights_digest()}
    (folder / f"loaded-{this_rank()}.json").write_text(json.dumps(found))


def train_in(folder: Path) -> None:
    """Load and train, on all ranks together, a batch that the weights have generated; say how much
    memory this rank had beside what it began with."""
    recipe, limits = (
        load_recipe(folder / "recipe.json"),
        json.loads((folder / "limits").read_text()),
    )
    join()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    resident, data = memory("VmRSS"), memory("VmData")
    limit_memory(data + limits["loads_in"])
    engine = load_engine(recipe)
    loaded = memory("VmHWM") - resident
    limit_memory(data + limits["trains_in"])
    first = local_shard(next(iter(engine._parameters.values())).detach())
    before = first.clone()
    engine.begin()
    engine.train(engine.read(noise_group(recipe, engine._loaded)))
    metrics = engine.step(0)
    peak, moved = memory("VmHWM") - resident, not torch.equal(first, before)
    found = {"loaded": loaded, "peak": peak, "moved": moved, **metrics}
    (folder / f"trained-{this_rank()}.json").write_text(json.dumps(found))


class Job(NamedTuple):
    """A line in a rank's pipe of jobs."""

    what: str
    folder: str
    port: int
    """The ranks of this job meet there."""


def die_as_told(folder: Path) -> None:
    """End this process like a SIGKILL at a write to the store, if ``kill.json`` says so: with rank,
    part of the key, how many such writes come before, and whether this one is done first."""
    told = folder / "kill.json"
    rank, part, number, after = json.loads(told.read_text()) if told.is_file() else (-1, "", 0, 0)
    if rank != this_rank():
        return
    seen = itertools.count()

    def dying(write: Callable[..., Any]) -> Callable[..., Any]:
        async def written(self: FolderBackend, key: str, data: bytes) -> Any:
            dies = part in key and next(seen) == number
            if dies and not after:
                os._exit(9)
            made = await write(self, key, data)
            if dies:
                os._exit(9)
            return made

        return written

    for name in ("write", "create"):
        setattr(FolderBackend, name, dying(getattr(FolderBackend, name)))


def do(job: Job) -> None:
    die_as_told(Path(job.folder))
    os.environ |= {"MASTER_PORT": str(job.port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    jobs: dict[str, Callable[[Path], None]] = {
        "train": partial(as_ranks, train),
        "follow_policy": partial(as_ranks, follow_policy),
        "count": count,
        "lack": lack,
        "load_in": load_in,
        "train_in": train_in,
        "group": be_a_group,
    }
    jobs[job.what](Path(job.folder))


def forked(job: Job) -> int:
    """The exit code of a child that does the job."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        do(job)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def main(pipes: Path) -> None:
    torch.set_num_threads(1)
    load_policy(load_recipe(DIGITS), {"transformer"})  # so that its modules are imported once
    rank = this_rank()
    with (pipes / f"jobs-{rank}").open() as jobs, (pipes / f"answers-{rank}").open("w") as answers:
        for line in jobs:
            print(forked(Job(*json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

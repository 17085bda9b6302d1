"""The program of the tests of shard groups: two ranks of one member.

    python -m digenrl.local.processes.ranks 2 tests.trainer.fluid.ranks_program PIPES

Importing takes most of the time, so the two ranks serve many jobs, each in processes of its own
that they fork. A rank reads jobs from the pipe ``PIPES/jobs-RANK`` and answers each with an exit
code in ``PIPES/answers-RANK``.

In the job ``group`` the ranks train as one member (`group_program`), and one of them may be killed
meanwhile. In the job ``count`` each rank writes how many exchanges an update takes, in the job
``lack`` one of them has no memory for its part, in the jobs ``load_in`` and ``train_in`` they load,
or train, in little memory.
"""

import asyncio
import itertools
import json
import os
import resource
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from services.trainer.engine.trainer_engine import TrainerEngine
from services.trainer.engine.world import this_rank
from services.trainer.fluid.exchange import WHOLE_BATCH
from services.trainer.fluid.links import join
from services.trainer.fluid.shard import Shard
from shared.diffusion.loading.ranks import local_shard
from shared.diffusion.policy import load_policy
from shared.errors import OutOfMemory, RanksLost
from shared.recipe.recipe import load_recipe
from shared.store.folder import FolderBackend
from tests.paths import DIGITS
from tests.trainer.batches import groups_of, noise_group
from tests.trainer.fluid.director import whole
from tests.trainer.fluid.group_program import be_a_group, store_in


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


def count(folder: Path) -> None:
    """Count the exchanges of the passes of an update, and of its sum."""
    join()
    recipe = load_recipe(folder / "recipe.json")
    shard = Shard(recipe, store_in(folder))
    shard.begin()
    with Exchanges() as passes:
        for number, group in enumerate(groups_of(recipe)):
            piece = whole(recipe, number)
            shard.train(shard.engine.read(group), piece, shard.engine.chunk)
    with Exchanges() as summed:
        shard.copy_sum(0, [])
    counts = json.dumps([passes.count, summed.count])
    (folder / f"exchanges-{this_rank()}.json").write_text(counts)


def lack(folder: Path) -> None:
    """Let the rank that job.json names find no memory, in a pass or in the optimizer step; the
    first one writes what it raises."""
    where, lost = json.loads((folder / "job.json").read_text())
    if this_rank() == lost:
        method = getattr(TrainerEngine, where)

        def short(engine: TrainerEngine, *what: Any, **how: Any) -> Any:
            if where == "train":  # the others are in the middle of it
                engine._loaded.model.velocity = no_memory  # type: ignore[method-assign]
                return method(engine, *what, **how)
            raise OutOfMemory("out of memory: the optimizer step; train fewer weights")

        setattr(TrainerEngine, where, short)
    try:
        be_a_group(folder)
    except RanksLost as error:
        (folder / "lost").write_text(str(error))


def no_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


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
    engine = Shard(recipe, store_in(folder)).engine
    limit_memory(resource.RLIM_INFINITY)
    found = {"digest": engine.weights_digest()}
    (folder / f"loaded-{this_rank()}.json").write_text(json.dumps(found))


def train_in(folder: Path) -> None:
    """Load and train, on all ranks together, a batch that the weights have generated; say how much
    memory this rank had beside what it began with."""
    recipe = load_recipe(folder / "recipe.json")
    limits = json.loads((folder / "limits").read_text())
    join()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    resident, data = memory("VmRSS"), memory("VmData")
    limit_memory(data + limits["loads_in"])
    shard = Shard(recipe, store_in(folder))
    engine = shard.engine
    loaded = memory("VmHWM") - resident
    limit_memory(data + limits["trains_in"])
    first = local_shard(next(iter(engine._parameters.values())).detach())
    before = first.clone()
    shard.begin()
    group = engine.read(noise_group(recipe, engine._loaded))
    shard.train(group, whole(recipe, 0), engine.chunk)
    own = shard.copy_sum(0, [])
    total = asyncio.run(shard.add([("group", WHOLE_BATCH)], {"group": 0}, {}))
    metrics = shard.step(0, own[WHOLE_BATCH].tally, shard.measured(total))
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


JOBS: dict[str, Callable[[Path], None]] = {
    "group": be_a_group, "count": count, "lack": lack, "load_in": load_in, "train_in": train_in,
}  # fmt: skip


def do(job: Job) -> None:
    die_as_told(Path(job.folder))
    os.environ |= {"MASTER_PORT": str(job.port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    JOBS[job.what](Path(job.folder))


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

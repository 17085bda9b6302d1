"""What a commit costs a run of full size: Qwen-Image on one host of 8 emulated H100s, in real time.

    python -m bench unscaled

Devices are held for the profile's seconds and nothing is scaled: adapter and optimizer's state have
all their bytes, in float32, and so have the states of trajectories; the store is a folder on disk
with fsync. What a commit takes of each device, how long it is until others can fetch the next
version's weights, and until it is committed with its optimizer's state, is set beside what the cost
profile says, whose store takes 2 GB/s of an adapter and then of the state. What this machine's disk
takes for as many bytes, written by one thread past the kernel's memory of files, is measured in the
middle of each batch, when devices are busy.
"""

import asyncio
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

from bench.cluster.payloads import Scaled, whole
from bench.cluster.rows import UNSCALED
from bench.cluster.session import EmulatedRun, opened, run
from bench.cluster.setting import Setting
from bench.runner.figures import Interval
from services.scheduler.costs import fluid
from shared.errors import UserError

Figures = dict[str, float | list[float]]
MIDDLE_S = 60.0
"""Seconds from a commit to the middle of the next batch."""
PART = 1 << 24
"""Bytes of one plain write."""
MESSAGES = 4
"""Messages from the last piece to the next fragment, which lies there: the piece is trained, the
exchange, each member's answer, and the step."""
KEPT_BATCHES = 3
"""Batches whose samples are stored at a time, at most."""
NEARLY = 0.001
"""Seconds by which two clocks of one machine may differ."""


async def measure(folder: Path, batches: int, say: Callable[[str], object]) -> Figures:
    """Runs one batch more than are measured, and says when each is committed.

    Raises:
        UserError: if the disk has too little room.
    """
    case = UNSCALED.case(rounds=1, batches=batches, one_step_batches=2)
    setting = case.setting(case.modes[0], 0).model_copy(update={"scale": 1.0, "all_bytes": True})

    sizes = whole(setting.load_profile())
    check_room(folder, needed_bytes(sizes, setting, batches))
    plain = PlainWrites(folder, case.batches, (sizes.adapter, sizes.checkpoint))

    def committed(version: int) -> None:
        say(f"version {version}")
        plain.follow(version)

    async with opened(folder, on_disk=True) as session:
        try:
            found = await run(session, setting, 1, 1 + batches, committed)
        finally:
            plain.delete()
    weights, commits = zip(*plain.seconds, strict=True)
    written = {
        "plain_write_of_weights_s": _rounded(weights),
        "plain_write_of_commit_s": _rounded(commits),
    }
    return {**figures_of(found), **written}


def needed_bytes(sizes: Scaled, setting: Setting, batches: int) -> int:
    """Returns the most bytes that a run has stored: every version, one more that is written
    plainly, and samples."""
    shape = setting.load_profile().shape
    version = sizes.adapter + sizes.checkpoint
    sample = sizes.window + sizes.start + sizes.media
    samples = shape.groups * (shape.group_size * sample + sizes.conditions)
    return (2 + batches) * version + KEPT_BATCHES * samples


def check_room(folder: Path, needed: int) -> None:
    """Raises UserError if the folder's disk has too little room."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"folder: the disk of {folder} has {free / 1e9:.0f} GB of {needed / 1e9:.0f} that are "
            "stored; make room, name another --folder, or measure fewer --batches"
        )


@dataclass(slots=True)
class PlainWrites:
    """Writes as many bytes as a commit does, once in each batch: what the disk takes for them."""

    folder: Path
    last: int
    """Batch after which nothing is written any more."""
    sizes: tuple[int, int]
    """Bytes of weights and of the optimizer's state, which follows."""
    seconds: list[tuple[float, float]] = field(default_factory=list)
    """Seconds until the weights were on disk, and until both were, of each batch."""
    _tasks: "list[asyncio.Task[None]]" = field(default_factory=list)

    def follow(self, version: int) -> None:
        """Write in the batch that begins with this version."""
        if 0 < version <= self.last:
            self._tasks.append(asyncio.create_task(self._later(version)))

    async def _later(self, version: int) -> None:
        await asyncio.sleep(MIDDLE_S)
        paths = [self.folder / f"plain-{version}-{part}" for part in range(len(self.sizes))]
        taken = [
            await asyncio.to_thread(write_plainly, path, size)
            for path, size in zip(paths, self.sizes, strict=True)
        ]
        for path in paths:
            await asyncio.to_thread(path.unlink)
        self.seconds.append((taken[0], sum(taken)))

    def delete(self) -> None:
        for task in self._tasks:
            task.cancel()
        for path in self.folder.glob("plain-*"):
            path.unlink(missing_ok=True)


def write_plainly(path: Path, size: int) -> float:
    """Returns the seconds that a file of so many bytes takes until it is on disk, past the kernel's
    memory of files where the disk allows it: what the disk takes, and no core."""
    with mmap.mmap(-1, PART) as part:  # begins at a page, as such a write has to
        part.write(os.urandom(PART))
        began = time.monotonic()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            descriptor = os.open(path, flags | getattr(os, "O_DIRECT", 0))
        except OSError:
            descriptor = os.open(path, flags)
        try:
            for _ in range(0, size, PART):
                os.write(descriptor, part)
            os.ftruncate(descriptor, size)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return time.monotonic() - began


def figures_of(found: EmulatedRun) -> Figures:
    """Returns seconds, each beside what the cost profile says; those of a commit are medians."""
    profile = found.setting.load_profile()
    kind = next(iter(found.setting.trainer))
    sizes, copied = whole(profile), fluid.snapshot_seconds(profile, kind)
    stepped = fluid.step_seconds(profile)
    exchange = fluid.exchange_seconds(profile, found.setting.num_trainer)
    commits = [
        commit_of(found.intervals, found.stored[version], at)
        for version, at in enumerate(found.commits)
        if version >= 2
    ]
    others = [gap for commit in commits for gap in commit.others]
    stored = fluid.weights_seconds(profile)
    own = [each.committer for each in commits if each.committer is not None]
    return {
        "adapter_gb": sizes.adapter / 1e9,
        "checkpoint_gb": sizes.checkpoint / 1e9,
        "batch_s": _rounded(after - before for before, after in pairwise(found.commits[1:])),
        "stands_still_s": round(median(others), 3),
        "of_profile_s": round(exchange + stepped, 3),
        "of_profile_with_messages_s": round(
            exchange + stepped + MESSAGES * profile.rollout.handoff_seconds, 3
        ),
        "committer_stands_still_s": round(median(own), 3),
        "committer_of_profile_s": round(exchange + stepped + copied, 3),
        "fetchable_after_s": _rounded(each.fetchable for each in commits),
        "fetchable_of_profile_s": round(stored, 3),
        "committed_after_s": _rounded(each.committed for each in commits),
        "committed_of_profile_s": round(fluid.commit_seconds(profile), 3),
    }


@dataclass(frozen=True, slots=True)
class Commit:
    others: list[float]
    """Seconds of each device but the committing one from the last piece's gradient, on whichever
    device, to its next fragment; none of a run's last commit."""
    committer: float | None
    fetchable: float
    """Seconds from the copy on the host until it was said that the weights can be fetched."""
    committed: float
    """The same until the version was announced."""


def commit_of(intervals: Sequence[Interval], stored: float, announced: float) -> Commit:
    """Returns what the commit took whose weights were stored and whose version was announced at
    these times."""
    copies = [each for each in intervals if each.use == "snapshot" and each.end <= announced]
    copy = max(copies, key=lambda each: each.end)
    trained = max(
        each.end for each in intervals if each.use == "train" and each.end <= copy.begin + NEARLY
    )
    waited: dict[str, float] = {}
    for each in sorted(intervals, key=lambda each: each.begin):
        if each.use == "generate" and each.begin >= trained:
            waited.setdefault(each.device, each.begin - trained)
    committer = waited.pop(copy.device, None)
    return Commit(list(waited.values()), committer, stored - copy.end, announced - copy.end)


def _rounded(values: Iterable[float]) -> list[float]:
    return [round(each, 3) for each in values]

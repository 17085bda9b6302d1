"""Reads what became of each group and sample of committed batches, from the run's store.

Commit records name rewards, versions and devices permanently. Media are kept as long as
trajectories are: of the newest batches, and of those that a resume would train again. Some others
have previews.
"""

import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from digenrl.api.models import (
    FolderView,
    GroupHistory,
    GroupPage,
    SampleHistory,
    SamplePage,
    StorageView,
    UnscoredGroup,
)
from digenrl.api.run_history import LOG_S, RunHistory
from shared.caches import SharedResults, keep_newest
from shared.errors import ContractError, DigenRLError, IntegrityError, UserError
from shared.learning.prompts import PromptOrder
from shared.messages.contracts import TrainGroup
from shared.recipe.recipe import Recipe
from shared.run.commands import read_commands
from shared.run.commits import CommitRecord, TrainedGroup, read_commit
from shared.run.layout import KEPT_BATCHES, previews_folder
from shared.run.log_entries import DeadLetter
from shared.run.previews import preview_key
from shared.run.retention import retention_from
from shared.run.run_recipe import prompt_order
from shared.store.previews import unpack_previews

Order = Literal["number", "worst", "best", "unscored"]
"""The order of samples: by number, or by reward with those that have none last; \"unscored\" lists
only those that have none."""
RECORDS = 32
"""Commit records that are kept in memory."""
MAX_KEPT_PICTURES = 32
"""Pictures of samples that are kept in memory."""
COUNTS_CACHE_S = 60.0
DELETED = (
    f"deleted: media are kept of the {KEPT_BATCHES} newest committed batches, and of those after "
    "the newest checkpoint"
)
NO_PREVIEW = "small pictures of some steps stay as long as run.preview_mb has room"


class MediaDeleted(DigenRLError):
    """The requested object existed, and retention has deleted it."""


@dataclass(slots=True)
class CommittedBatches:
    """Knows the groups and samples of a run's committed batches."""

    history: RunHistory
    _records: SharedResults[int, CommitRecord | None] = field(
        default_factory=lambda: SharedResults(RECORDS)
    )
    _previews: dict[int, frozenset[str]] = field(default_factory=dict)
    """Keys of the previews of batches whose media are deleted."""
    _prompts: PromptOrder | None = None
    """None: not read yet, or this host does not have the file."""
    _pictures: SharedResults[tuple[int, int, int], bytes | None] = field(
        default_factory=lambda: SharedResults(MAX_KEPT_PICTURES)
    )
    _counted: StorageView | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def groups(self, batch: int, after: int, limit: int) -> GroupPage | None:
        """Return a page of a batch's groups; None if it was not committed."""
        record = await self._record(batch)
        if record is None:
            return None
        shown = record.trained[after : after + limit]
        letters, recipe = await self._letters(batch), await self._known_recipe()
        page_groups = [
            GroupHistory(
                batch=batch, group=group.group, prompt=self._prompt(recipe, batch, group.group),
                attempt=group.attempt, policy_version=group.policy_version,
                num_samples=len(group.rewards), **_figures(group.rewards),
                generated_by=sorted(set(group.workers)),
                dropped=group.dropped, letters=_about(letters, group.group),
            )
            for group in shown
        ]  # fmt: skip
        return GroupPage(groups=page_groups, next=_next(after + limit, len(record.trained)))

    async def samples(
        self, batch: int, after: int, limit: int, order: Order = "number"
    ) -> SamplePage | None:
        """Return a page of a batch's samples; None if it was not committed."""
        record = await self._record(batch)
        if record is None:
            return None
        places = _places(record.trained, order)
        return SamplePage(
            samples=await self._samples(batch, record, places[after : after + limit]),
            next=_next(after + limit, len(places)),
            unscored=_unscored(record.trained, await self._letters(batch)),
        )

    async def sample(self, batch: int, group: int, sample: int) -> SampleHistory | None:
        """Return a sample; None if it does not exist."""
        group_samples = await self.group_samples(batch, group)
        return group_samples[sample] if 0 <= sample < len(group_samples) else None

    async def group_samples(self, batch: int, group: int) -> list[SampleHistory]:
        """Return all samples of a group in order; none if there is no such group."""
        record = await self._record(batch)
        if record is None or not 0 <= group < len(record.trained):
            return []
        return await self._samples(batch, record, _places(record.trained[group : group + 1]))

    async def picture(self, batch: int, group: int, sample: int) -> bytes | None:
        """Return a sample, or the middle frame of a video, as PNG; None without either. For deleted
        samples, return the preview, PNG or JPEG.

        Raises:
            MediaDeleted: if it was deleted, and has no preview.
        """
        return await self._pictures.get(
            (batch, group, sample), lambda: self._read_picture(batch, group, sample)
        )

    async def _read_picture(self, batch: int, group: int, sample: int) -> bytes | None:
        record = await self._record(batch)
        if record is None or not 0 <= group < len(record.trained):
            return None
        if not 0 <= sample < len(record.trained[group].rewards):
            return None
        try:
            commands = await read_commands(self.history.store, record)
            fragment, index = _fragment_of(commands[group], sample)
            if fragment is None:
                return None
            data = await self.history.store.get(fragment.stored.media)
        except IntegrityError as error:
            preview = await self._preview(batch, record.trained[group], sample)
            if preview is None:
                raise MediaDeleted(f"{DELETED}; {NO_PREVIEW}") from error
            return preview
        return await asyncio.to_thread(_picture, data, index)

    async def storage(self) -> StorageView:
        """Return what the run stores, counted once a minute."""
        async with self._lock:
            now = time.time()
            if self._counted is None or now - self._counted.measured > COUNTS_CACHE_S:
                self._counted = await self._count(now)
            return self._counted

    async def _count(self, now: float) -> StorageView:
        totals: dict[str, tuple[int, int]] = {}
        for each in await self.history.store.entries(self.history.run):
            folder = each.key.removeprefix(f"{self.history.run}/").split("/")[0]
            number, size = totals.get(folder, (0, 0))
            totals[folder] = number + 1, size + each.size
        rules = _rules(await self._known_recipe())
        folders = [
            FolderView(
                folder=folder, objects=number, bytes=size, kept=rules.get(folder, "for ever")
            )
            for folder, (number, size) in totals.items()
        ]
        folders.sort(key=lambda each: -each.bytes)
        return StorageView(
            bytes=sum(each.bytes for each in folders), measured=now, folders=folders,
            objects=sum(each.objects for each in folders),
            disk_bytes=await asyncio.to_thread(self.history.store.bytes_on_disk),
        )  # fmt: skip

    async def _record(self, batch: int) -> CommitRecord | None:
        history = self.history
        return await self._records.get(
            batch, lambda: read_commit(history.store, history.run, batch + 1)
        )

    async def _left(self, record: CommitRecord) -> frozenset[str] | None:
        """Return the keys of the previews that are left of a batch; None if its media are there."""
        ref, batch = record.commands, record.batch
        if batch is None or (
            ref is not None and await self.history.store.backend.size(ref.key) == ref.size
        ):
            return None
        if batch not in self._previews:
            keys = await self.history.store.keys(previews_folder(self.history.run, batch))
            keep_newest(self._previews, batch, frozenset(keys), RECORDS)
        return self._previews[batch]

    async def _preview(self, batch: int, group: TrainedGroup, sample: int) -> bytes | None:
        """Return the preview of a sample; None without one."""
        key, place = _preview_of(self.history.run, batch, group, sample)
        data = await self.history.store.read(key)
        if data is None:
            self._previews.pop(batch, None)  # the newest ones go when there are newer ones
            return None
        try:
            return unpack_previews(data)[place]
        except (ContractError, IndexError):
            return None

    async def _letters(self, batch: int) -> list[DeadLetter]:
        await self.history.log.look(LOG_S)
        return [
            each for each in self.history.log.entries
            if isinstance(each, DeadLetter) and each.work and each.work.batch == batch
        ]  # fmt: skip

    async def _known_recipe(self) -> Recipe | None:
        recipe = self.history.recipe
        if recipe is None:
            await self.history.look()
            recipe = self.history.recipe
        if recipe is not None and self._prompts is None:
            with suppress(UserError, OSError):
                self._prompts = await asyncio.to_thread(prompt_order, recipe)
        return recipe

    def _prompt(self, recipe: Recipe | None, batch: int, group: int) -> str | None:
        if recipe is None or self._prompts is None:
            return None
        return self._prompts.of_group(batch, group, recipe.batch.groups).text

    async def _samples(
        self, batch: int, record: CommitRecord, places: Sequence[tuple[TrainedGroup, int]]
    ) -> list[SampleHistory]:
        left, letters = await self._left(record), await self._letters(batch)
        recipe = await self._known_recipe()
        return [self._sample(batch, *each, recipe, letters, left) for each in places]

    def _sample(
        self, batch: int, group: TrainedGroup, sample: int, recipe: Recipe | None,
        letters: Sequence[DeadLetter], left: frozenset[str] | None,
    ) -> SampleHistory:  # fmt: skip
        place = _place_of(group, sample)
        first, _, attempt = group.fragments[place]
        reward, mean, spread = group.rewards[sample], *_figures(group.rewards).values()
        has_advantages = reward is not None and mean is not None and bool(spread)
        why_not = group.dropped or ("it could not be scored" if reward is None else None)
        path = f"/v1/batches/{batch}/samples/{group.group}/{sample}/media"
        is_there = left is None or _preview_of(self.history.run, batch, group, sample)[0] in left
        return SampleHistory(
            batch=batch, group=group.group, sample=sample,
            prompt=self._prompt(recipe, batch, group.group), reward=reward,
            advantage=(reward - mean) / spread if has_advantages else None,  # type: ignore[operator]
            scores={name: scores[sample] for name, scores in group.parts.items()},
            policy_version=group.policy_version, generated_by=group.workers[place],
            attempt=attempt, trained=why_not is None, why_not=why_not,
            letters=_about(letters, group.group, first), media=path if is_there else None,
            media_gone=None if left is None else DELETED, **_combined(recipe),
        )  # fmt: skip


def _figures(rewards: Sequence[float | None]) -> dict[str, float | None]:
    """Return mean and standard deviation of what could be scored."""
    numbers = [each for each in rewards if each is not None]
    return {
        "reward_mean": statistics.fmean(numbers) if numbers else None,
        "reward_spread": statistics.pstdev(numbers) if numbers else None,
    }


def rank(reward: float | None, *, worst: bool) -> tuple[bool, float]:
    """Return what samples are sorted by, the worst or the best first. Those without a reward come
    last: a scorer that fails fails for many at once, and they would hide what is bad."""
    if reward is None:
        return True, 0.0
    return False, reward if worst else -reward


def _places(
    groups: Sequence[TrainedGroup], order: Order = "number"
) -> list[tuple[TrainedGroup, int]]:
    """Return groups and numbers of samples in an order."""
    places = [(group, sample) for group in groups for sample in range(len(group.rewards))]
    if order == "unscored":
        return [each for each in places if each[0].rewards[each[1]] is None]
    if order != "number":
        places.sort(key=lambda each: rank(each[0].rewards[each[1]], worst=order == "worst"))
    return places


def _unscored(groups: Sequence[TrainedGroup], letters: Sequence[DeadLetter]) -> list[UnscoredGroup]:
    """Return the groups with samples that have no score, with the reason of their newest letter."""
    reasons = {
        each.work.group: each.reason for each in sorted(letters, key=lambda each: each.number)
        if each.kind == "unscored" and each.work is not None
    }  # fmt: skip
    return [
        UnscoredGroup(
            group=each.group, num_samples=number,
            why=reasons.get(each.group) or each.dropped or "no dead letter says why",
        )
        for each in groups if (number := each.rewards.count(None))
    ]  # fmt: skip


def _combined(recipe: Recipe | None) -> dict[str, Any]:
    """Return how a run's scores are combined to rewards; resumed runs do it alike."""
    if recipe is None:
        return {}
    weights = {each.name: each.weight for each in recipe.reward.scorers}
    return {"weights": weights, "normalised": recipe.algorithm.rewards == "normalised"}


def _next(after: int, end: int) -> str | None:
    return str(after) if after < end else None


def _about(letters: Sequence[DeadLetter], group: int, first: int | None = None) -> list[int]:
    """Return the numbers of letters about a group, or about one of its fragments or all of it."""
    group_letters = (each for each in letters if each.work is not None and each.work.group == group)
    return [
        each.number for each in group_letters
        if first is None or each.work is None or each.work.first_sample in (None, first)
    ]  # fmt: skip


def _fragment_of(group: TrainGroup, sample: int) -> "tuple[Any, int]":
    """Return the fragment with a sample, and the sample's place in it; None without a fragment."""
    for each in group.fragments:
        if sample in each.fragment.samples:
            return each, sample - each.fragment.first_sample
    return None, 0


def _place_of(group: TrainedGroup, sample: int) -> int:
    """Return the place of the fragment with a sample."""
    return next(
        place for place, (first, number, _) in enumerate(group.fragments)
        if first <= sample < first + number
    )  # fmt: skip


def _preview_of(run: str, batch: int, group: TrainedGroup, sample: int) -> tuple[str, int]:
    """Return the object with the preview of a sample, and its place in it."""
    first, _, attempt = group.fragments[_place_of(group, sample)]
    return preview_key(run, batch, group.group, first, attempt), sample - first


def _picture(data: bytes, index: int) -> bytes:
    # numpy and Pillow, which a process that shows no pictures does not need
    from digenrl.evaluation.media import as_png
    from shared.store import media

    sample = media.read(data, lambda shape: None)[index]
    return as_png(sample if sample.ndim == 3 else sample[len(sample) // 2])


def _rules(recipe: Recipe | None) -> dict[str, str]:
    """Return how long objects are kept, by folder."""
    versions = "of versions that are needed"
    if recipe is not None:
        run, best = recipe.run, retention_from(recipe).keep_best
        more = [
            *([f"every {run.keep_every}th"] if run.keep_every else []),
            *([f"the {best} best" if best > 1 else "the best"] if best else []),
        ]
        versions = ", ".join([f"of the {run.keep_last} newest versions", *more, "and those in use"])
    trajectories = DELETED.removeprefix("deleted: media are kept ")
    return {
        "weights": versions, "checkpoints": versions,
        "batches": trajectories,
        "previews": "of the newest steps, and of some for ever, within run.preview_mb",
    }  # fmt: skip

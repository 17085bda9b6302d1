"""Objects of a run in the object store, and their keys.

<run>/recipe.json                    the resolved recipe that every service reads (run_recipe.py)
<run>/staleness.json                 result and reason of schedule.max_staleness = "auto"
<run>/files/<key>.json               digests of the model and the rewards (files.py)
<run>/files/libraries.<...>.json     versions of libraries, of each service
    (process/libraries.py)
<run>/files/first-version.json       which fluid device makes version 0
<run>/commits/<version>.json         the commit records (commits.py)
<run>/chain/<version>.json           summaries of old records, from this one on (chain.py)
<run>/copies/<version>/<sha256>.z    each commit record once more, in case it is damaged
    (record_backups.py)
<run>/copies/recipe/, copies/files/<key>/   the recipe and the digests of files, likewise
<run>/quarantine/...                 objects that `digenrl repair` has moved away
<run>/epochs/<epoch>.json            which scheduler commanded when (epochs.py)
<run>/log/<number>.json              requests, phases, alarms and dead letters (log.py)
<run>/weights/<sha256>.safetensors   a policy version's weights, while it is kept (retention.py)
<run>/checkpoints/<sha256>...        its optimizer and random state, as long
    .../<sha256>.manifest.json       which shards it consists of, if there are several
        (manifest.py)
<run>/conditions/<sha256>...         the conditioning of each prompt
<run>/sources/<sha256>               the image that a prompt edits, as its file was (sources.py)
<run>/conditions/by/<digest>.json    which of them encoders have made of a prompt (conditions.py)
<run>/usage/<batch>.json             use of the devices in that batch, and TAG's decisions
<run>/timeline/<batch>.z             when each device changed what it did
<run>/timeline/room                  written all the time, to see whether the store takes
    anything
<run>/evaluations/<settings>/...     results, and the pictures (docs/evaluation.md)
<run>/batches/<batch>/<sha256>...    trajectories and media, until no recovery needs them
    .../exchange/<attempt>.<round>/  which sums fluid devices have stored for a total
<run>/previews/<batch>/...           small pictures of samples that outlive them (previews.py)
"""

import contextlib
import json
import re

import structlog

from shared.messages.contracts import ObjectRef, SourceImage
from shared.store import ObjectStore
from shared.telemetry import CORRUPT

_NUMBER, _DIGEST = "(?P<number>[0-9]{8})", "[0-9a-f]{64}"
_RECORDS = rf"(?P<settings>[^/]+)/records/{_NUMBER}\.json"
NAMES = {
    "files": r"[^/]+\.json",
    "commits": rf"{_NUMBER}\.json",
    "chain": rf"{_NUMBER}\.json",
    "copies": rf"(?:{_NUMBER}|recipe|files/[^/]+)/(?P<digest>{_DIGEST})\.z",
    "epochs": r"(?P<number>[0-9]{16})\.json",
    "log": rf"{_NUMBER}\.json",
    "weights": rf"{_DIGEST}[^/]*",
    "checkpoints": rf"{_DIGEST}[^/]*",
    "conditions": rf"{_DIGEST}[^/]*|by/{_DIGEST}\.json",
    "sources": _DIGEST,
    "usage": rf"{_NUMBER}\.json",
    "timeline": rf"{_NUMBER}\.z|room",
    "evaluations": rf"{_RECORDS}|wanted\.json|log/[0-9]{{8}}\.json|[^/]+/media/[^/]+",
    "batches": rf"{_NUMBER}/(?:{_DIGEST}[^/]*|exchange/[0-9]+\.[0-9]+/[^/]+)",
    "previews": rf"{_NUMBER}/[0-9]+\.[0-9]+\.[0-9]+",
}
"""Names of the objects of each folder of a run: an object of another name has no owner."""

log = structlog.get_logger()
_foreign: set[str] = set()
"""Keys that this process has passed over, each of which is an alarm once."""


async def named_objects(
    store: ObjectStore, run: str, folder: str, within: str = ""
) -> dict[str, re.Match[str]]:
    """Return the objects of a run's folder, by their keys in order, that have a name of `NAMES`.

    Other objects are skipped with an alarm: the list decides where a run resumes, and a role may
    have put an object where its name has another meaning.

    Args:
        within: a part of the folder, such as ``00000012``.
    """
    matches = {}
    for key in await store.keys(f"{run}/{folder}/{within}".rstrip("/")):
        match = parse_name(run, folder, key)
        if match is not None:
            matches[key] = match
        elif key not in _foreign:
            _foreign.add(key)
            CORRUPT.labels(what="foreign").inc()
            remedy = f"stop the run, and digenrl repair {run} --apply moves it away"
            log.error("foreign_object", key=key, then="it is passed over", remedy=remedy)
    return matches


def parse_name(run: str, folder: str, key: str) -> re.Match[str] | None:
    """Return the parts of an object's name; None if it is no name of this folder."""
    return re.fullmatch(NAMES[folder], key.removeprefix(f"{run}/{folder}/"), re.ASCII)


async def numbers_in(store: ObjectStore, run: str, folder: str) -> list[int]:
    """Return the numbers by which objects of a folder are named, each once, the smallest first."""
    names = (await named_objects(store, run, folder)).values()
    return sorted({int(name["number"]) for name in names if name["number"]})


def recipe_key(run: str) -> str:
    return f"{run}/recipe.json"


def staleness_key(run: str) -> str:
    return f"{run}/staleness.json"


def file_key(run: str, key: str) -> str:
    """Return where the digest of a file is stored that a recipe's ``key`` names."""
    return f"{run}/files/{key}.json"


def first_version_key(run: str) -> str:
    return f"{run}/files/first-version.json"


def commits_folder(run: str) -> str:
    return f"{run}/commits"


def commit_key(run: str, version: int) -> str:
    return f"{commits_folder(run)}/{version:08d}.json"


def chain_folder(run: str) -> str:
    return f"{run}/chain"


def segment_key(run: str, first: int) -> str:
    """Return where the summary of commits is stored of which version ``first`` is the oldest."""
    return f"{chain_folder(run)}/{first:08d}.json"


def copy_key(run: str, name: str, digest: str) -> str:
    """Return where a copy is stored: of ``recipe``, of ``files/<key>`` or of a version's record."""
    return f"{run}/copies/{name}/{digest}.z"


def quarantine_key(run: str, key: str) -> str:
    """Return where a damaged object of a run is moved to."""
    return f"{run}/quarantine/{key.removeprefix(f'{run}/')}"


def epochs_folder(run: str) -> str:
    return f"{run}/epochs"


def epoch_key(run: str, epoch: int) -> str:
    return f"{epochs_folder(run)}/{epoch:016d}.json"


def log_folder(run: str) -> str:
    return f"{run}/log"


def weights_folder(run: str) -> str:
    return f"{run}/weights"


def checkpoints_folder(run: str) -> str:
    return f"{run}/checkpoints"


def sources_folder(run: str) -> str:
    return f"{run}/sources"


def source_ref(run: str, image: SourceImage) -> ObjectRef:
    """Return where a prompt's source image is stored."""
    key = f"{sources_folder(run)}/{image.sha256}"
    return ObjectRef(key=key, sha256=image.sha256, size=image.size)


def conditions_folder(run: str) -> str:
    return f"{run}/conditions"


def conditions_key(run: str, digest: str) -> str:
    """Return where the conditions of this digest are named (`shared.run.conditions.Encoding`)."""
    return f"{conditions_folder(run)}/by/{digest}.json"


def batch_folder(run: str, batch: int) -> str:
    return f"{_batches_folder(run)}/{batch:08d}"


def exchange_folder(run: str, batch: int, attempt: int, round_number: int) -> str:
    """Return where fluid devices publish their sums for a round (`services.trainer.fluid`)."""
    return f"{batch_folder(run, batch)}/exchange/{attempt}.{round_number}"


async def stored_batches(store: ObjectStore, run: str) -> list[int]:
    """Return the batches that have trajectories or media in the store."""
    return await numbers_in(store, run, "batches")


async def batches_with_previews(store: ObjectStore, run: str) -> list[int]:
    """Return the batches that have previews in the store."""
    return await numbers_in(store, run, "previews")


KEPT_BATCHES = 2
"""Number of committed batches whose messages and trajectories are kept for inspection."""
NEWEST_BATCHES = 2
"""Batches whose trajectories are being made or used: one is trained, one is generated."""


def _batches_folder(run: str) -> str:
    return f"{run}/batches"


def previews_folder(run: str, batch: int) -> str:
    return f"{run}/previews/{batch:08d}"


def usage_folder(run: str) -> str:
    return f"{run}/usage"


def evaluations_folder(run: str) -> str:
    return f"{run}/evaluations"


def evaluations_log_folder(run: str) -> str:
    return f"{evaluations_folder(run)}/log"


def evaluation_interval_key(run: str) -> str:
    """Return where an evaluator states its own interval, as {"every": 5}."""
    return f"{evaluations_folder(run)}/wanted.json"


async def evaluation_interval(store: ObjectStore, run: str) -> int | None:
    """Return every how many versions an evaluator measures, None if the recipe decides."""
    data = await store.read(evaluation_interval_key(run))
    with contextlib.suppress(ValueError, TypeError, KeyError):
        every = int(json.loads(data or b"{}")["every"])
        return every if every > 0 else None
    return None


async def set_evaluation_interval(store: ObjectStore, run: str, every: int) -> None:
    """State the interval of an evaluator: such versions are kept until they are measured."""
    if await evaluation_interval(store, run) != every:
        wanted = json.dumps({"every": every}).encode()
        await store.write(evaluation_interval_key(run), wanted)


async def measured_versions(store: ObjectStore, run: str) -> set[int]:
    """Return the versions with a record of an evaluation, at any settings."""
    return set(await numbers_in(store, run, "evaluations"))


def usage_key(run: str, batch: int) -> str:
    return f"{usage_folder(run)}/{batch:08d}.json"


def room_key(run: str) -> str:
    """Return what the scheduler writes to see whether the store takes anything."""
    return f"{run}/timeline/room"


def timeline_key(run: str, batch: int) -> str:
    return f"{run}/timeline/{batch:08d}.z"

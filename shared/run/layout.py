"""What a run keeps in the object store, and where.

<run>/recipe.json                    the resolved recipe, which every service works from
<run>/files/<key>.json               digests of the model and the rewards (files.py)
<run>/commits/<version>.json         the commit records (commits.py)
<run>/weights/<sha256>.safetensors   the weights of a policy version, for as long as it is kept
<run>/checkpoints/<sha256>...        its optimizer and random state, as long (retention.py)
<run>/conditions/<sha256>...         what the network is told about each prompt
<run>/usage/<batch>.json             what the devices did in that batch, and what TAG decided
<run>/evaluations/<settings>/...     what was measured, and the pictures (docs/evaluation.md)
<run>/batches/<batch>/<sha256>...    trajectories and media, until no recovery needs them
"""

import contextlib
import json
import re

from shared.store import ObjectStore


def recipe_key(run: str) -> str:
    return f"{run}/recipe.json"


def file_key(run: str, key: str) -> str:
    """Returns where the digest of a file is stored that a recipe's ``key`` names."""
    return f"{run}/files/{key}.json"


def commits_folder(run: str) -> str:
    return f"{run}/commits"


def commit_key(run: str, version: int) -> str:
    return f"{commits_folder(run)}/{version:08d}.json"


def weights_folder(run: str) -> str:
    return f"{run}/weights"


def checkpoints_folder(run: str) -> str:
    return f"{run}/checkpoints"


def conditions_folder(run: str) -> str:
    return f"{run}/conditions"


def batch_folder(run: str, batch: int) -> str:
    return f"{_batches_folder(run)}/{batch:08d}"


async def stored_batches(store: ObjectStore, run: str) -> list[int]:
    """Batches of which there are trajectories or media."""
    folder = _batches_folder(run)
    keys = await store.keys(folder)
    return sorted({int(key.removeprefix(f"{folder}/").split("/")[0]) for key in keys})


def _batches_folder(run: str) -> str:
    return f"{run}/batches"


def usage_folder(run: str) -> str:
    return f"{run}/usage"


def evaluations_folder(run: str) -> str:
    return f"{run}/evaluations"


def wanted_evaluations_key(run: str) -> str:
    """Names the versions that an evaluator wants beside the recipe's, as {"every": 5}."""
    return f"{evaluations_folder(run)}/wanted.json"


async def wanted_evaluations(store: ObjectStore, run: str) -> int | None:
    """Versions from one that an evaluator measures to the next, if it was told otherwise than by
    the recipe."""
    data = await store.read(wanted_evaluations_key(run))
    with contextlib.suppress(ValueError, TypeError, KeyError):
        every = int(json.loads(data or b"{}")["every"])
        return every if every > 0 else None
    return None


async def want_evaluations(store: ObjectStore, run: str, every: int) -> None:
    """So that what is to be measured is kept until it is."""
    if await wanted_evaluations(store, run) != every:
        wanted = json.dumps({"every": every}).encode()
        await store.write(wanted_evaluations_key(run), wanted)


async def measured_versions(store: ObjectStore, run: str) -> set[int]:
    """Versions of which there is a record of an evaluation, at any settings."""
    keys = await store.keys(evaluations_folder(run))
    found = (re.search(r"/records/(\d+)\.json\Z", key) for key in keys)
    return {int(match[1]) for match in found if match is not None}


def usage_key(run: str, batch: int) -> str:
    return f"{usage_folder(run)}/{batch:08d}.json"

"""Compares two runs: at which step their weights first differ, and what is recorded of why."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from digenrl.local.runs import Run
from digenrl.local.start import FILES_JSON, STARTED_JSON
from digenrl.local.store import run_store
from digenrl.reading.recipe_differences import flat_values
from shared.errors import UserError
from shared.process.libraries import recorded_versions
from shared.recipe.recipe import Recipe, stored_recipe
from shared.run.commits import commit_chain

NAMES = {"run.name", "model.folder"}
"""Keys that differ without another result: the model's files are compared by their digest."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Holds what decides the bytes of a run, as its folder records it."""

    run: Run
    recipe: Recipe
    facts: Mapping[str, Any]
    """Keys of the recipe, digests of files, and versions of libraries, each by a name."""


def read_record(run: Run) -> RunRecord:
    """Read the record of a run.

    Raises:
        UserError: if the folder holds no run.
    """
    folder = run.folder
    try:
        recipe = stored_recipe((folder / "recipe.json").read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: holds no run of `digenrl up` (recipe.json)") from error
    files, started = _read(folder / FILES_JSON), _read(folder / STARTED_JSON)
    facts = dict(flat_values(recipe.model_dump(mode="json")))
    facts |= {f"digest of {key}": each.get("digest") for key, each in files.items()}
    facts |= {f"version of {key}": each for key, each in started.get("versions", {}).items()}
    facts |= {f"machine: {key}": each for key, each in started.get("machine", {}).items()}
    return RunRecord(run, recipe, facts)


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def differences(one: RunRecord, other: RunRecord) -> list[str]:
    """Name each recorded fact that differs; a path whose file has the same digest does not."""
    same_files = {
        name.removeprefix("digest of ")
        for name, value in one.facts.items()
        if name.startswith("digest of ") and other.facts.get(name) == value
    }
    names = dict.fromkeys((*one.facts, *other.facts))
    return [
        f"{name} was {_shown(one.facts.get(name))}, and is {_shown(other.facts.get(name))}"
        for name in names
        if name not in NAMES | same_files and one.facts.get(name) != other.facts.get(name)
    ]


def _shown(value: Any) -> str:
    return "not recorded" if value is None else json.dumps(value)


@dataclass(frozen=True, slots=True)
class StoredFacts:
    """Stored facts of a run that has ended."""

    weights: Sequence[str]
    """Digest of the weights of each version."""
    versions: Mapping[str, str]
    """Versions of libraries, by entries such as "torch of rollout"; empty for an earlier
    release."""


def stored(record: RunRecord) -> StoredFacts:
    """Read the store of a run that has ended.

    Raises:
        UserError: if the run is in progress, or its store holds no version.
    """
    with run_store(record.run) as store:
        chain = asyncio.run(commit_chain(store, record.run.id))
        libraries = asyncio.run(recorded_versions(store, record.run.id))
    if not chain:
        raise UserError(f"{record.run.name}: the run has no version yet")
    return StoredFacts([each.policy.weights_digest for each in chain], libraries)


def workers_differences(one: StoredFacts, other: StoredFacts) -> list[str]:
    """Name each library of which the workers of two runs had other versions. A run of an earlier
    release did not record them: nothing is compared."""
    if not (one.versions and other.versions):
        return []
    return [
        f"version of {name} workers was {_shown(one.versions.get(name))}, and is "
        f"{_shown(other.versions.get(name))}"
        for name in dict.fromkeys((*one.versions, *other.versions))
        if one.versions.get(name) != other.versions.get(name)
    ]


def first_difference(one: Sequence[str], other: Sequence[str]) -> int | None:
    """Return the first version whose weights differ; None if all that both have are the same.

    >>> first_difference(["a", "b", "c"], ["a", "x"])
    1
    """
    pairs = zip(one, other, strict=False)
    return next((at for at, (mine, theirs) in enumerate(pairs) if mine != theirs), None)


def verdict(one: RunRecord, other: RunRecord) -> tuple[bool, list[str]]:
    """Report whether two runs have the same weights, at which version they first differ, and
    why."""
    my_store, their_store = stored(one), stored(other)
    mine, theirs = my_store.weights, their_store.weights
    at = first_difference(mine, theirs)
    all_differences = [*differences(one, other), *workers_differences(my_store, their_store)]
    common = min(len(mine), len(theirs))
    if at is None:
        lines = [f"{other.run.name} has the weights of {one.run.name} in each of {common} versions"]
        return True, [*lines, *(f"although {each}" for each in all_differences)]
    step = "before the first step" if at == 0 else f"at step {at}"
    lines = [
        f"{other.run.name} first differs from {one.run.name} {step} (version {at} of {common})"
    ]
    return False, [
        *lines,
        *(f"because {each}" for each in all_differences or [_unrecorded(one.recipe)]),
    ]


def _unrecorded(recipe: Recipe) -> str:
    if not recipe.trainer.deterministic:
        return (
            "trainer.deterministic is false: gradients are summed in the order in which devices "
            "are done; nothing else that is recorded differs"
        )
    return "of something that is not recorded: recipe, files, versions and machine are the same"

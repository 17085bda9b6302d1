"""Data sets of the Hugging Face hub: which files of a repository hold a split, and where the
prompts that are made of them are on this host.

    CACHE/datasets--ORG--NAME/snapshots/COMMIT/...                   files of the repository
    CACHE/datasets--ORG--NAME/prompts/COMMIT/COLUMNS/prompts.jsonl   the prompts made of them,
        with images
    CACHE/datasets--@files/prompts/DIGEST/COLUMNS/prompts.jsonl      made of files of this host

The files of a split are those that the card's `configs` name. Without these the files are chosen by
name: the name or folder has the split's name as a word; if no name has a split's, all files belong
to `train`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from shared.errors import UserError

PREFIX = "datasets--"
LOCAL_DATASET = f"{PREFIX}@files"
"""Folder of what is made of files of this host; no name on the hub has an @."""
PROMPTS_FILE = "prompts.jsonl"
FORMATS = (".parquet", ".jsonl", ".ndjson", ".json", ".csv")
"""Suffixes of files that are read; if a split has several, the first one applies."""
CONVERTED = "refs/convert/parquet"
"""Branch on which the hub keeps Parquet files of most data sets, as CONFIG/SPLIT/0000.parquet."""
SPLIT_NAMES: Mapping[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
NO_ROWS = ("dataset_infos.json", "dataset_info.json", "state.json")
"""JSON files that describe a data set."""


def missing_dataset_advice(path: Path) -> str | None:
    """Return why the prompts of a data set are missing on this host, with the remedy; None for any
    other file, and for an existing file."""
    if path.name != PROMPTS_FILE or path.exists():
        return None
    folder = next((part for part in path.parts if part.startswith(PREFIX)), None)
    if folder is None:
        return None
    if folder == LOCAL_DATASET:
        return (
            "data.dataset.folder, evaluation.dataset.folder: this host has no prompts from "
            "the current files with these columns; make them with: digenrl fetch RECIPE"
        )
    name = folder.removeprefix(PREFIX).replace("--", "/", 1)
    return (
        f"data.dataset, evaluation.dataset: {name} is not on this host with these columns; fetch "
        "it with: digenrl fetch RECIPE"
    )


def chosen_files(
    names: Sequence[str], configs: Sequence[Mapping[str, Any]], config: str | None, split: str
) -> list[str]:
    """Return the files of a repository that hold a split, in order.

    Args:
        names: all files of the repository.
        configs: configurations in the card, as the hub returns them; may be empty.

    Raises:
        UserError: if there is no such configuration or split; without the recipe's key, which is
            the caller's to name: the message begins with `config`, `split` or `id`.
    """
    data = sorted(name for name in names if _has_rows(name))
    if not data:
        raise UserError(
            f"id: has no Parquet, JSON or CSV file; if the hub shows its rows, set the revision to "
            f"{CONVERTED}"
        )
    if configs:
        files = _split_from_card(data, _find_config(configs, config), split)
    else:
        files = _by_name(_below(data, config), split)
    if not files:
        shown = ", ".join(data[:4])
        raise UserError(f"split: no file belongs to {split!r}; its files are {shown}")
    first = min(FORMATS.index(PurePosixPath(name).suffix) for name in files)
    return [name for name in files if name.endswith(FORMATS[first])]


def _has_rows(name: str) -> bool:
    path = PurePosixPath(name)
    hidden = any(part.startswith((".", "_")) for part in path.parts)
    return path.suffix in FORMATS and not hidden and path.name not in NO_ROWS


def _find_config(configs: Sequence[Mapping[str, Any]], wanted: str | None) -> Mapping[str, Any]:
    by_name = {str(each.get("config_name", "default")): each for each in configs}
    if wanted is not None and wanted in by_name:
        return by_name[wanted]
    default = [each for each in configs if each.get("default")] or [
        each for name, each in by_name.items() if name == "default" or len(by_name) == 1
    ]
    if wanted is None and default:
        return default[0]
    given = "is needed" if wanted is None else f"there is no {wanted!r}"
    raise UserError(f"config: {given}; it has {', '.join(by_name)}")


def _split_from_card(data: Sequence[str], config: Mapping[str, Any], split: str) -> list[str]:
    folder = str(config.get("data_dir") or "").strip("/")
    inside = [name for name in data if not folder or name.startswith(f"{folder}/")]
    if (files := config.get("data_files")) is None:
        return _by_name(inside, split)
    patterns = [
        re.compile(_regex(f"{folder}/{glob}" if folder else glob))
        for name, glob in _globs(files)
        if name == split
    ]
    return [name for name in inside if any(each.fullmatch(name) for each in patterns)]


def _globs(files: Any) -> Iterator[tuple[str, str]]:
    """Yield split and pattern of each of a card's `data_files`, in any of the forms it may have."""
    if isinstance(files, Mapping):
        for split, paths in files.items():
            for path in [paths] if isinstance(paths, str) else paths:
                yield str(split), str(path)
        return
    for each in [files] if isinstance(files, str) else files:
        if isinstance(each, Mapping):
            yield from _globs({each.get("split", "train"): each.get("path", [])})
        else:
            yield "train", str(each)


def _regex(glob: str) -> str:
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", glob.removeprefix("./"))
    signs = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(signs.get(part, re.escape(part)) for part in parts)


def _below(data: Sequence[str], config: str | None) -> list[str]:
    if config is None:
        return list(data)
    below = [name for name in data if name.startswith(f"{config}/")]
    if not below:
        folders = sorted({name.split("/")[0] for name in data if "/" in name})
        raise UserError(
            f"config: there is no {config!r}; its folders are {', '.join(folders) or 'none'}"
        )
    return below


def _by_name(data: Sequence[str], split: str) -> list[str]:
    named = [name for name in data if _has_word(name, SPLIT_NAMES.get(split, (split,)))]
    split_words = [word for words in SPLIT_NAMES.values() for word in words]
    if named or split != "train" or any(_has_word(name, split_words) for name in data):
        return named
    return list(data)


def _has_word(name: str, words: Sequence[str]) -> bool:
    return not {*words}.isdisjoint(re.split(r"[^a-z0-9]+", name.lower())[:-1])

"""Makes the folders of a recipe's scorers from files of the hub, fetched as a model's are."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from digenrl.hub.answers import explained
from digenrl.hub.fetch import ShowLine, alone, check_space, name_commit, opened
from services.reward.kinds import KINDS
from shared.errors import UserError, how_to_install
from shared.models.hub import MAIN
from shared.recipe.recipe import Recipe
from shared.recipe.rewards import ScorerTable

CONFIGS, WEIGHTS = (".json", ".txt", ".model"), "model.safetensors"


def fetch_rewards(recipe: Recipe, say: ShowLine) -> Iterator[Path]:
    """Make the missing folders, and explain how to start the servers of a recipe.

    Raises:
        UserError: if a folder cannot be made, with the reason.
        Unavailable: as `fetch`.
    """
    tables = {"reward": recipe.reward.scorers, "evaluation": recipe.evaluation.scorers}
    for name, table in ((name, table) for name, scorers in tables.items() for table in scorers):
        field = f"{name}.scorers.{table.name}"
        hub = KINDS[table.type].hub if table.type in KINDS else None
        if table.url is not None:
            say(f"{field}: asks {table.url}{_command(table, table.url)}")
        elif hub is not None and table.folder is not None:
            if not table.folder.exists():
                type = "video-align" if table.type.startswith("video-align") else table.type
                _make(type, *hub, table.folder, f"{field}.folder", say)
            yield table.folder


def _make(type: str, model: str, file: str, folder: Path, key: str, say: ShowLine) -> None:
    needed = "config.json" if file and type != "aesthetic" else WEIGHTS
    like = _fetched(model, needed, CONFIGS, key, say)
    try:
        folder.unlink(missing_ok=True)  # a link to files that were removed
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not file:
            folder.symlink_to(like.resolve())
            return
        from digenrl.hub.reward_weights import make_folder

        owner, name, file = file.split("/", 2)
        weights = _fetched(f"{owner}/{name}", file, (), key, say) / file
        new = folder.with_name(f"{folder.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        if (free := shutil.disk_usage(folder.parent).free) < 2 * weights.stat().st_size:
            raise UserError(
                f"{key}: {folder} needs more than the {free / 2**30:.1f} GiB of free space"
            )
        say(f"making {folder}")
        make_folder(type, weights, like, new)
        new.rename(folder)
    except ImportError as error:
        raise UserError(f"{key}: to make it {how_to_install('reward')} ({error})") from error
    except OSError as error:
        raise UserError(f"{key}: {folder} cannot be made: {error}") from error


def _fetched(model: str, needed: str, ends: tuple[str, ...], key: str, say: ShowLine) -> Path:
    """Fetch a file of a model, and those in its folder whose names end so. Returns the folder."""
    download = opened(model, None, key)
    if needed not in download.sizes:
        raise UserError(f"{key}: {model} has no {needed} any more")
    names = [
        name
        for name in download.sizes
        if name == needed
        or ("/" not in name and name.endswith(ends) and not name.endswith(".index.json"))
    ]
    with alone(download.place, say), explained(model, key=key):
        check_space(download, names, say)
        download.get(names)
        name_commit(download.place, MAIN, download.commit)
    return download.folder


def _command(table: ScorerTable, url: str) -> str:
    judge, port = table.judge, urlsplit(url).port
    serve = "digenrl serve-scorer TYPE" if judge is None else f"vllm serve {judge.model}"
    return f"; start its server, such as: {serve} --port {port}" if port else ""

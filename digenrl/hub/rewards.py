"""Makes the folders of a recipe's scorers from files of the hub, fetched as a model's are."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from digenrl.hub.answers import explained
from digenrl.hub.fetch import ShowLine, alone, check_space, name_commit, opened
from shared.errors import UserError, how_to_install
from shared.models.hub import MAIN
from shared.recipe.recipe import Recipe
from shared.recipe.rewards import ScorerTable

CLIP_L, CLIP_H = "openai/clip-vit-large-patch14", "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
SOURCES: Mapping[str, tuple[str, str]] = {
    "aesthetic": (CLIP_L, "trl-lib/ddpo-aesthetic-predictor/aesthetic-model.pth"),
    "clip-score": (CLIP_L, ""),
    "hpsv2": (CLIP_H, "xswu/HPSv2/HPS_v2.1_compressed.pt"),
    "hpsv3": ("Qwen/Qwen2-VL-7B-Instruct", "MizzenAI/HPSv3/HPSv3.safetensors"),
    "image-reward": ("google-bert/bert-base-uncased", "zai-org/ImageReward/ImageReward.pt"),
    "objects": ("google/owlv2-base-patch16-ensemble", ""),
    "pick-score": (CLIP_H, "yuvalkirstain/PickScore_v1/model.safetensors"),
    "video-align": (
        "Qwen/Qwen2-VL-2B-Instruct", "KlingTeam/VideoReward/checkpoint-11352/model.pth",
    ),
}  # fmt: skip
"""By type: a model with configuration, tokenizer and image processor, and the file of the weights,
ORG/NAME/FILE; without one, the model is the whole folder."""
CONFIGS, WEIGHTS = (".json", ".txt", ".model"), "model.safetensors"


def fetch_rewards(recipe: Recipe, say: ShowLine) -> Iterator[Path]:
    """Make the missing folders, and explain how to start the servers of a recipe.

    Raises:
        UserError: if a folder cannot be made, with the reason.
        Unavailable: as `fetch`.
    """
    tables = {"reward": recipe.reward.scorers, "evaluation": recipe.evaluation.scorers}
    for name, table in ((name, table) for name, found in tables.items() for table in found):
        field = f"{name}.scorers.{table.name}"
        type = "video-align" if table.type.startswith("video-align") else table.type
        if table.url is not None:
            say(f"{field}: asks {table.url}{_command(table, table.url)}")
        elif type in SOURCES and table.folder is not None:
            if not table.folder.exists():
                _make(type, table.folder, f"{field}.folder", say)
            yield table.folder


def _make(type: str, folder: Path, key: str, say: ShowLine) -> None:
    model, file = SOURCES[type]
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

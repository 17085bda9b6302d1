"""Explains a path that names no model, and what to name in its place."""

from pathlib import Path

INDEX = "model_index.json"


def no_model(path: Path) -> str:
    """Return why a path is not the folder of a diffusers model, in one line."""
    return f"model.folder: {path} {_reason(path)}"


def _reason(path: Path) -> str:
    if path.is_file():
        return (
            "is a file, and a folder in diffusers' layout is read; make one of it with the "
            "pipeline's from_single_file(FILE).save_pretrained(FOLDER)"
        )
    commits = sorted(each.parent for each in path.glob(f"snapshots/*/{INDEX}"))
    if commits:
        return f"is a cache of the hub; name a commit in it, such as {commits[-1]}, or model.id"
    if (path.parent / INDEX).is_file():
        return f"is one part of a model; name the whole, {path.parent}"
    inside = sorted(each.parent for each in path.glob(f"*/{INDEX}"))
    if inside:
        return f"is not a diffusers model, and holds one; name {inside[0]}"
    return (
        f"is not a diffusers model (no readable {INDEX}); name the folder that holds one, or a "
        "model of the hub as model.id"
    )


def no_weights(folder: Path, wanted: str) -> str:
    """Return why the weights of a part of a model are not there, in one line.

    Args:
        wanted: the missing files, relative to the model's folder.
    """
    part = folder / Path(wanted).parent
    message = f"model.folder: {folder} contains no {wanted}"
    variants = sorted(each.name for each in part.glob("*.*.safetensors*"))
    if variants:
        return f"{message}, but a variant, {variants[0]}; rename it without the variant's name"
    others = sorted(each.name for kind in ("bin", "pt", "ckpt") for each in part.glob(f"*.{kind}"))
    if others:
        return (
            f"{message}, but {others[0]}, and safetensors alone are read; load the model with "
            "diffusers, and save it with save_pretrained"
        )
    return f"{message}; copy or fetch it once more"

"""Reads from a model folder, without torch, its family, sizes and noise schedule.

A folder may hold more than its adapter uses, such as an image encoder. Its samples would come from
half a model, so it is refused.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shared.errors import UserError
from shared.models.families import EXPERTS, FamilySpec
from shared.models.hub import REQUIRED_PARTS, missing, needed_parts
from shared.models.memory import METADATA, PARTS, ModelPart, part_folders, read_header, weight_files
from shared.models.model_errors import no_model, no_weights
from shared.models.plugins import family_named
from shared.models.refused import unsupported
from shared.models.sigmas import Sigmas, unknown_keys

_SCHEDULE = "scheduler/scheduler_config.json"
_BOUNDARY = "boundary_ratio"
_SECOND = EXPERTS["low"]
MIN_VOCABULARY = 0.9
"""Share of an encoder's vocabulary that its tokenizer has at least; published ones have .997."""


class PartConfig(dict[str, Any]):
    """The configuration of one part of a model; a key that is missing and needed is a UserError."""

    def __init__(self, file: Path) -> None:
        """Raises UserError if the file cannot be read."""
        try:
            super().__init__(json.loads(file.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"model.folder: {file} cannot be read, or is no JSON") from error
        self._file = file

    def __missing__(self, key: str) -> Any:
        raise UserError(f"model.folder: {self._file} has no {key}; choose a complete model")


def find_family(folder: Path) -> FamilySpec:
    """Returns the family whose pipeline the folder names.

    Raises:
        UserError: if the folder is not a diffusers model, or of a family without an adapter.
    """
    index = folder / "model_index.json"
    try:
        pipeline = str(json.loads(index.read_text())["_class_name"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(missing(folder) or no_model(folder)) from error
    family = family_named(pipeline)
    if family is None:
        raise UserError(f"model.folder: {folder} holds {unsupported(pipeline)}")
    return family


def check_family(folder: Path) -> FamilySpec:
    """Returns the folder's family after a look at its parts and settings.

    Raises:
        UserError: as `find_family`; or if the adapter does not know a part or a setting.
    """
    family = find_family(folder)
    components = family.components | REQUIRED_PARTS
    if family.has_experts:
        components |= {_SECOND, _BOUNDARY}
        _check_experts(folder)
    unknown = [
        *_unknown(folder / "model_index.json", components),
        *_unknown(folder / "transformer" / "config.json", family.network_keys),
    ]
    if unknown:
        raise UserError(
            f"model.folder: {folder} has {', '.join(unknown)}, which the adapter of "
            f"{family.pipeline} does not know: it would leave them out and make other samples; "
            "choose another model"
        )
    return family


def check_weights(folder: Path) -> None:
    """Raises UserError unless the weights of every part are there: a download may have ended
    early."""
    for name in (name for part in PARTS for name in part_folders(folder, part)):
        files = weight_files(folder / name)
        missing_file = next((file for file in files if not file.is_file()), None)
        if files and missing_file is None:
            _check_whole(files)
            continue
        what = (
            f"{name}/*.safetensors"
            if missing_file is None
            else missing_file.relative_to(folder).as_posix()
        )
        raise UserError(missing(folder, what) or no_weights(folder, what))


def check_parts(folder: Path) -> None:
    """Raises UserError unless the tokenizers, with their vocabularies, and the noise schedule are
    there, which have no weights, and the decoder has the numbers that scale latents."""
    for part in needed_parts(PartConfig(folder / "model_index.json")):
        if part.startswith(("tokenizer", "scheduler")) and not (folder / part).is_dir():
            raise UserError(
                missing(folder, part)
                or f"model.folder: {folder} contains no {part}; copy or fetch it once more"
            )
        if part.startswith("tokenizer") and not _has_vocabulary(folder / part):
            raise UserError(
                f"model.folder: {folder / part} has no vocabulary, such as tokenizer.json: "
                "prompts would become unknown tokens; copy or fetch it once more"
            )
        if part.startswith("tokenizer"):
            _check_vocabulary(folder, part)
    _check_scales(folder / "vae" / "config.json")


def _check_vocabulary(folder: Path, part: str) -> None:
    """Raises UserError if tokenizer.json does not fit the encoder."""
    file = folder / part / "tokenizer.json"
    config = folder / part.replace("tokenizer", "text_encoder") / "config.json"
    if not (file.is_file() and config.is_file()):
        return
    tokens, encoder = PartConfig(file), PartConfig(config)
    vocabulary = (tokens.get("model") or {}).get("vocab") or ()
    words = {each if isinstance(each, str) else each[0] for each in vocabulary}
    words |= {each["content"] for each in tokens.get("added_tokens") or ()}
    needed = encoder.get("vocab_size") or (encoder.get("text_config") or {}).get("vocab_size")
    if words and needed:
        check_vocabulary(folder / part, len(words), needed)


def check_vocabulary(folder: Path, has: int, needed: int) -> None:
    """Raises UserError if a tokenizer has more tokens than its encoder, or far fewer."""
    if not MIN_VOCABULARY * needed <= has <= needed:
        raise UserError(
            f"model.folder: {folder} has {has} tokens, and its encoder {needed}; fetch or copy the "
            "files of the tokenizer again"
        )


def _check_scales(file: Path) -> None:
    """Raises UserError if a decoder lacks a number that scales or shifts latents."""
    config = PartConfig(file)
    if config.get("_class_name") == "AutoencoderKL":
        config.setdefault("shift_factor", None)
    # Decoders with a shift have null for each channel's mean and deviation.
    statistics = () if "shift_factor" in config else ("latents_mean", "latents_std")
    for key in ("scaling_factor", "shift_factor", *statistics):
        value = config.get(key, 1)
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(each, int | float) and math.isfinite(each) for each in values):
            raise UserError(
                f"model.folder: {file} has {key} = {json.dumps(value)}, and its decoder needs "
                "numbers; choose a complete model"
            )


def _has_vocabulary(folder: Path) -> bool:
    names, config = {file.name for file in folder.iterdir()}, folder / "tokenizer_config.json"
    return (
        bool(names & {"tokenizer.json", "vocab.txt", "tekken.json"})
        or names >= {"vocab.json", "merges.txt"}
        or any(name.endswith(".model") for name in names)
        or (config.is_file() and "ByT5" in config.read_text())  # whose tokens are bytes
    )


def _check_whole(files: Sequence[Path]) -> None:
    for file in files:
        tensors, begin = read_header(file)
        offsets = [each["data_offsets"][1] for name, each in tensors.items() if name != METADATA]
        if file.stat().st_size < begin + max(offsets, default=0):
            raise UserError(f"model.folder: {file} is broken off; copy or fetch it once more")


def boundary(folder: Path) -> float | None:
    """Return the smallest sigma of high noise, if the folder has an expert for each side of it;
    None if it has one network.

    Raises:
        UserError: if the folder is not a diffusers model.
    """
    if not find_family(folder).has_experts:
        return None
    value = PartConfig(folder / "model_index.json").get(_BOUNDARY)
    return None if value is None else float(value)


def network_folders(folder: Path) -> list[Path]:
    """Returns the folders of the networks that are trained, of which there are one or two.

    Raises:
        UserError: if the folder is not a diffusers model.
    """
    names = EXPERTS.values() if boundary(folder) is not None else [EXPERTS["high"]]
    return [folder / name for name in names]


def _check_experts(folder: Path) -> None:
    """Raises UserError unless the folder has one network, or two of the same kind and a boundary
    between them."""
    index = PartConfig(folder / "model_index.json")
    has_second, ratio = any(index.get(_SECOND) or ()), index.get(_BOUNDARY)
    if not has_second and ratio is None:
        return
    if not (has_second and isinstance(ratio, float) and 0 < ratio < 1):
        raise UserError(
            f"model.folder: {folder} has {_SECOND} = {json.dumps(index.get(_SECOND))} and "
            f"{_BOUNDARY} = {json.dumps(ratio)}: two networks need a boundary between 0 and 1; "
            "choose a complete model"
        )
    first, second = (
        {key: value for key, value in config.items() if not key.startswith("_")}
        for config in (PartConfig(folder / name / "config.json") for name in EXPERTS.values())
    )
    if first != second:
        name = min(key for key in first | second if first.get(key) != second.get(key))
        raise UserError(
            f"model.folder: the two networks of {folder} have another {name}, and the adapter "
            "needs two of one kind; choose another model"
        )


def _unknown(file: Path, components: frozenset[str]) -> Iterator[str]:
    """Yields enabled entries of ``file`` beyond ``components``, as "name" or "name = value"."""
    for name, value in (PartConfig(file) if file.is_file() else {}).items():
        if name in components or name.startswith("_") or value in (None, False, [None, None]):
            continue
        yield name if isinstance(value, list) else f"{name} = {json.dumps(value)}"


def encoding_parts(folder: Path) -> frozenset[ModelPart]:
    """Returns the parts of a model that prompts are encoded with: where they have source images,
    these are encoded by the decoder's other half.

    Raises:
        UserError: if the folder is not a diffusers model.
    """
    text: frozenset[ModelPart] = frozenset({"text"})
    return text | {"decoder"} if find_family(folder).takes_image else text


def text_tokens(folder: Path, wanted: int | None) -> int:
    """Returns the tokens at which a prompt is cut off, and to which it is padded where the pipeline
    does not mask the padding: ``wanted``, or what the family is used with.

    Raises:
        UserError: if the model does not take as many.
    """
    family = find_family(folder)
    if wanted is not None and wanted > family.max_text_tokens:
        raise UserError(
            f"model.text_tokens: {wanted} is more than this model takes; at most "
            f"{family.max_text_tokens}"
        )
    return family.text_tokens if wanted is None else wanted


def check_size(folder: Path, table: str, *, height: int, width: int) -> None:
    """Raises UserError, which names the key of ``table``, unless the model in ``folder`` makes
    samples of ``height`` x ``width`` pixels."""
    find_family(folder).check_size(table, *_configs(folder), height=height, width=width)


def pixels_per_token(folder: Path) -> int:
    """Returns the pixels of a token each way.

    Raises:
        UserError: if the folder does not define it.
    """
    return find_family(folder).pixels_per_token(*_configs(folder))


def pipeline_sigmas(
    folder: Path, num_steps: int, *, height: int, width: int, frames: int
) -> Sigmas:
    """Returns the noise schedule of the model's own pipeline.

    Each pipeline gives its scheduler another grid, and the scheduler shifts it by its
    configuration; conventions follow diffusers 0.42. Wan's folders name a solver of higher order:
    its sigmas are used, for Euler steps.

    Raises:
        UserError: if the folder does not define it, or its scheduler has an unknown setting.
    """
    family, file = find_family(folder), folder / _SCHEDULE
    try:
        config: dict[str, Any] = dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f'sampling.sigmas: "model" needs {file}, which cannot be read') from error
    if unknown := unknown_keys(family.sigmas, config):
        raise UserError(
            f'sampling.sigmas: "model" does not support {", ".join(unknown)} of {file}; '
            "write the sigmas of its pipeline's scheduler as numbers, or choose another model"
        )

    def num_tokens() -> int:
        return family.num_tokens(*_configs(folder), height=height, width=width, frames=frames)

    return family.sigmas(config, num_steps, num_tokens)


def latent_shape(folder: Path, *, height: int, width: int, frames: int) -> tuple[int, ...]:
    """Returns the shape of one sample's latents; raises UserError if the model makes none of that
    size."""
    return find_family(folder).latent_shape(
        *_configs(folder), height=height, width=width, frames=frames
    )


def _configs(folder: Path) -> tuple[PartConfig, PartConfig]:
    """Returns the configurations of the network and of the decoder."""
    return PartConfig(folder / "transformer/config.json"), PartConfig(folder / "vae/config.json")

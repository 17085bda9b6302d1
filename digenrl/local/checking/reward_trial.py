"""Tests a user's reward function on the images of a folder, as a reward worker runs it."""

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from services.reward.reward_file import RewardFile, parse_source, read_table
from services.reward.scorer import Metadata, WeightedScorer, scorer_inputs
from services.reward.scorers.python_file import PythonScorer
from services.reward.scorers.python_process import check_can_run
from services.reward.scoring import load_source, score_each
from shared.errors import ContractError, UserError
from shared.learning.prompt_rows import Row
from shared.learning.prompts import read_rows
from shared.messages.contracts import Prompt
from shared.recipe.rewards import PYTHON, ScorerTable

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")

Pixels = npt.NDArray[np.uint8]


class RewardTrialResult(BaseModel):
    image: str
    prompt: str
    score: float | None
    reason: str | None = None


class RewardTrial(BaseModel):
    """Result of `digenrl reward try`."""

    source: str
    function: str
    digest: str
    parameters: tuple[str, ...]
    environment: tuple[str, ...] | None
    """Packages of the function's own environment; None if it runs in the environment of DigenRL."""
    scores: list[RewardTrialResult]
    mean: float | None
    """Mean over the images with a score; None if no image has a score."""
    seconds: float
    """Time of scoring, without the import of the file."""

    @property
    def failed(self) -> int:
        return sum(each.score is None for each in self.scores)


def try_file(
    source: str, images: Path, prompts: Path | None, *, patience: float, groups: bool
) -> RewardTrial:
    """Score the images of a folder.

    Raises:
        UserError: one line, if the file, the folder or the prompts are invalid.
    """
    path, function = parse_source(source, "FILE")
    table = ScorerTable(
        name=PYTHON, type=PYTHON, source=path, function=function, patience=patience,
        scores="groups" if groups else "samples",
    )  # fmt: skip
    file = read_table(table)
    check_can_run(file)
    samples = read_images(images)
    metadata = _metadata(prompts, list(samples.values()))
    if prompts is not None:
        file.check_names(metadata)
    scorer = PythonScorer(file, patience=patience, whole_groups=groups)
    try:
        began = time.monotonic()
        scores = list(
            _scored(WeightedScorer(PYTHON, 1.0, scorer, "both", groups), samples, metadata)
        )
        return _trial(file, scores, time.monotonic() - began)
    finally:
        scorer.close()


def as_lines(trial: RewardTrial) -> Iterator[str]:
    """Yield one line per image, and a last line with the mean."""
    width = max(len(each.image) for each in trial.scores)
    for each in trial.scores:
        text = f"no score: {each.reason}" if each.score is None else f"{each.score:.6g}"
        yield f"{each.image:{width}}  {text}"
    where = "this environment" if trial.environment is None else "its own environment"
    mean = "none" if trial.mean is None else f"{trial.mean:.6g}"
    yield (
        f"{trial.function}({', '.join(trial.parameters)}) in {where}: mean {mean} of "
        f"{len(trial.scores) - trial.failed} samples, {trial.seconds:.2f} s, "
        f"digest {trial.digest[:12]}"
    )


def read_images(folder: Path) -> dict[str, Pixels]:
    """Return the images (C, H, W) of a folder by name. A subfolder with images is a video
    (F, C, H, W). Gray files have one channel, other files three (RGB).

    Raises:
        UserError: if the folder has none.
    """
    if not folder.is_dir():
        raise UserError(f"--images: no folder {folder}")
    images: dict[str, Pixels] = {}
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            files = sorted(each for each in path.iterdir() if each.suffix.lower() in SUFFIXES)
            frames = [_pixels(each) for each in files]
            if frames:
                images[path.name] = _stacked(frames, path)
        elif path.suffix.lower() in SUFFIXES:
            images[path.name] = _pixels(path)
    if not images:
        raise UserError(f"--images: {folder} holds no image ({', '.join(SUFFIXES)})")
    return images


def _stacked(frames: Sequence[Pixels], folder: Path) -> Pixels:
    if len({frame.shape for frame in frames}) > 1:
        raise UserError(f"--images: the frames in {folder} have different sizes")
    return np.stack(frames)


def _pixels(path: Path) -> Pixels:
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as opened:
            image = ImageOps.exif_transpose(opened)
            is_gray = image.mode in ("1", "L", "LA") or image.mode.startswith("I")
            if image.mode.startswith("I"):  # Pillow clips 16-bit values at 255
                image = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
            pixels = np.asarray(image.convert("L" if is_gray else "RGB"), dtype=np.uint8)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"--images: {path} is no image: {error}") from None
    return pixels[None] if is_gray else np.moveaxis(pixels, -1, 0)


def _metadata(prompts: Path | None, samples: Sequence[Pixels]) -> Metadata:
    if prompts is None:
        return [{"prompt": ""}] * len(samples)
    if not os.path.exists(prompts):  # noqa: PTH110 -- Path.exists raises for a long text
        raise UserError(
            f"--prompts: no file {prompts}; name a file with one prompt per line: one for each "
            "image, or one for all"
        )
    try:
        rows = read_rows(prompts)
    except UserError as error:  # the message names keys of a recipe
        message = str(error).replace("data.prompts:", "--prompts:", 1)
        raise UserError(message.partition(", or name the file as data.dataset")[0]) from error
    if len(rows) not in (1, len(samples)):
        raise UserError(
            f"--prompts: {prompts} has {len(rows)} prompts for {len(samples)} images; give one for "
            "all images, or one for each image in the order of the file names"
        )
    pairs = zip(rows * (len(samples) // len(rows)), samples, strict=True)
    return [_arguments(prompt, source, sample) for (prompt, source), sample in pairs]


def score_images(
    scorer: WeightedScorer, folder: Path, rows: Sequence[Row]
) -> list[RewardTrialResult]:
    """Score the images of a folder, each made for the row of the same number."""
    samples = read_images(folder)
    pairs = zip(rows, samples.values(), strict=True)
    metadata = [_arguments(prompt, source, sample) for (prompt, source), sample in pairs]
    return list(_scored(scorer, samples, metadata))


def _arguments(prompt: Prompt, source: Path | None, sample: Pixels) -> Mapping[str, object]:
    """Return the function's arguments for a sample; a source image is resized as in a run."""
    if source is None:
        return scorer_inputs(prompt)
    try:
        return scorer_inputs(prompt, load_source(source.read_bytes(), sample))
    except ContractError as error:
        raise UserError(f"--prompts: {source} {error}") from error


def _scored(
    scorer: WeightedScorer, samples: dict[str, Pixels], metadata: Metadata
) -> Iterator[RewardTrialResult]:
    """Score consecutive images of equal shape together, like a group."""
    names, first = list(samples), 0
    for last in range(1, len(names) + 1):
        if last < len(names) and samples[names[last]].shape == samples[names[first]].shape:
            continue
        media = np.stack([samples[name] for name in names[first:last]])
        outcome = score_each(scorer, media, metadata[first:last], may_all_fail=True)
        for number, score in enumerate(outcome.scores):
            prompt = str(metadata[first + number].get("prompt", ""))
            reason = outcome.reasons.get(number)
            yield RewardTrialResult(
                image=names[first + number], prompt=prompt, score=score, reason=reason
            )
        first = last


def _trial(file: RewardFile, scores: list[RewardTrialResult], seconds: float) -> RewardTrial:
    numbers = [each.score for each in scores if each.score is not None]
    return RewardTrial(
        source=str(file.path),
        function=file.function,
        digest=file.digest,
        parameters=file.parameters.names,
        environment=file.dependencies if file.has_own_environment else None,
        scores=scores,
        mean=math.fsum(numbers) / len(numbers) if numbers else None,
        seconds=seconds,
    )

"""Scorers: what they are, and how a recipe names one.

A scorer takes a fragment's media and the metadata of its prompt, and returns one number per sample.
NaN means that the sample could not be scored, an exception that at least one could not be; neither
is ever turned into a number.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from shared.errors import UserError, how_to_install
from shared.messages.contracts import Prompt
from shared.recipe import rewards as recipe_rewards
from shared.recipe.rewards import Judge, Remote

if TYPE_CHECKING:  # what a recipe names is checked where no scorer is installed, too
    import numpy as np
    import numpy.typing as npt

Media: TypeAlias = "npt.NDArray[np.uint8]"
"""Images (n, C, H, W) or videos (n, F, C, H, W)."""
Metadata = Sequence[Mapping[str, object]]
"""Metadata of each sample's prompt, with its text as ``prompt``."""


class Scorer(Protocol):
    def score(self, media: Media, metadata: Metadata, /) -> list[float]:
        """Returns one number per image, or per video for a scorer of videos."""


def scorer_inputs(prompt: Prompt) -> dict[str, object]:
    """Returns the metadata that a scorer gets of a sample's prompt."""
    return {"prompt": prompt.text, **prompt.metadata}


@dataclass(frozen=True, slots=True)
class WeightedScorer:
    name: str
    weight: float
    scorer: Scorer
    takes: Literal["images", "videos", "both"] = "images"

    def score(self, media: Media, metadata: Metadata) -> list[float]:
        """Returns one number per sample: a scorer of images gives a video the mean of its frames.

        Raises:
            ValueError: if a scorer of videos gets images, or a scorer of images does not return one
                number per frame.
        """
        import numpy as np  # only where something is scored: recipes are checked without it

        is_video = media.ndim == 5
        if self.takes == "videos" and not is_video:
            raise ValueError(f"scores videos, and these are images of shape {media.shape[1:]}")
        if self.takes != "images" or not is_video:
            return self.scorer.score(media, metadata)

        num_frames = media.shape[1]
        frames = media.reshape(-1, *media.shape[2:])
        repeated = [each for each in metadata for _ in range(num_frames)]
        scores = np.asarray(self.scorer.score(frames, repeated), dtype=np.float64)
        if scores.shape != (len(frames),):
            raise ValueError(f"gave {len(scores)} scores for {len(frames)} frames")
        means: list[float] = scores.reshape(-1, num_frames).mean(1).tolist()
        return means


@dataclass(frozen=True, slots=True)
class Kind:
    """Describes one type of scorer. To add one: CONTRIBUTING.md."""

    scorer: str
    """Import string, ``module:Class``. It is made with what ``needs`` says; a UserError that it
    raises begins with the key of the recipe's table that is wrong."""
    needs: Literal["folder", "url", "judge"] | None = None
    """Keys of the recipe's table that the class takes: ``folder``; or ``url`` and ``remote``, or
    ``url`` and ``judge``, with ``patience``; or none."""
    files: tuple[str, ...] = ()
    """Files that the folder has to have, which are looked for before a run is started."""
    takes: Literal["images", "videos", "both"] = "images"
    extra: str = "reward"
    """Extra of pyproject.toml that installs what the scorer imports."""


PACKAGES: Mapping[str, tuple[str, ...]] = {
    "reward": ("PIL", "safetensors", "torch"),
    "reward-models": ("torch", "transformers"),
    "ocr": ("onnxruntime", "rapidfuzz", "rapidocr"),
}
"""Packages that scorers import, by the extra that installs them."""


def build_scorers(tables: Sequence[recipe_rewards.ScorerTable]) -> list[WeightedScorer]:
    """Loads the scorers that a recipe's ``reward.scorers`` name.

    Raises:
        UserError: if a type is unknown or not installed, or what it needs is missing or wrong.
    """
    return [_build(f"reward.scorers.{table.name}", table) for table in tables]


def kind_of(table: recipe_rewards.ScorerTable, *, here: bool = True) -> Kind:
    """Returns the kind that a recipe's table names. ``here``: its folder and key are on this host.

    Raises:
        UserError: if there is no such type, or what it needs is missing.
    """
    field = f"reward.scorers.{table.name}"
    if table.type not in KINDS:
        known = ", ".join(sorted(KINDS))
        raise UserError(f"{field}.type: no scorer is called {table.type!r}; known are: {known}")
    kind = KINDS[table.type]
    if kind.needs == "folder" and table.folder is None:
        raise UserError(f"{field}.folder: {table.type} needs the folder with its weights")
    if kind.needs in ("url", "judge") and not (table.url or "").startswith(("http://", "https://")):
        raise UserError(f"{field}.url: {table.type} needs the address of its server, http://...")
    if not here:
        return kind
    if table.folder is not None:
        _check_folder(field, table.folder, kind, of=table.type)
    if kind.needs == "judge":
        _check_judge(field, table.judge)
    if kind.needs == "url":
        _check_key(field, table.remote)
    return kind


def check_packages(table: recipe_rewards.ScorerTable) -> None:
    """Raises UserError if a package of the scorer is not installed; imports nothing itself."""
    extra = KINDS[table.type].extra
    missing = [name for name in PACKAGES[extra] if find_spec(name) is None]
    if missing:
        raise UserError(
            f"reward.scorers.{table.name}.type: {table.type} {how_to_install(extra)} "
            f"({', '.join(missing)} not found)"
        )


def _check_folder(field: str, folder: Path, kind: Kind, *, of: str) -> None:
    if not folder.is_dir():
        raise UserError(f"{field}.folder: no folder {folder}")
    for name in kind.files:
        if not (folder / name).is_file():
            raise UserError(
                f"{field}.folder: {folder} has no {name}; docs/rewards.md says what {of} needs"
            )


def _check_key(field: str, settings: Judge | Remote) -> None:
    from services.reward.scorers.endpoint import read_key

    with _of(field):
        read_key(settings)


def _check_judge(field: str, judge: Judge | None) -> None:
    if judge is None:
        raise UserError(
            f'{field}.judge: missing; say which model to ask: judge = {{ model = "..." }}'
        )
    _check_key(field, judge)


def _build(field: str, table: recipe_rewards.ScorerTable) -> WeightedScorer:
    kind = kind_of(table)
    try:
        with _of(field):
            scorer = _made(kind, table)
    except ImportError as error:
        raise UserError(
            f"{field}.type: {table.type} {how_to_install(kind.extra)} ({error})"
        ) from error
    except OSError as error:
        raise UserError(f"{field}.folder: cannot load {table.folder}: {error}") from error
    return WeightedScorer(table.name, table.weight, scorer, kind.takes)


def _made(kind: Kind, table: recipe_rewards.ScorerTable) -> Scorer:
    build: Any = resolve_name(kind.scorer)
    match kind.needs:
        case "folder":
            scorer = build(table.folder)
        case "url":
            scorer = build(table.url, table.remote, patience=table.patience)
        case "judge":
            scorer = build(table.url, table.judge, patience=table.patience)
        case None:
            scorer = build()
    made: Scorer = scorer
    return made


@contextmanager
def _of(field: str) -> Iterator[None]:
    """Puts the table's name before the key that a UserError begins with."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{field}.{error}") from error


def _network(scorer: str, *files: str) -> Kind:
    """Returns the kind of a scorer whose network transformers loads from a folder."""
    return Kind(scorer, needs="folder", files=("config.json", *files), extra="reward-models")


KINDS: dict[str, Kind] = {
    "aesthetic": _network("services.reward.scorers.aesthetic:Aesthetic", "aesthetic.safetensors"),
    "clip-score": _network("services.reward.scorers.clip_score:ClipScore"),
    "digit-probability": Kind("services.reward.scorers.digits:DigitProbability", needs="folder"),
    "hpsv2": _network("services.reward.scorers.hpsv2:HpsV2"),
    "image-reward": _network(
        "services.reward.scorers.image_reward:ImageReward", "model.safetensors"
    ),
    "jpeg-incompressibility": Kind("services.reward.scorers.jpeg:JpegIncompressibility"),
    "jpeg-compressibility": Kind("services.reward.scorers.jpeg:JpegCompressibility"),
    "judge": Kind("services.reward.scorers.judge:JudgeScorer", needs="judge"),
    "ocr": Kind("services.reward.scorers.ocr:OcrText", extra="ocr"),
    "pick-score": _network("services.reward.scorers.pick_score:PickScore"),
    "remote": Kind("services.reward.scorers.remote:RemoteScorer", needs="url", takes="both"),
    "temporal-consistency": Kind(
        "services.reward.scorers.video:TemporalConsistency", takes="videos"
    ),
}
"""Every scorer, by the type that recipes name."""

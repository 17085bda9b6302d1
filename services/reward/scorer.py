"""Scorers: what they are, and how a recipe names one.

A scorer takes a fragment's media and the metadata of its prompt, and returns one number per sample.
NaN means that the sample could not be scored, an exception that at least one could not be; neither
is ever turned into a number.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from services.reward.kinds import PACKAGES, ScorerKind, kind_named
from services.reward.prompt_checks import wanted_digit
from services.reward.reward_file import read_table
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


SOURCES = "source_images"
"""Name of the images that a sample edits, among its prompt's metadata: arrays (C, H, W), uint8, of
the sample's size and channels."""


def scorer_inputs(
    prompt: Prompt, source: "npt.NDArray[np.uint8] | None" = None
) -> dict[str, object]:
    """Returns the metadata that a scorer gets of a sample's prompt, and of the image (C, H, W) that
    it edits."""
    sources = {} if source is None else {SOURCES: (source,)}
    return {"prompt": prompt.text, **prompt.metadata, **sources}


@dataclass(frozen=True, slots=True)
class WeightedScorer:
    name: str
    weight: float
    scorer: Scorer
    takes: Literal["images", "videos", "both"] = "images"
    whole_groups: bool = False
    """Whether a score depends on the other samples of the group, so that none is scored alone."""

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


def build_scorers(tables: Sequence[recipe_rewards.ScorerTable]) -> list[WeightedScorer]:
    """Loads the scorers that a recipe's ``reward.scorers`` name.

    Raises:
        UserError: if a type is unknown or not installed, or what it needs is missing or wrong.
    """
    return [_build(f"reward.scorers.{table.name}", table) for table in tables]


def scorer_kind(table: recipe_rewards.ScorerTable, *, here: bool = True) -> ScorerKind:
    """Returns the kind that a recipe's table names. ``here``: its folder and key are on this host.

    Raises:
        UserError: if there is no such type, or what it needs is missing.
    """
    field = f"reward.scorers.{table.name}"
    kind = kind_named(table.type, field)
    if kind.needs == "folder" and table.folder is None:
        raise UserError(f"{field}.folder: {table.type} needs the folder with its weights")
    if kind.needs in ("url", "judge") and not (table.url or "").startswith(("http://", "https://")):
        raise UserError(f"{field}.url: {table.type} needs the address of its server, http://...")
    if not here:
        return kind
    if table.folder is not None:
        _check_folder(field, table.folder, kind, owner=table.type)
    if kind.needs == "source":
        return replace(kind, takes=_check_source(field, table))
    if kind.needs == "judge":
        _check_judge(field, table.judge)
    if kind.needs == "url":
        _check_key(field, table.remote)
    return kind


def check_packages(table: recipe_rewards.ScorerTable) -> None:
    """Raises UserError if a package of the scorer is not installed; imports nothing itself."""
    extra = kind_named(table.type, f"reward.scorers.{table.name}").extra
    missing = [name for name in PACKAGES.get(extra, ()) if find_spec(name) is None]
    if missing:
        raise UserError(
            f"reward.scorers.{table.name}.type: {table.type} {how_to_install(extra)} "
            f"({', '.join(missing)} not found)"
        )


def check_prompts(table: recipe_rewards.ScorerTable, prompts: Sequence[Prompt]) -> None:
    """Checks that every prompt has what the scorer asks of it: of a function of the user's own, the
    metadata that it names, reading its file without running it.

    Raises:
        UserError: if one has not.
    """
    field = f"reward.scorers.{table.name}"
    for read in kind_named(table.type, field).prompt_readers:
        _check_asked(field, prompts, read, "replace this scorer in reward.scorers")
    if table.source is None:
        return
    with _errors_name_table(field):
        read_table(table).check_names(prompt.metadata for prompt in prompts)


def check_digits(prompts: Sequence[Prompt]) -> None:
    """Raises UserError unless every prompt names a digit, which held-out judges look for."""
    _check_asked("evaluation.digits", prompts, wanted_digit, "use --evaluation.digits none")


def _check_asked(
    field: str,
    prompts: Sequence[Prompt],
    read: Callable[[Mapping[str, object]], object],
    otherwise: str,
) -> None:
    for prompt in prompts:
        try:
            read(scorer_inputs(prompt))
        except ValueError as error:
            raise UserError(
                f"{field}: the prompt {prompt.text[:40]!r}: {error}; correct the prompts, or "
                f"{otherwise}"
            ) from error


def _check_folder(field: str, folder: Path, kind: ScorerKind, *, owner: str) -> None:
    if not folder.is_dir():
        fetch = "; `digenrl fetch` with the recipe makes it" * (kind.extra == "reward-models")
        raise UserError(f"{field}.folder: no folder {folder}{fetch}")
    for name in kind.files:
        if not (folder / name).is_file():
            raise UserError(
                f"{field}.folder: {folder} has no {name}; "
                f"docs/rewards.md lists the files of {owner}"
            )


def _check_source(field: str, table: recipe_rewards.ScorerTable) -> Literal["videos", "both"]:
    """Checks the user's file without running it, and returns what its function takes."""
    from services.reward.scorers.python_process import check_can_run

    with _errors_name_table(field):
        file = read_table(table)
        check_can_run(file)
    return "videos" if file.parameters.takes_videos else "both"


def _check_key(field: str, settings: Judge | Remote) -> None:
    from services.reward.scorers.endpoint import read_key

    with _errors_name_table(field):
        read_key(settings)


def _check_judge(field: str, judge: Judge | None) -> None:
    if judge is None:
        raise UserError(f'{field}.judge: missing; name the model: judge = {{ model = "..." }}')
    _check_key(field, judge)


def _build(field: str, table: recipe_rewards.ScorerTable) -> WeightedScorer:
    kind = scorer_kind(table)
    try:
        with _errors_name_table(field):
            scorer = _made(kind, table)
    except ImportError as error:
        raise UserError(
            f"{field}.type: {table.type} {how_to_install(kind.extra)} ({error})"
        ) from error
    except OSError as error:
        raise UserError(f"{field}.folder: cannot load {table.folder}: {error}") from error
    whole_groups = table.scores == "groups"
    judges_videos = table.judge is not None and table.judge.frames is not None
    takes = "both" if judges_videos else kind.takes
    return WeightedScorer(table.name, table.weight, scorer, takes, whole_groups)


def _made(kind: ScorerKind, table: recipe_rewards.ScorerTable) -> Scorer:
    build: Any = resolve_name(kind.scorer)
    match kind.needs:
        case "folder":
            scorer = build(table.folder)
        case "url":
            scorer = build(table.url, table.remote, patience=table.patience)
        case "judge":
            scorer = build(table.url, table.judge, patience=table.patience)
        case "source":
            whole = table.scores == "groups"
            scorer = build(read_table(table), patience=table.patience, whole_groups=whole)
        case None:
            scorer = build()
    result: Scorer = scorer
    return result


@contextmanager
def _errors_name_table(field: str) -> Iterator[None]:
    """Puts the table's name before the key that a UserError begins with."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{field}.{error}") from error

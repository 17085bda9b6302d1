"""Sums up each run of a folder, for the page of all runs."""

import asyncio
import re
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, Field

from digenrl.api.run_history import RunHistory
from digenrl.evaluation.records import GOLD, REWARD, EvaluationRecord
from digenrl.local.runs import RECIPE_JSON, read_progress
from digenrl.reading.alarms import cause_of
from digenrl.reading.intervals import standard_gain
from shared.store.previews import shrink

M = TypeVar("M", bound=BaseModel)
CARD_FOLDER = "card"
"""Folder in a run's folder: the summary of the ended run, and its pictures."""
SUMMARY_JSON = "summary.json"
NOTES_JSON = "notes.json"
"""File in a run's folder with words of people."""
PICTURES = ("before", "after")
MAX_SIDE = 512
"""Height and width of a card's picture, in pixels."""
MAX_CURVE = 40
"""Number of points of a card's curve."""


class Notes(BaseModel, extra="forbid"):
    """Words of people about a run."""

    tags: list[Annotated[str, Field(max_length=100)]] = Field(default=[], max_length=20)
    notes: str = Field(default="", max_length=2000)


class Summary(BaseModel):
    """Results of a run so far; final once the run has ended."""

    made_at: str = ""
    """State and step of the run then."""
    devices: str = ""
    prompt: str = ""
    """Prompt of the pictures; empty without pictures."""
    first: float | None = None
    """Reward of the first evaluation; None without evaluations."""
    last: float | None = None
    """Reward of the newest evaluation."""
    curve: list[float] = []
    """Training reward over the steps."""
    gain: float | None = None
    """Difference of the last and the first evaluation, in standard deviations of the samples'
    scores: gains of unlike rewards can be compared."""
    gain_of: str = ""
    """Name of the score: a gold reward if there is one."""
    cause: str = ""
    """Most frequent reason of work that has failed for good."""


class RunCard(BaseModel):
    """A run among others."""

    name: str
    state: str
    step: int
    steps: int | None
    reward: float | None
    age_seconds: float | None
    failure: str | None = None
    summary: Summary = Summary()
    words: Notes = Notes()

    @property
    def moment(self) -> str:
        return f"{self.state} {self.step}"

    @property
    def learned(self) -> float:
        """Change of the evaluated reward, 0 if it is unknown."""
        first, last = self.summary.first, self.summary.last
        return 0.0 if first is None or last is None else last - first


async def summarise(history: RunHistory) -> tuple[Summary, dict[str, bytes]]:
    """Return the summary of a run, and its pictures by their names."""
    await history.look()
    curve = [each.metrics["reward_mean"] for each in history.steps if "reward_mean" in each.metrics]
    ends = [each.quality.reward for each in history.evaluations]
    devices = history.recent_usage[-1].devices if history.usage else ()
    roles = Counter(re.sub(r"-\d+$", "", name) for name in devices)
    summary = Summary(
        devices=", ".join(f"{number} {role}" for role, number in sorted(roles.items())),
        first=ends[0] if ends else None, last=ends[-1] if ends else None,
        curve=[*curve[: -1 : -(-len(curve) // MAX_CURVE)], curve[-1]] if curve else [],
    )  # fmt: skip
    summary.gain, summary.gain_of = _gain(history)
    summary.cause = cause_of([*(await history.letters()).newest_first("open")])
    if not history.evaluations or not history.evaluations[0].samples:
        return summary, {}
    shown = history.evaluations[0].samples[0], history.evaluations[-1].samples[0]
    stills = [await history.store.get(each.still) for each in shown]
    small = [await asyncio.to_thread(shrink, each, MAX_SIDE) for each in stills]
    found = dict(zip(PICTURES, small, strict=True))
    summary.prompt = shown[0].prompt
    return summary, found


def _gain(history: RunHistory) -> tuple[float | None, str]:
    """Return the gain from the first to the last evaluation, and the name of its score."""
    if len(history.evaluations) < 2:
        return None, ""
    before, after = (_scores(history.evaluations[end]) for end in (0, -1))
    names = sorted(name for name in before.keys() & after.keys() if name.startswith(GOLD))
    for name in (*names, REWARD):
        gain = standard_gain(before[name], after[name]) if before[name] and after[name] else None
        if gain is not None:
            return gain, name
    return None, ""


def _scores(record: EvaluationRecord) -> Mapping[str, list[float]]:
    """Return the scores of an evaluation's samples by name."""
    scores: defaultdict[str, list[float]] = defaultdict(list)
    for sample in record.samples:
        for name, score in {f"{GOLD}accuracy": sample.right, **sample.scores}.items():
            if score is not None:
                scores[name].append(float(score))
    return scores


def card_of(folder: Path) -> RunCard:
    """Return the card of the run in a folder."""
    now = read_progress(folder)
    return RunCard(
        name=folder.name, **asdict(now),
        age_seconds=time.time() - (folder / RECIPE_JSON).stat().st_mtime,
        summary=_read(Summary, folder / CARD_FOLDER / SUMMARY_JSON),
        words=_read(Notes, folder / NOTES_JSON),
    )  # fmt: skip


def _read(kind: type[M], path: Path) -> M:
    """Return the content of a JSON file; the defaults if the file is missing or damaged."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except (OSError, ValueError):
        return kind()

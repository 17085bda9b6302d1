"""Defines the figures of a policy version, compares them, and stores them in the object store.

<run>/evaluations/<settings>/records/<version>.json   one record per policy version
<run>/evaluations/<settings>/media/<sha256>...        its images and videos
<run>/evaluations/log/<number>.json                   in which order they were announced

A record is made by exclusive create, after all objects that it names: an evaluator that is killed
leaves a complete evaluation or none, and if two evaluate the same version, one record stays. Each
set of settings has its own folder, so that the records in one folder are comparable.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from shared.errors import ContractError
from shared.messages.contracts import ObjectRef, Policy
from shared.messages.records import Digest, Record, Seconds, Text, Token, is_none
from shared.run.layout import evaluations_folder, named_objects
from shared.run.log import Log
from shared.run.log_entries import Evaluation
from shared.store import ObjectStore

OfDigits = Annotated[float | None, Field(exclude_if=is_none)]
OfEachDigit = Annotated[list[float | None] | None, Field(exclude_if=is_none)]


class Quality(BaseModel):
    """Holds the figures of one policy version's samples at the evaluation's fixed seed."""

    reward: float
    """Mean training reward."""
    num_samples: int
    rewards: dict[str, float] = {}
    """Mean score of each training scorer, without its weight."""
    gold: dict[str, float] = {}
    """Mean score of each scorer in `evaluation.scorers`, never trained on."""
    proxy_accuracy: OfDigits = None
    """Share of samples that the training reward's classifier takes for the requested digit."""
    gold_accuracy: OfDigits = None
    """The same share for a network of another kind, trained on the other half of the data."""
    gold_svm_accuracy: OfDigits = None
    """The same share for a support vector machine."""
    gold_accuracy_per_digit: OfEachDigit = None
    gold_worst_digit: OfDigits = None
    gold_nn: OfDigits = None
    """Mean L2 distance to the nearest real image of the held-out half; rises when glyphs break."""
    gold_div: OfDigits = None
    """Mean L2 distance within a digit; falls when samples collapse to one."""
    gold_nn_per_digit: OfEachDigit = None
    gold_div_per_digit: OfEachDigit = None


def alarms(measured: Sequence[Quality]) -> list[str]:
    """Return a line for each gold reward that has fallen while the training reward has risen.

    A gold reward counts if it is lower than at the first evaluation, or else if it fell at each of
    the last two. ``measured`` holds the evaluations of a run, oldest first."""
    if len(measured) < 2:
        return []
    first, newest = measured[0], measured[-1]
    since_first = fallen(first, newest)
    lines = [_line(first, newest, name) for name in since_first]
    if len(measured) > 2:
        before, between = measured[-3:-1]
        again = set(fallen(before, between)) & set(fallen(between, newest))
        lines += [
            f"at the last two evaluations {_line(before, newest, name)}"
            for name in sorted(again.difference(since_first))
        ]
    return lines


def fallen(before: Quality, after: Quality) -> list[str]:
    """List the gold rewards that fell while the training reward rose; shares of samples only if
    they fell by more than chance explains."""
    if after.reward <= before.reward:
        return []
    was, shares = golds(before), SHARES.values()
    chance = NOISE_FACTOR / sqrt(max(1, after.num_samples))
    return [
        name
        for name, value in golds(after).items()
        if name in was and value < was[name] - (chance if name in shares else 0.0)
    ]


def golds(quality: Quality) -> dict[str, float]:
    """Return the figures that nothing is trained on and that are better if they are higher, by
    their names."""
    figures = {f"gold reward {name}": value for name, value in quality.gold.items()}
    for field, name in SHARES.items():
        if (share := getattr(quality, field)) is not None:
            figures[name] = share
    return figures


def _line(before: Quality, after: Quality, name: str) -> str:
    return (
        f"the training reward rose from {before.reward:.4g} to {after.reward:.4g} while the "
        f"{name} fell from {golds(before)[name]:.4g} to {golds(after)[name]:.4g}"
    )


SHARES = {
    "gold_accuracy": "accuracy of the held-out network",
    "gold_svm_accuracy": "accuracy of the held-out SVM",
}
NOISE_FACTOR = 1.4
"""Two standard deviations of the difference between two shares, times the root of the number of
samples, where both are a half."""


FIGURES = {
    "reward": "training reward", "proxy_accuracy": "accuracy, training classifier",
    "gold_accuracy": "gold accuracy, held-out network",
    "gold_svm_accuracy": "gold accuracy, held-out SVM",
    "gold_worst_digit": "gold accuracy, worst digit",
    "gold_nn": "distance to real images", "gold_div": "distance within a digit",
}  # fmt: skip
"""Figures of evaluations in words; others have the names of their scorers."""


REWARD, GOLD = "reward", "gold "
"""Name of the weighted sum among the scores of a sample, and the beginning of the names of gold
rewards."""

SETTINGS_DIGITS = 16
"""Number of hex digits of the settings' digest in keys."""


def _is_empty(value: dict[str, float | None]) -> bool:
    return not value


class KeptSample(Record):
    prompt: Text
    media: ObjectRef
    """An image as PNG, a video as mp4."""
    still: ObjectRef
    """The image itself, or a frame from the middle of the video, as PNG."""
    right: bool | None = None
    """Whether the held-out classifier recognizes the requested digit."""
    source: ObjectRef | None = Field(default=None, exclude_if=is_none)
    """The image that it edits, at its size, as PNG; None: it was made of the text alone."""
    scores: dict[str, float | None] = Field(default_factory=dict, exclude_if=_is_empty)
    """Score by scorer, and the reward (`Judges.scores`); None: the scorer failed."""


class EvaluationRecord(Record):
    run: Token
    policy: Policy
    settings: Digest
    quality: Quality
    alarms: tuple[str, ...] = ()
    """Alarms for this version, compared with the versions evaluated before it."""
    samples: tuple[KeptSample, ...]
    """Samples, ordered by prompt; prompts and noise are the same in every record."""
    worker: Token
    seconds: Seconds
    """Seconds that the evaluation took."""

    @classmethod
    async def read(cls, store: ObjectStore, key: str) -> "EvaluationRecord | None":
        """Return the record of a key, if there is one; raises ContractError if it is invalid."""
        data = await store.read(key)
        try:
            return None if data is None else cls.model_validate_json(data)
        except ValidationError as error:
            raise ContractError(f"{key} is not an evaluation record") from error

    @property
    def version(self) -> int:
        return self.policy.version

    def announcement(self, settings: str) -> Evaluation:
        """Return the entry of the evaluators' log; ``settings``: name of their folder."""
        return Evaluation(
            version=self.version, settings=settings, seconds=self.seconds, alarms=self.alarms,
            figures=self.quality.model_dump(mode="json", exclude_none=True),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Evaluations:
    """Reads and writes the evaluations of a run at one set of settings."""

    store: ObjectStore
    run: str
    settings: str
    """The digest that `settings_digest` returns."""

    @property
    def media_folder(self) -> str:
        return f"{self._folder}/media"

    @property
    def name(self) -> str:
        """Name of the folder of these settings."""
        return self.settings[:SETTINGS_DIGITS]

    async def versions(self) -> list[int]:
        """List the evaluated versions."""
        within = f"{self.name}/records"
        names = await named_objects(self.store, self.run, "evaluations", within)
        return [int(name["number"]) for name in names.values()]

    async def read(self, version: int) -> EvaluationRecord | None:
        """Return a version's record, if there is one; raises ContractError if it is invalid."""
        return await EvaluationRecord.read(self.store, self._key(version))

    async def read_all(self) -> list[EvaluationRecord]:
        """Return all records, oldest version first."""
        records = [await self.read(version) for version in await self.versions()]
        return [record for record in records if record is not None]

    async def add(self, record: EvaluationRecord) -> bool:
        """Store a record; returns False and changes nothing if the version already has one."""
        return await self.store.create(
            self._key(record.version), record.model_dump_json(indent=1).encode()
        )

    async def announce(self, log: Log) -> None:
        """Append the records that the evaluators' log lacks: new ones, and the records of a killed
        evaluator.

        Raises:
            ContractError: if a record is invalid.
        """
        await log.look()
        for version in await self.versions():
            if f"{self.name}/{version}" not in log.facts:
                record = await self.read(version)
                if record is not None:
                    await log.append(record.announcement(self.name))

    @property
    def _folder(self) -> str:
        return f"{evaluations_folder(self.run)}/{self.name}"

    def _key(self, version: int) -> str:
        return f"{self._folder}/records/{version:08d}.json"

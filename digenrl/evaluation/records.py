"""Stores evaluations in the run's object store.

<run>/evaluations/<settings>/records/<version>.json   one record per policy version
<run>/evaluations/<settings>/media/<sha256>...        its images and videos

A record is made by exclusive create, after all objects that it names: an evaluator that is killed
leaves a complete evaluation or none, and if two evaluate the same version, one record stays. Each
set of settings has its own folder, so that the records in one folder are comparable.
"""

from dataclasses import dataclass

from pydantic import ValidationError

from digenrl.evaluation.quality import Quality
from shared.errors import ContractError
from shared.messages.contracts import ObjectRef, Policy
from shared.messages.records import Digest, Record, Seconds, Text, Token
from shared.run.layout import evaluations_folder
from shared.store import ObjectStore

SETTINGS_DIGITS = 16
"""Number of hex digits of the settings' digest in keys."""


class KeptSample(Record):
    prompt: Text
    media: ObjectRef
    """An image as PNG, a video as mp4."""
    still: ObjectRef
    """The image itself, or a frame from the middle of the video, as PNG."""
    right: bool | None = None
    """Whether the held-out classifier recognizes the requested digit."""


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

    @property
    def version(self) -> int:
        return self.policy.version


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

    async def versions(self) -> list[int]:
        """List the evaluated versions."""
        keys = await self.store.keys(f"{self._folder}/records")
        return [int(key.rsplit("/", 1)[1].removesuffix(".json")) for key in keys]

    async def read(self, version: int) -> EvaluationRecord | None:
        """Return a version's record, if there is one; raises ContractError if it is invalid."""
        key = self._key(version)
        data = await self.store.read(key)
        if data is None:
            return None
        try:
            return EvaluationRecord.model_validate_json(data)
        except ValidationError as error:
            raise ContractError(f"{key} is not an evaluation record") from error

    async def read_all(self) -> list[EvaluationRecord]:
        """Return all records, oldest version first."""
        found = [await self.read(version) for version in await self.versions()]
        return [record for record in found if record is not None]

    async def add(self, record: EvaluationRecord) -> bool:
        """Store a record; returns False and changes nothing if the version already has one."""
        return await self.store.create(
            self._key(record.version), record.model_dump_json(indent=1).encode()
        )

    @property
    def _folder(self) -> str:
        return f"{evaluations_folder(self.run)}/{self.settings[:SETTINGS_DIGITS]}"

    def _key(self, version: int) -> str:
        return f"{self._folder}/records/{version:08d}.json"

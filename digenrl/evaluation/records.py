"""What is kept of evaluations, in the run's object store.

<run>/evaluations/<settings>/records/<version>.json   one record per policy version
<run>/evaluations/<settings>/media/<sha256>...        its images and videos

A record is made by exclusive create, after everything that it names: whoever is killed leaves a
whole evaluation or none, and of two who evaluate the same version one record stays. Other settings
have a folder of their own, so that whatever is in one folder may be compared.
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
"""Of the settings' digest, in keys."""


class KeptSample(Record):
    prompt: Text
    media: ObjectRef
    """An image as PNG, a video as mp4."""
    still: ObjectRef
    """As PNG: the image itself, or a frame from the middle of the video."""
    right: bool | None = None
    """Whether the held-out judge sees the digit asked for."""


class EvaluationRecord(Record):
    run: Token
    policy: Policy
    settings: Digest
    quality: Quality
    alarms: tuple[str, ...] = ()
    """Of this version, compared with those that had been evaluated before."""
    samples: tuple[KeptSample, ...]
    """Prompt by prompt; the same prompts and the same noise in each record."""
    worker: Token
    seconds: Seconds
    """That it took."""

    @property
    def version(self) -> int:
        return self.policy.version


@dataclass(frozen=True, slots=True)
class Evaluations:
    """The evaluations of a run at one set of settings."""

    store: ObjectStore
    run: str
    settings: str
    """sha256, as `settings_digest` gives it."""

    @property
    def media_folder(self) -> str:
        return f"{self._folder}/media"

    async def versions(self) -> list[int]:
        """That have been evaluated."""
        keys = await self.store.keys(f"{self._folder}/records")
        return [int(key.rsplit("/", 1)[1].removesuffix(".json")) for key in keys]

    async def read(self, version: int) -> EvaluationRecord | None:
        """Raises ContractError if something else is there."""
        key = self._key(version)
        data = await self.store.read(key)
        if data is None:
            return None
        try:
            return EvaluationRecord.model_validate_json(data)
        except ValidationError as error:
            raise ContractError(f"{key} is not an evaluation record") from error

    async def read_all(self) -> list[EvaluationRecord]:
        """Oldest version first."""
        found = [await self.read(version) for version in await self.versions()]
        return [record for record in found if record is not None]

    async def add(self, record: EvaluationRecord) -> bool:
        """False and nothing changed if that version has a record already."""
        return await self.store.create(
            self._key(record.version), record.model_dump_json(indent=1).encode()
        )

    @property
    def _folder(self) -> str:
        return f"{evaluations_folder(self.run)}/{self.settings[:SETTINGS_DIGITS]}"

    def _key(self, version: int) -> str:
        return f"{self._folder}/records/{version:08d}.json"

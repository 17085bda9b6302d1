"""Conditions of prompts that encoders make ahead: found by what they depend on, without a message.

An index object, made by exclusive create, names the object that holds a prompt's conditions. Its
key is a digest of all inputs of conditions, so any number of encoders share the work without
messages, and generating devices need only the recipe.
"""

import hashlib
import json
from dataclasses import asdict, dataclass

from pydantic import ValidationError

from shared.errors import ContractError, FaultyConditions, IntegrityError
from shared.limits import MAX_TEXT
from shared.messages.contracts import ObjectRef, SourceImage
from shared.messages.records import Record, Text, Token
from shared.models.catalogue import check_family, text_tokens
from shared.recipe.recipe import Recipe
from shared.run.files import stored_digest
from shared.run.layout import conditions_folder, conditions_key
from shared.store import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """Holds everything, besides the prompt, that the conditions of a run depend on."""

    model: str
    """Digest of the model's files."""
    negative: bool
    """Whether the negative prompt is encoded as well, for classifier-free guidance."""
    text_tokens: int
    dtype: str
    matmul_precision: str
    size: tuple[int, ...] | None = None
    """Height and width to which a source image is scaled; and frames, of a video."""

    def digest(
        self, prompt: str, image: SourceImage | None = None, negative: str | None = None
    ) -> str:
        inputs = {**asdict(self), "prompt": prompt}
        del inputs["size"]
        if negative is not None:
            inputs["negative_prompt"] = negative
        if image is not None:
            inputs |= {"image": image.sha256, "size": self.size}
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


async def find_encoding(store: ObjectStore, recipe: Recipe) -> Encoding:
    """Return how the run encodes its prompts; its model has to be on this host, and compared.

    Raises:
        UserError: if the model's folder is invalid.
    """
    model = recipe.model
    return Encoding(
        model=await stored_digest(store, recipe.run.name, "model.folder"),
        negative=check_family(model.folder).forwards(model.guidance) == 2,
        text_tokens=text_tokens(model.folder, model.text_tokens),
        dtype=model.dtype,
        matmul_precision=model.matmul_precision,
        size=(model.height, model.width, *((model.frames,) if model.frames > 1 else ())),
    )


class ConditionsRecord(Record):
    """Names the conditions of one prompt."""

    conditions: ObjectRef
    prompt: Text
    worker: Token
    """Address of the encoder that made them."""
    fault: Text = ""
    """Reason why the encoder could make none; the object is empty then."""


@dataclass(frozen=True, slots=True)
class StoredConditions:
    """Holds one prompt's conditions as they are stored."""

    ref: ObjectRef
    packed: bytes


async def are_stored(store: ObjectStore, run: str, digest: str) -> bool:
    return await store.read(conditions_key(run, digest)) is not None


async def read_conditions(store: ObjectStore, run: str, digest: str) -> StoredConditions | None:
    """Return the conditions of this digest, None if no encoder has stored them yet.

    Raises:
        FaultyConditions: if what is stored is not what it should be, or the encoder failed.
    """
    key = conditions_key(run, digest)
    data = await store.read(key)
    if data is None:
        return None
    try:
        record = ConditionsRecord.model_validate_json(data)
    except ValidationError as error:
        raise FaultyConditions(f"{key} is not a record of conditions") from error
    if record.fault:
        raise FaultyConditions(record.fault)
    ref = record.conditions
    if not ref.key.startswith(f"{conditions_folder(run)}/"):
        raise FaultyConditions(f"{key} names an object that is not this run's: {ref.key}")
    try:
        return StoredConditions(ref, await store.get(ref))
    except (ContractError, IntegrityError) as error:
        raise FaultyConditions(str(error)) from error


async def store_conditions(
    store: ObjectStore,
    run: str,
    digest: str,
    packed: bytes,
    *,
    prompt: str,
    worker: str,
    fault: str = "",
) -> bool:
    """Store the conditions of this digest, or the ``fault`` that prevents them; return False if
    another encoder was first."""
    # Not only once: what is there under that name may be cut off.
    ref = await store.put(conditions_folder(run), packed, suffix=".safetensors")
    record = ConditionsRecord(conditions=ref, prompt=prompt, worker=worker, fault=fault[:MAX_TEXT])
    return await store.create(conditions_key(run, digest), record.model_dump_json().encode())


async def forget_conditions(store: ObjectStore, run: str, digest: str) -> None:
    """Let encoders make the conditions of this digest again."""
    await store.delete([conditions_key(run, digest)])

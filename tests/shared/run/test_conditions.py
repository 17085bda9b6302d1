"""Conditions are found by what they depend on, made once, and never believed if they are faulty."""

from dataclasses import replace
from pathlib import Path

import pytest

from shared.errors import ContractError, FaultyConditions
from shared.recipe.recipe import load_recipe, override
from shared.run.conditions import (
    are_stored,
    find_encoding,
    forget_conditions,
    read_conditions,
    store_conditions,
)
from shared.run.files import check_files
from shared.run.layout import conditions_key
from shared.store import ObjectStore
from tests.examples import ENCODING
from tests.paths import DIGITS

RUN, PROMPT = "test", "a handwritten one"
DIGEST = ENCODING.digest(PROMPT)


async def stored(store: ObjectStore, packed: bytes = b"packed", worker: str = "encoder-0") -> bool:
    return await store_conditions(store, RUN, DIGEST, packed, prompt=PROMPT, worker=worker)


def test_a_digest_is_that_of_everything_that_conditions_depend_on() -> None:
    others = [
        replace(ENCODING, model="1" * 64),
        replace(ENCODING, negative=True),
        replace(ENCODING, text_tokens=9),
        replace(ENCODING, dtype="bfloat16"),
        replace(ENCODING, matmul_precision="highest"),
    ]
    digests = {DIGEST, ENCODING.digest("another"), *(each.digest(PROMPT) for each in others)}
    assert len(digests) == 2 + len(others)
    assert replace(ENCODING).digest(PROMPT) == DIGEST


async def test_a_recipe_s_encoding_names_the_files_that_the_run_has_compared(
    folder_store: ObjectStore,
) -> None:
    recipe = load_recipe(DIGITS)
    with pytest.raises(ContractError, match=r"model\.folder\.json is missing"):
        await find_encoding(folder_store, recipe)
    await check_files(folder_store, recipe, ("model.folder",), needed=True)
    found = await find_encoding(folder_store, recipe)
    assert found == await find_encoding(folder_store, override(recipe, {"model.guidance": 0.5}))
    assert (found.negative, found.dtype) == (False, recipe.model.dtype)
    guided = await find_encoding(folder_store, override(recipe, {"model.guidance": 4.0}))
    assert guided == replace(found, negative=True)
    shorter = await find_encoding(folder_store, override(recipe, {"model.text_tokens": 3}))
    assert shorter == replace(found, text_tokens=3)


async def test_of_several_encoders_the_first_is_believed(folder_store: ObjectStore) -> None:
    assert await read_conditions(folder_store, RUN, DIGEST) is None
    assert not await are_stored(folder_store, RUN, DIGEST)
    assert await stored(folder_store, b"by the first")
    assert not await stored(folder_store, b"by the second", "encoder-1")
    found = await read_conditions(folder_store, RUN, DIGEST)
    assert found is not None and found.packed == b"by the first"
    assert await folder_store.get(found.ref) == b"by the first"
    assert await are_stored(folder_store, RUN, DIGEST)


@pytest.mark.parametrize("damage", ["missing", "changed", "no record", "another object"])
async def test_what_is_faulty_is_refused_until_it_is_made_anew(
    damage: str, folder_store: ObjectStore, tmp_path: Path
) -> None:
    await stored(folder_store)
    found = await read_conditions(folder_store, RUN, DIGEST)
    assert found is not None
    key = conditions_key(RUN, DIGEST)
    match damage:
        case "missing":
            await folder_store.delete([found.ref.key])
        case "changed":
            await folder_store.write(found.ref.key, b"PACKED")
        case "no record":
            await folder_store.write(key, b'{"conditions": 1}')
        case _:
            foreign = await folder_store.put(f"{RUN}/weights", b"packed", suffix=".safetensors")
            record = f'{{"conditions":{foreign.model_dump_json()},"prompt":"","worker":"e"}}'
            await folder_store.write(key, record.encode())
    with pytest.raises(FaultyConditions):
        await read_conditions(folder_store, RUN, DIGEST)
    await forget_conditions(folder_store, RUN, DIGEST)
    assert await read_conditions(folder_store, RUN, DIGEST) is None
    assert await stored(folder_store)
    assert await read_conditions(folder_store, RUN, DIGEST) == found

"""Mutated messages and objects at the doors that they have to pass: refused in words, or valid, and
never anything else."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgpack
import numpy as np
import pytest
import safetensors.numpy
from pydantic import ValidationError

from services.reward.scoring import read_media
from shared.errors import ContractError
from shared.messages.codec import decode
from shared.run.commits import CommitRecord
from shared.store.media import pack
from shared.store.tensor_header import check_header

NUM = int(os.environ.get("DIGENRL_MUTATIONS", "500"))
"""Mutations at each door; at night, a million."""
SHARED = Path(__file__).parents[1]
MESSAGES = json.loads((SHARED / "messages" / "golden.json").read_text())["messages"]
COMMIT = (SHARED / "run" / "golden_commit.json").read_bytes()
RAW = safetensors.numpy.save(
    {"images": np.arange(2 * 3 * 8 * 8, dtype=np.uint8).reshape(2, 3, 8, 8)}
)
FLAT = safetensors.numpy.save({"images": np.zeros((2, 3, 8, 8), np.uint8)})
Door = Callable[[bytes], Any]


def _media(data: bytes) -> None:
    read_media(data, 2)


def _commit(data: bytes) -> None:
    try:
        CommitRecord.model_validate_json(data)
    except ValidationError as error:
        raise ContractError("no commit record") from error


DOORS: dict[str, tuple[bytes, Door]] = {
    **{message["kind"]: (msgpack.packb(message), decode) for message in MESSAGES.values()},
    "raw media": (RAW, _media),
    "packed media": (pack(FLAT), _media),
    "tensors": (RAW, check_header),
    "commit record": (COMMIT, _commit),
}


def mutated(draw: Random, data: bytes, others: list[bytes]) -> bytes:
    """Return bytes that differ from ``data`` in a few places, or are spliced with others."""
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        at, size = draw.randrange(len(found) + 1), draw.choice((1, 1, 2, 8))
        match draw.randrange(6):
            case 0 if found:
                found[at % len(found)] ^= 1 << draw.randrange(8)
            case 1:
                found[at:at] = draw.randbytes(size)
            case 2:
                del found[at : at + size]
            case 3:
                del found[at:]
            case 4:
                found[at:at] = found[: draw.randrange(1, 64)]
            case _:
                other = draw.choice(others)
                found[at:] = other[draw.randrange(len(other)) :]
    return bytes(found)


def pass_door(kind: str, times: int, seed: int) -> int:
    """Send mutations through a door; returns how many it refused."""
    data, door = DOORS[kind]
    draw, others, refused = Random(f"{kind}/{seed}"), [each for each, _ in DOORS.values()], 0
    for _ in range(times):
        try:
            door(mutated(draw, data, others))
        except ContractError:
            refused += 1
    return refused


@pytest.mark.parametrize("kind", DOORS)
def test_a_door_refuses_or_takes_what_is_mutated_and_nothing_else_happens(kind: str) -> None:
    data, door = DOORS[kind]
    door(data)
    assert pass_door(kind, NUM, 0) > NUM / 3


@pytest.mark.night
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", DOORS)
def test_a_million_mutations_at_each_door(kind: str) -> None:
    assert pass_door(kind, 1_000_000, 1)

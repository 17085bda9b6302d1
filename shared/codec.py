"""Messages to bytes and back: msgpack within bounds, then strict validation."""

from collections.abc import Hashable
from typing import Any

import msgpack
from pydantic import TypeAdapter, ValidationError

from shared.contracts import MAX_MESSAGE_BYTES, Message
from shared.errors import ContractError

MAX_DEPTH = 16

_MESSAGE: TypeAdapter[Message] = TypeAdapter(Message)


def encode(message: Message) -> bytes:
    """Raises ContractError if the message is too large for the bus."""
    packed: bytes = msgpack.packb(message.model_dump())
    if len(packed) > MAX_MESSAGE_BYTES:
        raise ContractError(f"a {message.kind} of {len(packed)} bytes exceeds {MAX_MESSAGE_BYTES}")
    return packed


def decode(data: bytes) -> Message:
    """Raises ContractError, and nothing else, whatever the bytes are."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ContractError(f"{len(data)} bytes exceed the limit of {MAX_MESSAGE_BYTES}")
    try:
        plain = msgpack.unpackb(
            data,
            use_list=False,
            strict_map_key=True,
            object_pairs_hook=_unique,
            ext_hook=_no_extension,
            max_ext_len=0,
        )
        if _depth(plain) > MAX_DEPTH:
            raise ContractError("nested too deeply")
        return _MESSAGE.validate_python(plain)
    except ContractError:
        raise
    except (
        ValueError,
        TypeError,
        msgpack.UnpackException,
        ValidationError,
        RecursionError,
    ) as error:
        raise ContractError(f"not a message: {_first_line(error)}") from error


def _unique(pairs: list[tuple[Hashable, Any]]) -> dict[Hashable, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ContractError("a map repeats a key")
    return found


def _no_extension(code: int, _: bytes) -> Any:
    raise ContractError(f"extension type {code} is not part of any message")


def _depth(value: Any) -> int:
    deepest, level = 0, [value]
    while level and deepest <= MAX_DEPTH:
        deepest += 1
        level = [
            child
            for parent in level
            if isinstance(parent, dict | tuple)
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
    return deepest


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    return str(error).split("\n", 1)[0][:200]

"""Messages to bytes and back: msgpack within bounds, then strict validation.

A message of many fragments repeats the names of the run, its keys and devices: one larger than
`MAX_UNCOMPRESSED_BYTES` goes through zlib, whose first byte begins no plain message.
"""

import zlib
from collections.abc import Hashable
from typing import Any

import msgpack
from pydantic import TypeAdapter, ValidationError

from shared import limits
from shared.errors import ContractError
from shared.messages.contracts import Message
from shared.messages.fluid import ExchangeSums

ZLIB = b"\x78"
"""First byte of a zlib stream; in msgpack it is the number 120, and no map."""

_MESSAGE: TypeAdapter[Message] = TypeAdapter(Message)


def encode(message: Message) -> bytes:
    """Return the bytes of a message.

    Raises:
        ContractError: if the message is too large for the bus.
    """
    plain: bytes = msgpack.packb(message.model_dump())
    packed = plain if len(plain) <= limits.MAX_UNCOMPRESSED_BYTES else zlib.compress(plain)
    for size, limit in ((len(plain), limits.MAX_PLAIN_BYTES), (len(packed), _most_bytes(message))):
        if size > limit:
            raise ContractError(f"a {message.kind} of {size} bytes exceeds {limit}")
    return packed


def group_bytes(samples: int, fragments: int, scorers: int) -> int:
    """Return the most bytes of a message about a whole group.

    Names have 64 characters and nothing in common; zlib cannot shrink digests, addresses and
    numbers either.
    """
    names = 2048 + 64 * scorers
    return 4096 + names + (440 + 4 * scorers) * fragments + 9 * samples * (2 + scorers)


def _most_bytes(message: Message) -> int:
    return limits.MAX_SUMS_BYTES if isinstance(message, ExchangeSums) else limits.MAX_MESSAGE_BYTES


def decode(data: bytes) -> Message:
    """Return the message; raise only ContractError, for any bytes."""
    if len(data) > limits.MAX_SUMS_BYTES:
        raise ContractError(f"{len(data)} bytes exceed the limit of {limits.MAX_SUMS_BYTES}")
    try:
        plain = msgpack.unpackb(
            _plain(data) if data.startswith(ZLIB) else data,
            use_list=False,
            strict_map_key=True,
            object_pairs_hook=_unique,
            ext_hook=_no_extension,
            max_ext_len=0,
        )
        if _depth(plain) > limits.MAX_MESSAGE_DEPTH:
            raise ContractError("nested too deeply")
        message = _MESSAGE.validate_python(plain, by_alias=True, by_name=False)
        if len(data) > _most_bytes(message):
            raise ContractError(f"a {message.kind} of {len(data)} bytes is too large")
        return message
    except ContractError:
        raise
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException, zlib.error) as error:
        raise ContractError(f"not a message: {_first_line(error)}") from error


def _plain(data: bytes) -> bytes:
    unpacking = zlib.decompressobj()
    plain = unpacking.decompress(data, limits.MAX_PLAIN_BYTES)
    if not unpacking.eof or unpacking.unused_data:
        raise ContractError(f"no zlib stream of at most {limits.MAX_PLAIN_BYTES} bytes")
    return plain


def _unique(pairs: list[tuple[Hashable, Any]]) -> dict[Hashable, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ContractError("a map repeats a key")
    return fields


def _no_extension(code: int, _: bytes) -> Any:
    raise ContractError(f"extension type {code} is not part of any message")


def _depth(value: Any) -> int:
    deepest, level = 0, [value]
    while level and deepest <= limits.MAX_MESSAGE_DEPTH:
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

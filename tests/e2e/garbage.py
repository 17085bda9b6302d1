"""Bytes that are no message, by those who may publish there."""

from collections.abc import Callable

import nats

from shared.messages.rights import RIGHTS, Role, inbox_of

BYTES = b"\xc1 this is no message"


def publisher_of(subject: str) -> Role:
    """A role that may publish to a subject, without the run."""
    word = ".".join(
        subject.split(".")[:2] if subject.startswith("evt.") else subject.split(".")[:1]
    )
    return next(right.publishers[0] for right in RIGHTS if right.subject.startswith(f"dg.*.{word}"))


async def publish_garbage(url_of: Callable[[Role], str], run: str, subjects: list[str]) -> None:
    for subject in subjects:
        role = publisher_of(subject)
        client = await nats.connect(url_of(role), inbox_prefix=inbox_of(role))
        await client.jetstream().publish(f"dg.{run}.{subject}", BYTES)
        await client.close()

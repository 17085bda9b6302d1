"""A register that holds one entry for some seconds: a bucket of JetStream's key-value store.

An entry is written only on top of the one that its writer has seen, so of two writers one fails. An
entry that is not renewed in time leaves the register, and the numbers of entries continue.
"""

from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from nats.js import JetStreamContext, api
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

from shared.bus.streams import OTHER_SETTINGS_CODE, as_unavailable
from shared.cancellation import cancellable
from shared.errors import Unavailable

NOT_NEWEST_CODE = 10071
"""JetStream's error code for an entry that is not on top of the newest."""
NO_STREAM = 10059
"""JetStream's error code for a stream that is not there."""
EXPECTED = "Nats-Expected-Last-Subject-Sequence"
KEY = "scheduler"


class RegisterEntry(NamedTuple):
    revision: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Register:
    jetstream: JetStreamContext
    bucket: str
    seconds: float
    """Time after which an entry leaves."""
    timeout: float = 1.0
    """Longest wait for an answer, in seconds."""

    @property
    def _subject(self) -> str:
        return f"$KV.{self.bucket}.{KEY}"

    async def make(self) -> None:
        """Make the bucket if it is missing; raises Unavailable."""
        config = api.StreamConfig(
            name=f"KV_{self.bucket}",
            subjects=[f"$KV.{self.bucket}.>"],
            storage=api.StorageType.FILE,
            discard=api.DiscardPolicy.NEW,
            max_msgs_per_subject=1,
            max_bytes=1 << 20,
            max_age=self.seconds,
            duplicate_window=self.seconds,
            allow_rollup_hdrs=True,
            deny_delete=True,
        )
        with as_unavailable():
            try:
                await cancellable(self.jetstream.add_stream(config))
            except APIError as error:
                if error.err_code != OTHER_SETTINGS_CODE:
                    raise

    async def read(self) -> RegisterEntry | None:
        """Return the entry, None without one.

        Raises:
            Unavailable: if the server does not answer, or has lost the bucket, which is made
                again.
        """
        with as_unavailable():
            try:
                found = await cancellable(
                    self.jetstream.get_last_msg(f"KV_{self.bucket}", self._subject)
                )
            except NotFoundError as error:
                if error.err_code == NO_STREAM:
                    await self._recreate(error)
                return None
        return RegisterEntry(found.seq or 0, found.data or b"")

    async def write(self, data: bytes, *, on: int) -> int | None:
        """Write an entry on top of number ``on``, 0 for an empty register; return its number, or
        None if something else is there.

        Raises:
            Unavailable: if the server does not answer, when the entry may have been written all
                the same; or if it has lost the bucket, which is made again.
        """
        headers = {EXPECTED: str(on)}
        try:
            with as_unavailable():
                made = await cancellable(
                    self.jetstream.publish(
                        self._subject, data, headers=headers, timeout=self.timeout
                    )
                )
        except Unavailable as error:
            if isinstance(error.__cause__, NoStreamResponseError):
                await self._recreate(error)
            raise
        except APIError as error:
            if error.err_code != NOT_NEWEST_CODE:
                raise
            return None
        number: int = made.seq
        return number

    async def _recreate(self, error: Exception) -> NoReturn:
        await self.make()
        raise Unavailable(f"NATS has lost the register {self.bucket}") from error

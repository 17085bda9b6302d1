"""A register holds one entry that expires: a bucket of JetStream's key-value store.

A write names the revision that it replaces, so one of two concurrent writers fails. An entry that
is not renewed in time expires. Revision numbers continue after that.
"""

from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from nats.js import JetStreamContext, api
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

from shared.bus.streams import OTHER_SETTINGS_CODE, as_unavailable
from shared.cancellation import cancellable
from shared.errors import Unavailable

NOT_NEWEST_CODE = 10071
"""JetStream's error code for a write that replaces another revision than the newest."""
NO_STREAM = 10059
"""JetStream's error code for a missing stream."""
EXPECTED_REVISION = "Nats-Expected-Last-Subject-Sequence"
KEY = "scheduler"


class RegisterEntry(NamedTuple):
    revision: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Register:
    jetstream: JetStreamContext
    bucket: str
    ttl_s: float
    """Time after which an entry expires."""
    timeout_s: float = 1.0

    @property
    def _subject(self) -> str:
        return f"$KV.{self.bucket}.{KEY}"

    async def create(self) -> None:
        """Create the bucket if it is missing; raises Unavailable."""
        config = api.StreamConfig(
            name=f"KV_{self.bucket}",
            subjects=[f"$KV.{self.bucket}.>"],
            storage=api.StorageType.FILE,
            discard=api.DiscardPolicy.NEW,
            max_msgs_per_subject=1,
            max_bytes=1 << 20,
            max_age=self.ttl_s,
            duplicate_window=self.ttl_s,
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
        """Return the entry; None if the register is empty.

        Raises:
            Unavailable: if the server does not respond, or has lost the bucket, which is then
                created again.
        """
        with as_unavailable():
            try:
                message = await cancellable(
                    self.jetstream.get_last_msg(f"KV_{self.bucket}", self._subject)
                )
            except NotFoundError as error:
                if error.err_code == NO_STREAM:
                    await self._recreate(error)
                return None
        return RegisterEntry(message.seq or 0, message.data or b"")

    async def write(self, data: bytes, *, replaces: int) -> int | None:
        """Write an entry in place of a revision, 0 for an empty register.

        Returns the new revision; None if the register holds another revision.

        Raises:
            Unavailable: if the server does not respond (the entry may still have been written), or
                has lost the bucket, which is then created again.
        """
        headers = {EXPECTED_REVISION: str(replaces)}
        try:
            with as_unavailable():
                written = await cancellable(
                    self.jetstream.publish(
                        self._subject, data, headers=headers, timeout=self.timeout_s
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
        revision: int = written.seq
        return revision

    async def _recreate(self, error: Exception) -> NoReturn:
        await self.create()
        raise Unavailable(f"NATS has lost the register {self.bucket}") from error

"""What the trainer's own devices have generated, until it is trained: it need not be read back."""

from shared.messages.contracts import ObjectRef

MOST_BYTES = 512 << 20


class KeptTrajectories:
    """Each is taken once; the oldest make room, and are then read from the store as others are."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most = most_bytes
        self._kept: dict[ObjectRef, bytes] = {}
        self._size = 0

    def keep(self, ref: ObjectRef, data: bytes) -> None:
        self.take(ref)
        self._kept[ref] = data
        self._size += len(data)
        while self._size > self._most:
            self.take(next(iter(self._kept)))

    def take(self, ref: ObjectRef) -> bytes | None:
        data = self._kept.pop(ref, None)
        self._size -= len(data or b"")
        return data

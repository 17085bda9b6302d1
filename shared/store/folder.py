"""Objects as files of one folder, for services on one host.

Write, fsync, rename, fsync of the folder: anything less loses objects in a power cut. Exclusive
create is a hard link, which fails if the name exists.
"""

import asyncio
import contextlib
import errno
import os
import stat
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from shared.errors import IntegrityError, Unavailable
from shared.messages.contracts import ObjectRef
from shared.store.backend import CHUNK, Content, StoredObject

TEMPORARY = ".tmp-"
"""Beginning of the name of a file that is being written."""

PIECE = 1 << 22
"""Bytes that are written before they are flushed."""

DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)

P = ParamSpec("P")
T = TypeVar("T")


def in_thread(call: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Make ``call`` a coroutine that runs in a thread."""

    @wraps(call)
    async def called(*args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(call, *args, **kwargs)

    return called


class FolderBackend:
    def __init__(self, root: Path) -> None:
        self._root = root

    @in_thread
    def write(self, key: str, data: Content) -> None:
        path = self._root / key
        _rename(self._temporary(path.parent, data), path)

    async def write_unnamed(self, folder: str, data: Content, ref: Awaitable[ObjectRef]) -> None:
        temporary = await asyncio.to_thread(self._temporary, self._root / folder, data)
        try:
            path = self._root / (await ref).key
        except BaseException:
            temporary.unlink()
            raise
        await asyncio.to_thread(_rename, temporary, path)

    @in_thread
    def create(self, key: str, data: bytes) -> bool:
        path = self._root / key
        temporary = self._temporary(path.parent, data)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        _sync_folder(path.parent)
        return True

    def _temporary(self, folder: Path, data: Content) -> Path:
        """Write ``data`` to disk in ``folder``; the name starts with a dot, as no key does.

        Raises:
            Unavailable: if the disk is full.
        """
        self._make_folder(folder)
        temporary = folder / f"{TEMPORARY}{uuid.uuid4().hex}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        try:
            descriptor = os.open(temporary, flags, 0o640)
            try:
                _write_all(descriptor, memoryview(data))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            if error.errno in DISK_FULL_ERRORS:
                raise Unavailable(f"the store's disk is full: {self._root}; make room") from error
            raise
        return temporary

    def _make_folder(self, folder: Path) -> None:
        """Make ``folder``, and flush each new name to the disk as well."""
        if folder.is_dir():
            return
        if folder != self._root:
            self._make_folder(folder.parent)
        folder.mkdir(parents=folder == self._root, exist_ok=True)
        _sync_folder(folder.parent)

    @in_thread
    def read(self, key: str) -> bytes | None:
        try:
            return (self._root / key).read_bytes()
        except FileNotFoundError:
            return None

    async def stream(self, key: str, first: int) -> AsyncGenerator[bytes]:
        try:
            file = await asyncio.to_thread((self._root / key).open, "rb")
        except FileNotFoundError as error:
            raise IntegrityError(f"{key} is not in the store") from error
        with file:
            file.seek(first)
            while chunk := await asyncio.to_thread(file.read, CHUNK):
                yield chunk

    @in_thread
    def size(self, key: str) -> int | None:
        try:
            return (self._root / key).stat().st_size
        except FileNotFoundError:
            return None

    @in_thread
    def keys(self, prefix: str) -> list[str]:
        folder = self._root / prefix
        files = (path for path in folder.rglob("*") if path.is_file())
        return [
            path.relative_to(self._root).as_posix()
            for path in files
            if not path.name.startswith(".")
        ]

    @in_thread
    def entries(self, prefix: str) -> list[StoredObject]:
        return [each for each in self._files(prefix) if not _is_temporary(each.key)]

    @in_thread
    def folders(self) -> list[str]:
        return [path.name for path in self._root.glob("*") if path.is_dir()]

    @in_thread
    def unfinished(self, prefix: str) -> list[StoredObject]:
        return [each for each in self._files(prefix) if _is_temporary(each.key)]

    def _files(self, prefix: str) -> list[StoredObject]:
        objects = []
        for path in (self._root / prefix).rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # it may be deleted at this moment
                status = path.stat()
                if stat.S_ISREG(status.st_mode):
                    key = path.relative_to(self._root).as_posix()
                    objects.append(StoredObject(key, status.st_size, status.st_mtime))
        return objects

    @in_thread
    def delete(self, keys: list[str]) -> None:
        for key in keys:
            (self._root / key).unlink(missing_ok=True)


def _write_all(descriptor: int, data: memoryview) -> None:
    """Write ``data``, and flush written parts concurrently: otherwise the disk would be idle until
    the last byte is copied."""
    if len(data) <= PIECE:
        _write_piece(descriptor, data)
        return
    flush = getattr(os, "fdatasync", os.fsync)  # which only Linux has
    with ThreadPoolExecutor(1) as flusher:
        flushing: Future[None] = Future()
        flushing.set_result(None)
        for begin in range(0, len(data), PIECE):
            _write_piece(descriptor, data[begin : begin + PIECE])
            if flushing.done():
                flushing.result()  # raises the error of the last flush
                flushing = flusher.submit(flush, descriptor)
        flushing.result()


def _write_piece(descriptor: int, piece: memoryview) -> None:
    while piece:
        piece = piece[os.write(descriptor, piece) :]


def _is_temporary(key: str) -> bool:
    return key.rsplit("/", 1)[-1].startswith(TEMPORARY)


def _rename(temporary: Path, path: Path) -> None:
    temporary.replace(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

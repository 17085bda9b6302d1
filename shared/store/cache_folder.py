"""The folder of a host's cache: one file per object, named by its digest, private to one user.

Reasons why a reader may trust the name of a file without digesting its bytes again:

    Only this user can write here: the folder is refused unless it is this user's own and closed
        to
    all others, and every file is opened relative to it, never through a symbolic link.

    A file gets its name once its bytes have been verified, and is not written again: a reader
        sees
    all of a verified object or none.

    A power cut may lose what was not flushed, and nothing here is: so each boot of the machine
        has
    a folder of its own.

A process that fetches an object holds its lock, which the kernel releases when the process dies;
its partial file is useless, and the next process starts over.
"""

import contextlib
import fcntl
import mmap
import os
import re
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shared.errors import UserError
from shared.limits import OTHER_BOOT_AGE_S

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_BOOT = re.compile(r"\A[0-9a-f-]{36}\Z")
_DIGEST = re.compile(r"\A[0-9a-f]{64}\Z")
_ATTEMPT = re.compile(r"\A[0-9a-f]{16}\Z")
PART = ".part"
SECRET = "secret"
PRIVATE_MODE = 0o700
READ_ONLY = 0o400
MAPPED = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(slots=True)
class ReceivedObject:
    """An object that is being received."""

    name: str
    descriptor: int
    size: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, data: bytes) -> None:
        """Append ``data``, in any thread; raise OSError if there is no room for them."""
        rest = memoryview(data)
        with self._lock:  # a reader that was cancelled closes the file, and leaves its thread
            while rest:
                rest = rest[os.write(self.descriptor, rest) :]
            self.size += len(data)

    def close(self) -> None:
        with self._lock:
            os.close(self.descriptor)
            self.descriptor = -1


@dataclass(frozen=True, slots=True)
class CacheFolder:
    root: Path
    _descriptor: int = field(repr=False)

    @classmethod
    def open(cls, root: Path) -> "CacheFolder":
        """Open this boot's folder below ``root``; both are made if need be.

        Raises:
            UserError: if others than this user own it or may look into it.
            OSError: if it cannot be made, or this system cannot identify its boots.
        """
        if not root.is_absolute():
            raise FileNotFoundError("this user has no home")
        boot = BOOT_ID.read_text().strip()
        root.mkdir(PRIVATE_MODE, parents=True, exist_ok=True)
        outer = _open_private(root)
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(boot, PRIVATE_MODE, dir_fd=outer)
            inner = _open_private(root / boot, boot, outer)
            _forget_other_boots(outer, boot)
        finally:
            os.close(outer)
        return cls(root / boot, inner)

    def close(self) -> None:
        os.close(self._descriptor)

    def map(self, digest: str, size: int) -> mmap.mmap | None:
        """Return an object's bytes, if they are here, as a private mapping: processes that map it
        share its memory. It is the newest now, and so the last one to be removed."""
        descriptor = self._open_file(_checked(digest))
        if descriptor is None:
            return None
        try:
            if os.fstat(descriptor).st_size != size:
                return None
            os.utime(descriptor)
            return mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)

    def offered(self, digest: str, attempt: str, size: int) -> int | None:
        """Return a descriptor of an object that is here, or of what is being received of it in this
        attempt; the caller closes it."""
        descriptor = self._open_file(_checked(digest))
        if descriptor is not None and os.fstat(descriptor).st_size == size:
            return descriptor
        if descriptor is not None:
            os.close(descriptor)
        if _ATTEMPT.match(attempt) is None:
            return None
        return self._open_file(f"{digest}.{attempt}{PART}")

    @contextlib.contextmanager
    def receiving(self, digest: str, attempt: str) -> Iterator[ReceivedObject]:
        """Write an object under a name of its own; `keep` gives it the right one, without which it
        is gone at the end."""
        name = f"{_checked(digest)}.{attempt}{PART}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        part = ReceivedObject(name, os.open(name, flags, 0o600, dir_fd=self._descriptor))
        try:
            yield part
        finally:
            part.close()
            self._remove(name)

    def keep(self, part: ReceivedObject, digest: str) -> None:
        """Give verified bytes their name; they do not change any more."""
        os.fchmod(part.descriptor, READ_ONLY)
        ours = self._descriptor
        os.rename(part.name, _checked(digest), src_dir_fd=ours, dst_dir_fd=ours)

    def lock(self, digest: str) -> int | None:
        """Take the lock of an object: return its descriptor, which holds it until it is closed, or
        None if another one has it. Objects share 256 locks, which are never removed."""
        name = f"lock-{_checked(digest)[:2]}"
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=self._descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def is_locked(self, digest: str) -> bool:
        """Return whether a process is fetching the object."""
        descriptor = self.lock(digest)
        if descriptor is not None:
            os.close(descriptor)
        return descriptor is None

    def make_room(self, digest: str, size: int, limit: int) -> None:
        """Remove what was not used for longest until ``size`` bytes fit below ``limit``, and what
        killed processes have left. The caller holds the lock of ``digest``."""
        whole: list[tuple[float, str, int]] = []
        used = 0
        for name, status in self._files():
            if name.endswith(PART) and self._is_left(name, digest):
                self._remove(name)
                continue
            used += status.st_size
            if _DIGEST.match(name):
                whole.append((status.st_mtime, name, status.st_size))
        for _, name, freed in sorted(whole):
            if used + size <= limit:
                return
            self._remove(name)  # who has mapped it keeps it
            used -= freed

    def secret(self) -> str:
        """Return a random word that only processes of this user on this host can know."""
        descriptor = self._open_file(SECRET)
        while descriptor is None:
            self._make_secret()
            descriptor = self._open_file(SECRET)
        with os.fdopen(descriptor) as file:
            return file.read()

    def _make_secret(self) -> None:
        """Make the secret that processes of this host share; the first one made is taken."""
        new = f"{SECRET}-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(new, flags, 0o600, dir_fd=self._descriptor), "w") as file:
            file.write(secrets.token_hex(16))
        ours = self._descriptor
        try:
            with contextlib.suppress(FileExistsError):
                os.link(new, SECRET, src_dir_fd=ours, dst_dir_fd=ours)
        finally:
            self._remove(new)

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        for name in os.listdir(self._descriptor):  # noqa: PTH208 -- of a descriptor
            with contextlib.suppress(FileNotFoundError):  # it may be removed at this moment
                status = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield name, status

    def _is_left(self, name: str, mine: str) -> bool:
        """Return whether no process writes to a part any more."""
        digest = name.split(".")[0]
        if _DIGEST.match(digest) is None:
            return False
        return digest[:2] == mine[:2] or not self.is_locked(digest)

    def _open_file(self, name: str) -> int | None:
        """Open a file of this user's own; raises OSError if it is a symbolic link."""
        try:
            descriptor = os.open(name, MAPPED, dir_fd=self._descriptor)
        except FileNotFoundError:
            return None
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
            return descriptor
        os.close(descriptor)
        return None

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)


def _checked(digest: str) -> str:
    if _DIGEST.match(digest) is None:
        raise ValueError(f"{digest!r} is no digest")
    return digest


def _open_private(path: Path, name: str | None = None, parent: int | None = None) -> int:
    """Raises UserError unless it is a folder of this user's that is closed to all others."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(name or path, flags, dir_fd=parent)
    except NotADirectoryError as error:
        raise UserError(f"host_cache: {path} is a link or no folder; name a folder") from error
    status = os.fstat(descriptor)
    if status.st_uid == os.geteuid() and not status.st_mode & 0o077:
        return descriptor
    os.close(descriptor)
    raise UserError(
        f"host_cache: {path} is not this user's alone (owner {status.st_uid}, mode "
        f"{stat.S_IMODE(status.st_mode):o}): chmod 700, or name another folder"
    )


def _forget_other_boots(outer: int, mine: str) -> None:
    for name in os.listdir(outer):
        if name == mine or _BOOT.match(name) is None:
            continue
        with contextlib.suppress(OSError):
            status = os.stat(name, dir_fd=outer, follow_symlinks=False)
            if time.time() - status.st_mtime > OTHER_BOOT_AGE_S:
                shutil.rmtree(name, dir_fd=outer)

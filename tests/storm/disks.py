"""Disks of their own for brokers, which a test fills. Only root can mount one."""

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

FILLER = "filler"


@contextmanager
def small_disks(folder: Path, sizes: Mapping[str, str]) -> Iterator[None]:
    """Mount an empty disk for each of these folders within ``folder``; sizes are as mount has them,
    such as 24m.

    Raises:
        PermissionError: if this process may not mount.
    """
    with contextlib.ExitStack() as mounted:
        for name, size in sizes.items():
            (at := folder / name).mkdir(parents=True, exist_ok=True)
            mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(at)]
            done = subprocess.run(mount, capture_output=True, check=False)
            if os.geteuid() != 0 or done.returncode:
                raise PermissionError("only root mounts a small disk")
            mounted.callback(subprocess.run, ["umount", "-l", str(at)], check=True)
        yield


def fill(folder: Path) -> Path:
    """Take all space that is left on a disk; returns the file that takes it."""
    filler = folder / FILLER
    with filler.open("ab") as file, contextlib.suppress(OSError):
        block = bytes(1 << 20)
        while True:
            file.write(block)
            file.flush()
    with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler


def squeeze(folder: Path) -> None:
    """Make a mounted disk as small as what it holds, so that it is full at once."""
    while True:
        found = os.statvfs(folder)
        used = (found.f_blocks - found.f_bfree) * found.f_frsize
        if resize(folder, str(max(used, found.f_frsize))):
            return


def resize(folder: Path, size: str) -> bool:
    """Give a mounted disk another size; False if it holds more than that by now."""
    mount = ["mount", "-o", f"remount,size={size}", str(folder)]
    return not subprocess.run(mount, capture_output=True, check=False).returncode

"""A small disk of its own for a broker, which a test fills. Only root can mount one."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FILLER = "filler"


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """Mount an empty disk; ``size``: as mount has it, such as 24m.

    Raises:
        PermissionError: if this process may not mount.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        raise PermissionError("only root mounts a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


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

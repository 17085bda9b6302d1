"""Gives the adapter of a version as a file, as `digenrl export` writes it.

Each is written by a process of its own, one at a time: neither readers of the page nor the
scheduler wait for it. The newest few are kept, so that asking again costs nothing.
"""

import asyncio
import os
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, NamedTuple, Self
from zipfile import ZIP_STORED, ZipFile

from fastapi import APIRouter, HTTPException, Query
from fastapi import Path as InPath
from fastapi.responses import StreamingResponse

from digenrl.api.commands import Turns, run_command
from digenrl.api.history import BINARY
from digenrl.api.run_history import RunHistory
from shared.process.http_api import errors

EXPORT_S = 600.0
"""Longest time that an export takes; then it is given up."""
MAX_KEPT_EXPORTS = 2
"""Files that are kept."""
CHUNK = 1 << 20
"""Bytes that are read and sent at once."""
AdapterLayout = Literal["diffusers", "peft", "comfyui", "kohya"]
Version = Annotated[
    str, InPath(pattern=r"^(best|newest|[0-9]{1,9})$", description="a number, best or newest")
]


@dataclass(slots=True)
class Exports:
    """Makes files of adapters of one run."""

    history: RunHistory
    environment: Mapping[str, str]
    """Variables that locate the store, for a separate process."""
    _files: OrderedDict[tuple[str, str], Path] = field(default_factory=OrderedDict)
    """Version and layout -> file."""
    _turns: Turns = field(default_factory=Turns)
    _folder: "tempfile.TemporaryDirectory[str] | None" = None

    async def file(self, version: str, layout: AdapterLayout) -> "OpenFile":
        """Open a ZIP file with the adapter of a version.

        Raises:
            HTTPException: if there is no such version, its weights are deleted, there is no room
                for the file, or others wait.
        """
        number = await self._number(version)
        async with self._turns.turn():
            key = str(number), layout
            if key not in self._files:
                self._keep(key, await self._made(*key))
            return OpenFile.open(self._files[key])  # which may be deleted while it is read

    async def _number(self, version: str) -> int:
        history = self.history
        await history.look()
        newest = history.version
        if version == "best":
            best = history.best()
            if best is None:
                raise HTTPException(409, "version: none is evaluated, so none is the best")
            if best.is_untrained:
                raise HTTPException(
                    409, "version: none that is evaluated is better than 0, the model before "
                    "training; newest takes the newest, and 0 that one all the same",
                )  # fmt: skip
            return best.version
        number = newest if version == "newest" else int(version)
        if newest < 0 or number > newest:
            raise HTTPException(404, f"version: there is no {version}; the newest is {newest}")
        return number

    def _keep(self, key: tuple[str, str], file: Path) -> None:
        self._files[key] = file
        while len(self._files) > MAX_KEPT_EXPORTS:
            _, old = self._files.popitem(last=False)
            old.unlink(missing_ok=True)

    async def _made(self, version: str, layout: str) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="digenrl-exports-")
        name = f"{self.history.run}-{version}-{layout}"
        folder = Path(self._folder.name) / name
        try:
            await self._export(folder, version, layout)
            return await asyncio.to_thread(_zipped, folder)
        except OSError as error:
            _path_of_zip(folder).unlink(missing_ok=True)
            raise HTTPException(503, f"{folder.parent}: {error.strerror}") from error
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _export(self, folder: Path, version: str, layout: str) -> None:
        await run_command(
            "export", self.history.run, "--version", version, "--layout", layout,
            "--out", str(folder), environment=self.environment, limit_s=EXPORT_S,
        )  # fmt: skip


class OpenFile(NamedTuple):
    """A file that is open for reading."""

    name: str
    size: int
    file: BinaryIO

    @classmethod
    def open(cls, path: Path) -> Self:
        file = path.open("rb")
        return cls(path.name, os.fstat(file.fileno()).st_size, file)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the content of the file, then close it."""
        with self.file:
            while chunk := await asyncio.to_thread(self.file.read, CHUNK):
                yield chunk


def _zipped(folder: Path) -> Path:
    """Return a ZIP file next to a folder with its content, uncompressed: weights shrink little."""
    target = _path_of_zip(folder)
    with ZipFile(target, "w", ZIP_STORED) as packed:
        for path in sorted(folder.iterdir()):
            packed.write(path, f"{folder.name}/{path.name}")
    return target


def _path_of_zip(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.zip")


def export_routes(exports: Exports) -> APIRouter:
    router = APIRouter(tags=["versions"])

    @router.get(
        "/v1/versions/{version}/adapter", operation_id="export_version",
        response_class=StreamingResponse,
        responses={
            200: {"content": {"application/zip": BINARY},
                  "description": "ZIP file with the adapter's files"},
            **errors(404, 409, 503),
        },
    )  # fmt: skip
    async def adapter(
        version: Version,
        layout: Annotated[AdapterLayout, Query(description="key names of the files")] = "diffusers",
    ) -> StreamingResponse:
        """The adapter of a version as `digenrl export` writes it, in a ZIP file.

        It takes seconds to be made. Only of runs that train an adapter, and of versions whose
        weights are kept.
        """
        file = await exports.file(version, layout)
        headers = {
            "content-length": str(file.size),
            "content-disposition": f'attachment; filename="{file.name}"',
        }
        return StreamingResponse(file.chunks(), media_type="application/zip", headers=headers)

    return router

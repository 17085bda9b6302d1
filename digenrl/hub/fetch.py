"""Fetches from the hub the files of a model that runs read, or of a data set, into the cache of
huggingface_hub.

A file is fetched into `blobs/ETAG.partial`, of which a later call fetches the rest: huggingface_hub
itself begins a file again that was broken off with its process. Its digest is compared with the
hub's before it becomes `blobs/ETAG`. The names of a commit are links to the blobs, and the
revision's name is written when all are there.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from digenrl.hub.answers import check_installed, check_names, endpoint, explained
from shared.errors import UserError
from shared.limits import MAX_CONFIG_BYTES
from shared.models.hub import INDEX, MAIN, WEIGHTS, files_in_part, needed_parts, storage, target
from shared.models.memory import pieces, weight_names

ShowLine = Callable[[str], None]
PARTIAL = ".partial"
"""Suffix of a blob that was not fetched to its end."""
GIT_DIGEST, LFS_DIGEST = 40, 64
"""Lengths of the hub's digests of small files, and of large ones."""


def fetch(model: str, revision: str | None, say: ShowLine) -> Path:
    """Fetch what runs need of a model and is not here yet. Returns its folder.

    Raises:
        UserError: if there is no such model or revision, if it is gated, of no family that can
            be
            trained, or larger than the disk.
        Unavailable: if the hub does not respond, or the connection breaks after all retries.
    """
    check_names(model, revision, "model.id")
    download = opened(model, revision, "model.id")
    if INDEX not in download.sizes:
        raise UserError(f"model.id: {model} is not a diffusers model (it has no {INDEX})")
    with alone(download.place, say), explained(model, revision):
        download.get([INDEX])
        names = download.needed
        check_space(download, names, say)
        download.get(names)
        name_commit(download.place, revision or MAIN, download.commit)
    return download.folder


def opened(model: str, revision: str | None, key: str) -> "Download":
    """Ask the hub for the commit and the files of a model. Raises as `fetch`, naming ``key``."""
    check_installed()
    with explained(model, revision, key=key):
        from huggingface_hub import HfApi

        info = HfApi(endpoint=endpoint()).model_info(model, revision=revision, files_metadata=True)
    sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
    return Download(model, str(info.sha), storage(target(), model), sizes)


@dataclass(frozen=True)
class Download:
    """Fetches files of one commit."""

    model: str
    commit: str
    place: Path
    sizes: Mapping[str, int]
    """Bytes of each file of the repository."""
    kind: Literal["model", "dataset"] = "model"

    @property
    def folder(self) -> Path:
        return self.place / "snapshots" / self.commit

    @cached_property
    def needed(self) -> list[str]:
        """The files that runs read, small ones first; indexes of weights are here after that."""
        parts = needed_parts(self._index())
        inside = {part: files_in_part(list(self.sizes), part) for part in parts}
        configs = [
            f"{part}/{name}"
            for part, names in inside.items()
            for name in names
            if not name.endswith(WEIGHTS) and self.sizes[f"{part}/{name}"] <= MAX_CONFIG_BYTES
        ]
        self.get(configs)
        weights = [
            f"{part}/{name}"
            for part, names in inside.items()
            for name in weight_names(
                [name for name in names if "/" not in name], partial(self._pieces, part)
            )
        ]
        absent = [name for name in weights if name not in self.sizes]
        if absent:
            raise UserError(f"model.id: {self.model} has no {absent[0]}, which its index names")
        return [*configs, *weights]

    def _index(self) -> Mapping[str, Any]:
        try:
            index: Any = json.loads((self.folder / INDEX).read_text())
        except ValueError:
            index = None
        if not isinstance(index, dict):
            raise UserError(f"model.id: {self.model} has a {INDEX} that is invalid; choose another")
        return index

    def _pieces(self, part: str, index: str) -> Sequence[str]:
        return pieces(self.folder / part / index)

    def missing(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if not (self.folder / name).exists()]

    def bytes_of(self, names: Sequence[str]) -> int:
        return sum(self.sizes[name] for name in names)

    def bytes_to_fetch(self, names: Sequence[str]) -> int:
        """Return how many bytes these files still need, without what has been fetched of some."""
        begun = sum(each.stat().st_size for each in (self.place / "blobs").glob(f"*{PARTIAL}"))
        return max(0, self.bytes_of(self.missing(names)) - begun)

    def get(self, names: Sequence[str]) -> None:
        """Fetch these files, as far as they are not here."""
        for name in self.missing(names):
            self._link(name, self._blob(name))

    def _blob(self, name: str) -> Path:
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        url = hf_hub_url(
            self.model, name, repo_type=self.kind, revision=self.commit, endpoint=endpoint()
        )
        metadata = get_hf_file_metadata(url, endpoint=endpoint(), retry_on_errors=True)
        if metadata.etag is None:
            raise UserError(f"{endpoint()}: gives no digest of {name}; use another mirror")
        blob = self.place / "blobs" / metadata.etag
        if not blob.exists():
            blob.parent.mkdir(parents=True, exist_ok=True)
            partial = blob.with_name(f"{metadata.etag}{PARTIAL}")
            _receive(metadata.location, url, partial, metadata.size, name)
            if not _is_whole(partial, metadata.etag):
                partial.unlink()
                raise UserError(f"{self.model}: {name} came damaged; run the command again")
            partial.rename(blob)
        return blob

    def _link(self, name: str, blob: Path) -> None:
        link = self.folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)  # one whose blob was removed
        link.symlink_to(os.path.relpath(blob, link.parent))


def _receive(location: str, url: str, file: Path, size: int | None, name: str) -> None:
    """Append the rest of a file; raises what `explained` explains."""
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils._headers import build_hf_headers

    is_same_host = location.split("/")[2] == url.split("/")[2]
    headers = build_hf_headers(token=None if is_same_host else False)
    with file.open("ab") as stream:
        have = stream.tell()
        if size is not None and have > size:
            stream.truncate(have := 0)
        http_get(
            location, stream, resume_size=have, headers=headers, expected_size=size,
            displayed_filename=name,
        )  # fmt: skip


def _is_whole(file: Path, etag: str) -> bool:
    """Whether a file has the hub's digest: its SHA-256, or git's for a small one."""
    if len(etag) == LFS_DIGEST:
        digest = hashlib.sha256()
    elif len(etag) == GIT_DIGEST:
        digest = hashlib.sha1(f"blob {file.stat().st_size}\0".encode(), usedforsecurity=False)
    else:
        return True  # a digest that only its server knows
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: digest).hexdigest() == etag


@contextmanager
def alone(place: Path, say: ShowLine) -> Iterator[None]:
    """Wait until no other process of this host fetches the same."""
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"DIGENRL_MODELS, HF_HOME: {place} cannot be made: {error.strerror}; set a variable "
            "to a folder that is yours"
        ) from error
    with (place / ".fetching").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("another process fetches the same; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def check_space(download: Download, names: Sequence[str], say: ShowLine) -> None:
    absent = download.missing(names)
    wanted, free = download.bytes_to_fetch(names), shutil.disk_usage(download.place).free
    gib = f"{download.bytes_of(names) / 2**30:.2f} GiB"
    say(
        f"{download.model} at {download.commit[:12]}: {len(names)} files that runs read, {gib}, of "
        f"{len(download.sizes)} in the repository; {len(absent)} are to be fetched"
    )
    if wanted > free:
        raise UserError(
            f"DIGENRL_MODELS, HF_HOME: {download.place} has {free / 2**30:.1f} GiB of free space, "
            f"and {wanted / 2**30:.1f} are needed; set a variable to a larger disk"
        )


def name_commit(place: Path, revision: str, commit: str) -> None:
    """Record which commit a branch or tag was at."""
    if revision == commit:
        return
    ref = place / "refs" / revision
    ref.parent.mkdir(parents=True, exist_ok=True)
    new = ref.with_name(f"{ref.name}.new")
    new.write_text(commit)
    new.replace(ref)

"""A small mirror of the Hugging Face hub on this machine: as much of its API as huggingface_hub
needs to list, fetch and push a model, and to fetch a data set (`datasets/ORG/NAME`)."""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from tests.http_server import QuietHandler, serving

LARGE = (".safetensors", ".bin", ".png")
"""Suffixes of files that the hub keeps in LFS."""
TOKEN = "hf_of_a_test"


@dataclass
class Repository:
    files: dict[str, bytes] = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    card: dict[str, Any] = field(default_factory=dict)
    """Metadata of the card."""
    messages: list[str] = field(default_factory=list)
    """Messages of the commits that were pushed."""

    @property
    def commit(self) -> str:
        whole = json.dumps({name: digest_of(name, data) for name, data in self.files.items()})
        return hashlib.sha1(whole.encode()).hexdigest()


def digest_of(name: str, data: bytes) -> str:
    if name.endswith(LARGE):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


@dataclass
class Mirror:
    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    breaks: dict[str, int] = field(default_factory=dict)
    """File -> bytes after which its next answer is broken off."""
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Method, file and range of each request for a file."""
    uploads: dict[str, bytes] = field(default_factory=dict)
    """What was uploaded to LFS, by its SHA-256."""
    damaged: set[str] = field(default_factory=set)
    """Files whose bytes arrive changed."""

    def add(self, name: str, folder: Path) -> Repository:
        files = {
            file.relative_to(folder).as_posix(): file.read_bytes()
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        }
        self.repositories[name] = Repository(files)
        return self.repositories[name]

    def fetched(self, method: str = "GET") -> list[str]:
        return [file for each, file, _ in self.asked if each == method]


class Handler(QuietHandler):
    mirror: Mirror
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._route("GET")

    def do_HEAD(self) -> None:
        self._route("HEAD")

    def do_POST(self) -> None:
        self._route("POST")

    def do_PUT(self) -> None:
        self._route("PUT")

    def _route(self, method: str) -> None:
        path = unquote(urlsplit(self.path).path)
        for pattern, answer in ROUTES:
            if found := re.fullmatch(pattern, path):
                answer(self, method, *found.groups())
                return
        self._fail(404, "EntryNotFound")

    def _is_known(self) -> bool:
        return self.headers.get("authorization") == f"Bearer {TOKEN}"

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _json(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _fail(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("content-length", "0")
        self.end_headers()

    def _repository(self, name: str, revision: str | None) -> Repository | None:
        found = self.mirror.repositories.get(name)
        if found is None or (found.private and not self._is_known()):
            self._fail(404 if self._is_known() else 401, "RepoNotFound")
            return None
        if revision not in (None, "main", found.commit):
            self._fail(404, "RevisionNotFound")
            return None
        return found

    def dataset(self, method: str, name: str, revision: str | None) -> None:
        self.info(method, f"datasets/{name}", revision)

    def dataset_file(self, method: str, name: str, revision: str, path: str) -> None:
        self.file(method, f"datasets/{name}", revision, path)

    def info(self, method: str, name: str, revision: str | None) -> None:
        found = self._repository(name, revision)
        if found is None:
            return
        siblings = [
            {
                "rfilename": file, "size": len(data), "blobId": digest_of("", data),
                **({"lfs": {"sha256": digest_of(file, data), "size": len(data), "pointerSize": 1}}
                   if file.endswith(LARGE) else {}),
            }
            for file, data in found.files.items()
        ]  # fmt: skip
        self._json({
            "id": name, "modelId": name, "sha": found.commit, "siblings": siblings,
            "private": found.private, "gated": "auto" if found.gated else False, "tags": [],
            "cardData": found.card,
        })  # fmt: skip

    def file(self, method: str, name: str, revision: str, path: str) -> None:
        found = self._repository(name, revision)
        if found is None:
            return
        self.mirror.asked.append((method, path, self.headers.get("range")))
        if found.gated and not self._is_known():
            self._fail(401, "GatedRepo")
        elif path not in found.files:
            self._fail(404, "EntryNotFound")
        else:
            self._send_file(method, found, path)

    def _send_file(self, method: str, found: Repository, path: str) -> None:
        data = found.files[path]
        begin = 0
        if given := re.fullmatch(r"bytes=(\d+)-", self.headers.get("range") or ""):
            begin = int(given[1])
        self.send_response(206 if begin else 200)
        self.send_header("X-Repo-Commit", found.commit)
        self.send_header("ETag", f'"{digest_of(path, data)}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - begin))
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if method == "HEAD":
            return
        if path in self.mirror.damaged:
            data = bytes(len(data))
        end = self.mirror.breaks.pop(path, None)
        self.wfile.write(data[begin : None if end is None else begin + end])
        if end is not None:
            self.close_connection = True

    def create(self, method: str) -> None:
        asked = json.loads(self._body())
        name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
        if not self._is_known():
            self._fail(401, "Unauthorized")
        elif name in self.mirror.repositories:
            self._json({"url": f"{self.mirror.url}/{name}"}, 409)
        else:
            self.mirror.repositories[name] = Repository(
                private=bool(asked.get("private")) or asked.get("visibility") == "private"
            )
            self._json({"url": f"{self.mirror.url}/{name}", "id": name, "name": name})

    def card(self, method: str) -> None:
        self._body()
        self._json({"errors": [], "warnings": []})

    def preupload(self, method: str, name: str, revision: str) -> None:
        asked = json.loads(self._body())
        self._json({
            "files": [
                {
                    "path": each["path"], "shouldIgnore": False,
                    "uploadMode": "lfs" if each["path"].endswith(LARGE) else "regular",
                }
                for each in asked["files"]
            ]
        })  # fmt: skip

    def batch(self, method: str, name: str) -> None:
        asked = json.loads(self._body())
        self._json({
            "transfer": "basic",
            "objects": [
                {**each, "actions": {"upload": {"href": f"{self.mirror.url}/lfs/{each['oid']}"}}}
                for each in asked["objects"]
            ],
        })  # fmt: skip

    def upload(self, method: str, oid: str) -> None:
        data = self._body()
        if hashlib.sha256(data).hexdigest() != oid:
            self._fail(400, "BadDigest")
            return
        self.mirror.uploads[oid] = data
        self._json({})

    def commit(self, method: str, name: str, revision: str) -> None:
        lines = [json.loads(line) for line in self._body().splitlines()]
        if not self._is_known():
            self._fail(403, "Forbidden")
            return
        repository = self.mirror.repositories[name]
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "header":
                    repository.messages.append(value["summary"])
                case "file":
                    repository.files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    repository.files[value["path"]] = self.mirror.uploads[value["oid"]]
        url = f"{self.mirror.url}/{name}/commit/{repository.commit}"
        self._json({"commitUrl": url, "commitOid": repository.commit, "success": True})


_NAME = r"([\w.-]+/[\w.-]+)"
ROUTES: tuple[tuple[str, Callable[..., None]], ...] = (
    (r"/api/repos/create", Handler.create),
    (r"/api/validate-yaml", Handler.card),
    (rf"/api/models/{_NAME}/preupload/(.+)", Handler.preupload),
    (rf"/api/models/{_NAME}/commit/(.+)", Handler.commit),
    (rf"/api/models/{_NAME}(?:/revision/(.+))?", Handler.info),
    (rf"/api/datasets/{_NAME}(?:/revision/(.+))?", Handler.dataset),
    (rf"/datasets/{_NAME}/resolve/([^/]+)/(.+)", Handler.dataset_file),
    (rf"/{_NAME}[.]git/info/lfs/objects/batch", Handler.batch),
    (r"/lfs/([0-9a-f]{64})", Handler.upload),
    (rf"/{_NAME}/resolve/([^/]+)/(.+)", Handler.file),
)


@contextmanager
def in_use(home: Path, monkeypatch: pytest.MonkeyPatch, token: str = "") -> Iterator[Mirror]:
    """A mirror that huggingface_hub takes for the hub, and nothing that was fetched before."""
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setenv("HF_TOKEN", token)
    for name in ("DIGENRL_MODELS", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    with mirror() as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        yield found


@contextmanager
def mirror(host: str = "127.0.0.1") -> Iterator[Mirror]:
    """A mirror that listens at a port of its own."""
    found = Mirror()
    handler = type("OfThisMirror", (Handler,), {"mirror": found})
    with serving(handler, host) as found.url:
        yield found

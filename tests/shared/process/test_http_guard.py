"""What the HTTP side of a service refuses, whoever asks."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from shared.process.http_access import Access
from shared.process.http_api import add_docs, add_problems
from shared.process.http_guard import DEFAULT_BODIES, BodyLimits, Guard, PatientH11, own_names
from shared.process.service import listen, serve
from shared.process.settings import HttpSettings

NAMES = own_names("0.0.0.0", ["scheduler", "*.cluster.example"])
EVIL = {"origin": "https://evil.example"}
OPEN = Access(is_open=True)


def an_app() -> FastAPI:
    app = FastAPI(docs_url=None)
    add_problems(app)
    add_docs(app)

    @app.get("/run")
    def run() -> str:
        return "running"

    @app.post("/stop")
    def stop() -> str:
        return "stopped"

    @app.post("/tag")
    def tag(body: dict[str, int]) -> int:
        return sum(body.values())

    return app


@pytest.fixture
def client() -> Iterator[TestClient]:
    yield TestClient(Guard(an_app(), NAMES, access=OPEN), base_url="http://localhost:8000")


def refused(answer: Any, status: int, said: str) -> None:
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["status"] == status
    assert said in answer.json()["detail"]


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "a b", "", "x:y:z", "cluster.example",
     "evilcluster.example", "evil.example:80"],
)  # fmt: skip
def test_a_request_by_a_strangers_name_is_refused(client: TestClient, host: str) -> None:
    refused(client.get("/run", headers={"host": host}), 421, "host: ")


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1:8000", "[::1]:8000", "10.3.2.1",
     "scheduler:8000", "a.b.cluster.example", socket.gethostname()],
)  # fmt: skip
def test_a_service_is_asked_by_its_own_names_and_by_any_address(
    client: TestClient, host: str
) -> None:
    assert client.get("/run", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        EVIL,
        {"origin": "null"},
        {"origin": "http://localhost:3000"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site", "origin": "http://localhost:8000"},
        {**EVIL, "content-type": "text/plain"},
    ],
)
def test_a_page_of_another_site_changes_nothing(
    client: TestClient, headers: dict[str, str]
) -> None:
    refused(client.post("/stop", headers=headers), 403, "may not change anything")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://localhost:8000"},
        {"sec-fetch-site": "same-origin", "origin": "http://localhost:8000"},
        {"sec-fetch-site": "none"},
    ],
)
def test_programs_and_our_own_page_may_act_without_a_body(
    client: TestClient, headers: dict[str, str]
) -> None:
    assert client.post("/stop", headers=headers).json() == "stopped"


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded",
                                          "multipart/form-data; boundary=x", ""])  # fmt: skip
def test_a_body_is_json(client: TestClient, content_type: str) -> None:
    headers = {"content-type": content_type}
    refused(client.post("/tag", content=b'{"a": 1}', headers=headers), 415, "application/json")
    charset = {"content-type": "application/json; charset=utf-8"}
    assert client.post("/tag", content=b'{"a": 1}', headers=charset).json() == 1


def test_a_body_has_at_most_64_kib_whether_it_says_so_or_not(client: TestClient) -> None:
    def in_pieces() -> Iterator[bytes]:
        for _ in range(65):
            yield b" " * 1024

    headers = {"content-type": "application/json"}
    long = b'{"a": 1}' + b" " * (64 << 10)
    refused(client.post("/tag", content=long, headers=headers), 413, "more than 64 KiB")
    refused(client.post("/tag", content=in_pieces(), headers=headers), 413, "more than 64 KiB")
    assert client.post("/tag", content=long[: 64 << 10], headers=headers).json() == 1


async def test_a_body_that_does_not_come_is_given_up() -> None:
    headers = b"host: localhost\r\ncontent-type: application/json\r\ncontent-length: 9"
    async with served(an_app(), BodyLimits(seconds=0.05)) as port, asked(port) as (reader, writer):
        writer.write(b"POST /tag HTTP/1.1\r\n" + headers + b"\r\n\r\n{")
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 408") and b"application/problem+json" in answer


def test_the_page_of_the_docs_loads_nothing_from_elsewhere(client: TestClient) -> None:
    page = client.get("/docs")
    assert page.status_code == 200 and "://" not in page.text
    for name in ("swagger-ui-bundle.js", "swagger-ui.css"):
        assert f'"/docs/{name}"' in page.text
        assert len(client.get(f"/docs/{name}").content) > 100_000
    assert client.get("/docs/..%2f__init__.py").status_code == 404


def test_no_answer_is_kept_or_guessed_at_by_a_browser(client: TestClient) -> None:
    answers = [
        client.get("/run"),
        client.get("/nothing"),
        client.get("/run", headers={"host": "x"}),
    ]
    assert [each.status_code for each in answers] == [200, 404, 421]
    for each in answers:
        assert each.headers["x-content-type-options"] == "nosniff"
        assert each.headers["cache-control"] == "no-store"


def test_an_error_that_nobody_expected_is_a_problem_too() -> None:
    app = an_app()

    @app.get("/broken")
    def broken() -> str:
        raise ZeroDivisionError("secret")

    answer = TestClient(app, raise_server_exceptions=False).get("/broken")
    refused(answer, 500, "ZeroDivisionError")
    assert "secret" not in answer.text


def test_names_come_from_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIGENRL_ALLOWED_HOSTS", "Scheduler, *.svc")
    assert HttpSettings().allowed_hosts == ("Scheduler", "*.svc")
    assert own_names("127.0.0.1", HttpSettings().allowed_hosts) >= {"scheduler", "*.svc"}


@asynccontextmanager
async def served(app: FastAPI, bodies: BodyLimits = DEFAULT_BODIES) -> AsyncIterator[int]:
    listener = listen("127.0.0.1", 0)
    port = listener.socket.getsockname()[1]
    done = asyncio.Event()

    async def work() -> None:
        await done.wait()

    serving = asyncio.create_task(serve(app, work(), listener=listener, bodies=bodies, access=OPEN))
    while True:
        with contextlib.suppress(OSError):
            async with asked(port):
                break
        await asyncio.sleep(0.01)
    try:
        yield port
    finally:
        done.set()
        await serving


@asynccontextmanager
async def asked(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(3):
        yield reader, writer
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"GET /run HT",
        b"GET /run HTTP/1.1\r\nhost: localhost\r\n",
        b"POST /tag HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b'content-length: 9\r\n\r\n{"a"',
    ],
)
async def test_a_request_that_is_not_finished_does_not_hold_its_connection(
    begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PatientH11, "timeout_s", 0.1)
    async with served(an_app()) as port, asked(port) as (reader, writer):
        writer.write(begun)
        assert await reader.read() == b"", "the other side has closed it"


async def test_a_request_that_trickles_in_has_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PatientH11, "timeout_s", 0.2)
    async with served(an_app()) as port, asked(port) as (reader, writer):
        writer.write(b"GET /run HTTP/1.1\r\n")
        closed = asyncio.create_task(reader.read())
        while not closed.done():
            writer.write(b"x: y\r\n")
            await asyncio.wait([closed], timeout=0.05)


async def test_a_service_refuses_strangers_from_its_first_request_on() -> None:
    async with served(an_app()) as port, httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{port}"
        refused(await client.get(f"{url}/run", headers={"host": "evil.example"}), 421, "evil")
        refused(await client.post(f"{url}/stop", headers=EVIL), 403, "evil.example")
        assert (await client.get(f"{url}/run")).json() == "running"

"""A machine that names a proxy: who is asked through it, and who never is."""

import ast
import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from digenrl.api.client import Client
from digenrl.api.live import client_of
from digenrl.local.checking import doctor
from services.reward.scorers.endpoint import ask
from shared.bus import traces
from shared.errors import ScorerUnavailable, UserError
from shared.process.otlp import tracing
from shared.process.outgoing import CheckedTransport
from shared.process.settings import ServiceSettings
from shared.proxies import find_proxy, go_direct, through
from shared.store import StoreSettings, open_store
from tests.paths import ROOT

VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
CLOSED = "http://127.0.0.1:9"
"""A proxy that does not answer."""


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, *map(str.lower, VARIABLES)):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")  # so that what the test's subject sets is undone
        monkeypatch.delenv(name)


class Recorder(BaseHTTPRequestHandler):
    """Answers everything, and notes what it was asked: a whole URL if it is a proxy."""

    server: "Served"

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.asked.append(self.path)
        self.send_response(200)
        self.send_header("content-length", "2")
        self.send_header("etag", "1")
        self.end_headers()
        self.wfile.write(b"{}")

    do_POST = do_PUT = do_GET

    def log_message(self, *_: object) -> None: ...


class Served(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Recorder)
        self.asked: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def server() -> Iterator[Served]:
    with Served() as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield served
        served.shutdown()


SCHEMES = [CLOSED, "socks5://127.0.0.1:9", "socks5h://127.0.0.1:9", "socks://127.0.0.1:9"]
KINDS = [*VARIABLES[:3], *map(str.lower, VARIABLES[:3])]


@pytest.mark.parametrize("proxy", SCHEMES)
@pytest.mark.parametrize("variable", KINDS)
def test_no_client_asks_loopback_through_a_proxy_of_any_kind_and_variable(
    variable: str, proxy: str, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, proxy)
    monkeypatch.setenv("DIGENRL_PRIVATE_HOSTS", "127.0.0.1")
    url = server.url
    assert Client.at(url).http.get("/client").is_success

    async def page() -> httpx.Response:
        async with client_of(url, None) as client:
            return await client.get(f"{url}/page")

    assert asyncio.run(page()).is_success
    with httpx.Client(transport=CheckedTransport(url)) as scorer:
        assert scorer.get(f"{url}/scorer").is_success
    key = SecretStr("key")
    place = StoreSettings(url="s3://bucket", endpoint=url, access_key=key, secret_key=key)
    asyncio.run(open_store(place).write("object", b"1"))
    settings = ServiceSettings(run="r", otlp_endpoint=url)
    with tracing(settings, "scheduler"):
        assert traces._current is not None
        traces._current.export(traces.Span("span", traces.Context(1, 2), None, 1, 2, {}))
    found = {"/client", "/page", "/scorer", "/bucket/object", "/v1/traces"}
    assert found == set(server.asked)


def test_a_library_of_others_asks_loopback_directly_in_this_process_and_its_children(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in KINDS:
        monkeypatch.setenv(variable, CLOSED)
    monkeypatch.setenv("NO_PROXY", "one.example, two.example")
    monkeypatch.setenv("no_proxy", "three.example")
    program = (
        "import sys, subprocess; from digenrl.commands.cli import run_command\n"
        "ask = 'import sys, urllib.request as u; u.urlopen(sys.argv[1] + \"/urllib\")\\n'\n"
        "ask += 'import httpx, requests\\n'\n"
        'ask += \'httpx.get(sys.argv[1] + "/httpx"); requests.get(sys.argv[1] + "/requests")\'\n'
        "run_command(lambda: subprocess.run([sys.executable, '-c', ask, sys.argv[1]], check=True))"
    )
    subprocess.run([sys.executable, "-c", program, server.url], check=True)
    assert server.asked == ["/urllib", "/httpx", "/requests"]
    go_direct("nats://10.0.0.5:4222", "http://[fd00::1]:8333", None)
    for name in ("NO_PROXY", "no_proxy"):
        assert os.environ[name] == (
            "one.example,two.example,three.example,localhost,127.0.0.1,127.0.0.0/8,::1,"
            "10.0.0.5,fd00::1"
        )


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"])
def test_a_scorer_elsewhere_is_asked_through_the_proxy(
    variable: str, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, server.url)
    with httpx.Client(transport=CheckedTransport("http://scorer.example")) as client:
        assert client.get("http://scorer.example/score").is_success
    assert server.asked == ["http://scorer.example/score"]


def test_what_a_proxy_keeps_from_answering_names_it_without_its_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("https_proxy", "http://me:secret@127.0.0.1:9")
    url = "https://scorer.example/score"
    with (
        httpx.Client(transport=CheckedTransport(url)) as client,
        pytest.raises(
            ScorerUnavailable, match=r"through the proxy http://127\.0\.0\.1:9 "
        ) as caught,
    ):
        ask(client, url, patience=0.1)
    assert "secret" not in str(caught.value)
    monkeypatch.setenv("https_proxy", "socks5://127.0.0.1:9")
    with pytest.raises(UserError, match=r"through the proxy socks5://127\.0\.0\.1:9: .*NO_PROXY"):
        CheckedTransport(url)


@pytest.mark.parametrize(
    ("url", "proxy"),
    [
        ("http://example.com", "http://a:1"), ("https://example.com/x", "http://b:1"),
        ("ftp://example.com", "http://c:1"), ("http://127.0.0.1:5", None),
        ("http://127.8.0.1", None), ("https://localhost", None), ("http://[::1]:80", None),
        ("http://x.localhost", None), ("https://s3.own.example:8333", None),
    ],
)  # fmt: skip
def test_the_proxy_of_an_address(
    url: str, proxy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, named in {"http": "http://a:1", "https": "http://b:1", "all": "http://c:1"}.items():
        monkeypatch.setenv(f"{kind}_proxy", named)
    monkeypatch.setenv("no_proxy", "own.example")
    assert find_proxy(url) == proxy
    assert through(url) == ("" if proxy is None else f" through the proxy {proxy}")


def test_without_a_proxy_the_environment_stays_as_it_is() -> None:
    go_direct("http://10.0.0.5")
    assert not {"NO_PROXY", "no_proxy"} & set(os.environ)


def test_the_doctor_reports_proxies_without_their_passwords(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://me:secret@proxy.example:3128")
    [found] = doctor.proxy_findings()
    assert found.state == "ok" and "HTTPS_PROXY=http://proxy.example:3128" in found.found
    assert "secret" not in found.line()


def test_every_client_of_ours_says_whether_it_goes_by_a_proxy() -> None:
    """Clients of a run's hosts ignore the environment; the others use a `CheckedTransport`."""
    calls = 0
    for path in (each for room in ("digenrl", "services", "shared") for each in files(room)):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in MAKES_CLIENTS:
                given = {each.arg: ast.unparse(each.value) for each in node.keywords}
                own = given.get("trust_env") == "False"
                assert own or given.get("transport", "").startswith("CheckedTransport("), (
                    path,
                    node.lineno,
                )
                calls += 1
    assert calls > 10


MAKES_CLIENTS = {
    f"httpx.{each}" for each in ("Client", "AsyncClient", "get", "post", "request", "stream")
}


def files(room: str) -> Iterator[Path]:
    return (ROOT / room).rglob("*.py")

"""What a recipe may have a worker ask: 200 addresses that nobody reaches by a URL of a recipe."""

import ipaddress
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from services.reward.scorers.endpoint import ask
from services.reward.scorers.judge import JudgeScorer
from services.reward.scorers.remote import RemoteScorer
from shared.errors import ScoringError, UserError
from shared.process.outgoing import (
    SETTING,
    CheckedTransport,
    check_url,
    named_in,
    private_hosts,
    private_kind,
)
from shared.recipe.rewards import Judge
from tests.http_server import QuietHandler, serving

LOOPBACK = [
    "127.0.0.1", "127.0.0.2", "127.1", "127.0.1", "127.255.255.254", "2130706433", "0x7f000001",
    "0x7f.0.0.1", "0177.0.0.1", "017700000001", "0x7f.1", "127.0x0.0.0x1", "0", "0.0.0.0", "0x0",
    "0.0", "localhost", "LOCALHOST", "LocalHost", "[::1]", "[::]", "[0:0:0:0:0:0:0:1]",
    "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::127.0.0.1]", "[64:ff9b::7f00:1]",
    "[2002:7f00:1::]", "[::ffff:0:0]", "127.127.127.127", "[0:0:0:0:0:ffff:127.0.0.1]",
]  # fmt: skip
METADATA = [
    "169.254.169.254", "2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "0xa9.0xfe.0xa9.0xfe",
    "169.254.43518", "[::ffff:169.254.169.254]", "[::ffff:a9fe:a9fe]", "[fd00:ec2::254]",
    "169.254.170.2", "100.100.100.200", "192.0.0.192", "168.63.129.16", "[fe80::1]",
    "[fe80::a9fe:a9fe]", "[64:ff9b::a9fe:a9fe]", "[2002:a9fe:a9fe::]", "169.254.0.1",
    "169.254.255.255", "[::169.254.169.254]",
]  # fmt: skip
PRIVATE = [
    "10.0.0.1", "10.255.255.255", "172.16.0.1", "172.31.255.254", "192.168.0.1", "192.168.1.254",
    "167772161", "0xa000001", "012.0.0.1", "10.1", "192.168.257", "100.64.0.1", "100.127.255.254",
    "198.18.0.1", "198.19.255.255", "192.0.2.1", "203.0.113.7", "240.0.0.1", "255.255.255.255",
    "224.0.0.1", "[fc00::1]", "[fd12:3456:789a::1]", "[ff02::1]", "[::ffff:10.0.0.1]",
    "[::ffff:c0a8:1]", "[2001:db8::1]", "[64:ff9b::a00:1]", "[2002:c0a8:101::]", "[fec0::1]",
    "0x0a.0.0.1",
]  # fmt: skip
PORTS = (":22", ":6379", ":4222/varz", ":80/latest/meta-data/")
TARGETS = [
    f"{scheme}://{host}{port}"
    for host in (*LOOPBACK, *METADATA, *PRIVATE)
    for scheme in ("http", "https")
    for port in (PORTS[len(host) % len(PORTS)], "")
]
TARGETS += [f"http://example.com@{host}/" for host in (*LOOPBACK, *METADATA[:10])]


def test_there_are_200_targets_of_80_hosts_and_nothing_is_sent_to_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both doors are tried: the look at the start, and the request itself."""
    assert len(set(TARGETS)) >= 200 and len({*LOOPBACK, *METADATA, *PRIVATE}) >= 80
    sent: list[httpx.Request] = []

    def answer(_: Any, request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(200)

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", answer)
    with httpx.Client(transport=CheckedTransport("http://example.com")) as client:
        for url in TARGETS:
            with pytest.raises(UserError, match=f"{SETTING}|is no address of a server"):
                check_url(url)
            with pytest.raises((ScoringError, httpx.InvalidURL)):
                client.post(url, content=b"x")
    assert sent == []


def test_scorers_go_through_that_door() -> None:
    with pytest.raises(UserError, match=r"169\.254\.169\.254 is an address of a machine's"):
        RemoteScorer("http://169.254.169.254", patience=1)
    with pytest.raises(UserError, match=f"localhost, which is .* set {SETTING}=localhost"):
        JudgeScorer("http://localhost:1/v1", Judge(model="m"), patience=1)


def test_a_proxy_is_asked_for_none_of_them_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    for host in ("169.254.169.254", "2130706433", "[::1]", "0x7f.1"):
        client = httpx.Client(transport=CheckedTransport(f"http://{host}"))
        with client, pytest.raises(ScoringError):
            client.get(f"http://{host}/")


def found_as(monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> list[str]:
    """Names are found at these addresses, one look after the other."""
    waiting, asked = list(answers), list[str]()

    def look(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        found = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in found]

    monkeypatch.setattr("socket.getaddrinfo", look)
    return asked


def test_a_name_with_one_private_address_among_public_ones_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found_as(monkeypatch, ["93.184.216.34", "10.0.0.1"])
    with pytest.raises(UserError, match=r"judge\.example, which is 10\.0\.0\.1, is an"):
        check_url("http://judge.example")


def test_a_request_goes_to_the_address_that_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that answers something else the second time has nobody to tell it to."""
    asked = found_as(monkeypatch, ["93.184.216.34"], ["127.0.0.1"])
    sent: list[httpx.Request] = []

    def answer(_: Any, request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(200)

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", answer)
    with httpx.Client(transport=CheckedTransport("https://judge.example")) as client:
        client.post("https://judge.example:8443/score")
        with pytest.raises(ScoringError, match=r"127\.0\.0\.1, is this machine itself"):
            client.post("https://judge.example:8443/score")
    [request] = sent
    assert (request.url.host, request.url.port) == ("93.184.216.34", 8443)
    assert request.headers["host"] == "judge.example:8443"
    assert request.extensions["sni_hostname"] == "judge.example"
    assert asked == ["judge.example"] * 2


@contextmanager
def redirecting(to: str) -> Iterator[tuple[str, list[str]]]:
    seen: list[str] = []

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            seen.append(self.path)
            self.send_response(307)
            self.send_header("location", to)
            self.end_headers()

    with serving(Handler) as url:
        yield url, seen


def test_nobody_is_sent_on_to_another_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "127.0.0.1")
    with (
        redirecting("/elsewhere") as (url, seen),
        httpx.Client(transport=CheckedTransport(url)) as client,
        pytest.raises(ScoringError, match="refuses: 307"),
    ):
        ask(client, f"{url}/score", patience=5)
    assert seen == ["/score"]


def test_who_is_allowed_by_name_address_or_network_is_asked() -> None:
    hosts = private_hosts("Judge, 10.0.0.0/8 [::1]")
    hosts.check("judge", ["192.168.0.1"])
    hosts.check("judge.", ["192.168.0.1"])
    hosts.check("10.1.2.3", ["10.1.2.3"])
    hosts.check("::1", ["::1"])
    hosts.check("example.com", ["93.184.216.34"])
    for host, address in (("judge", "169.254.169.254"), ("other", "192.168.0.1")):
        with pytest.raises(UserError):
            hosts.check(host, [address])
    private_hosts("169.254.169.254").check("169.254.169.254", ["169.254.169.254"])


def test_who_starts_a_recipe_has_its_hosts_asked_but_for_metadata(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SETTING, "judge")
    urls = ["http://127.0.0.1:9000", "https://vlm:8000/v1", "http://169.254.169.254/latest"]
    assert named_in(urls) == "judge,127.0.0.1,vlm"
    assert named_in([]) == "judge"


def test_public_addresses_are_public() -> None:
    for address in ("93.184.216.34", "8.8.8.8", "2606:4700::1111", "1.1.1.1"):
        assert private_kind(ipaddress.ip_address(address)) is None

"""A scorer behind HTTP: real processes, killed and started again; and requests that are none."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest
from fastapi.testclient import TestClient

from digenrl.local.processes.ports import free_ports
from services.reward.scorer import WeightedScorer, build_scorers
from services.reward.scorers.remote import RemoteScorer
from services.reward.server import create_app
from services.reward.wire import MSGPACK
from shared.errors import SamplesFailed, ScorerUnavailable, ScoringError, UserError
from shared.process.service import Health
from shared.recipe.rewards import ScorerTable

NUM_ITEMS, AT_ONCE = 1000, 20


class Server:
    """`digenrl serve-scorer`, as it is typed."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._command = [
            sys.executable, "-m", "digenrl", "serve-scorer", "jpeg-incompressibility",
            "--port", str(port),
        ]  # fmt: skip
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def is_up(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=1).status_code == 200
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(free_ports(1)[0])
    wait_for(made.is_up)
    yield made
    made.kill()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.timeout(180)
@pytest.mark.slow
def test_no_score_is_lost_or_invented_though_the_server_is_killed_twice(server: Server) -> None:
    images = np.random.default_rng(1).integers(0, 256, (NUM_ITEMS, 3, 24, 24), dtype=np.uint8)
    images[: NUM_ITEMS // 2] //= 3
    table = ScorerTable(name="remote", type="remote", url=server.url)
    [remote] = build_scorers([table])
    [local] = build_scorers([ScorerTable(name="local", type="jpeg-incompressibility")])
    scores: list[float] = []

    def ask() -> None:
        for first in range(0, NUM_ITEMS, AT_ONCE):
            part = images[first : first + AT_ONCE]
            scores.extend(remote.score(part, [{}] * len(part)))

    asking = threading.Thread(target=ask)
    asking.start()
    for share in (0.2, 0.6):
        wait_for(lambda share=share: len(scores) >= share * NUM_ITEMS)  # type: ignore[misc]
        server.kill()
        time.sleep(0.5)
        assert asking.is_alive()
        server.start()
    asking.join(timeout=120)
    assert scores == local.score(images, [{}] * NUM_ITEMS)
    assert len(set(scores)) > 50


def test_a_server_that_stays_away_fails_the_scoring() -> None:
    scorer = RemoteScorer(f"http://127.0.0.1:{free_ports(1)[0]}", patience=0.5)
    with pytest.raises(ScorerUnavailable, match="no score in"):
        scorer.score(np.zeros((1, 3, 8, 8), np.uint8), [{}])


class Picky:
    """Scores the mean, but not of black images."""

    def score(self, media: Any, metadata: Any, /) -> list[float]:
        if any(not sample.any() for sample in media):
            raise ValueError("it is black")
        return [float(sample.mean()) for sample in media]


@pytest.fixture
def client() -> TestClient:
    return TestClient(create_app(WeightedScorer("picky", 1.0, Picky()), Health()))


def item(id: str, value: int, **changes: Any) -> dict[str, Any]:
    data = bytes([value]) * 12
    return {"id": id, "shape": [3, 2, 2], "data": data, "metadata": {}, **changes}


def post(client: TestClient, body: bytes, content_type: str = MSGPACK) -> Any:
    return client.post("/score", content=body, headers={"content-type": content_type})


def test_every_item_has_its_score_or_its_own_error(client: TestClient) -> None:
    items = [
        item("a", 7), item("black", 0), item("short", 3, shape=[3, 2, 3]),
        item("b", 9), item("latent", 0, dtype="float32", shape=[1, 1, 3]),
    ]  # fmt: skip
    answer = post(client, msgpack.packb({"items": items}))
    assert answer.status_code == 200
    found = {one["id"]: one for one in msgpack.unpackb(answer.content)["results"]}
    assert list(found) == ["a", "black", "short", "b", "latent"]
    assert (found["a"]["score"], found["b"]["score"]) == (7.0, 9.0)
    assert found["black"]["score"] is None
    assert found["black"]["error"] == {"type": "scoring", "detail": "ValueError: it is black"}
    assert found["short"]["error"]["type"] == "bad-item"
    assert found["latent"]["error"]["type"] == "scoring"


@pytest.mark.parametrize(
    ("body", "content_type", "status", "said"),
    [
        (b"\xc1", MSGPACK, 422, "the body is not application/msgpack"),
        (msgpack.packb([]), MSGPACK, 422, "dictionary"),
        (msgpack.packb({"items": []}), MSGPACK, 422, "items: "),
        (msgpack.packb({"items": [{"id": "a"}]}), MSGPACK, 422, "items.0."),
        (msgpack.packb({"items": [item("a", 1), item("a", 2)]}), MSGPACK, 422, "used twice"),
        (msgpack.packb({"items": [item("a", 1, more=1)]}), MSGPACK, 422, "items.0.more"),
        (b"x", "application/octet-stream", 415, "content-type: send application/msgpack"),
        (b"", MSGPACK, 422, "not application/msgpack"),
    ],
)
def test_what_is_no_request_is_a_problem_and_the_server_lives(
    client: TestClient, body: bytes, content_type: str, status: int, said: str
) -> None:
    answer = post(client, body, content_type)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert said in answer.json()["detail"]
    assert post(client, msgpack.packb({"items": [item("a", 7)]})).status_code == 200


def test_a_client_believes_no_scores_of_other_items(
    monkeypatch: pytest.MonkeyPatch, client: TestClient
) -> None:
    scorer = RemoteScorer("http://testserver", patience=1)
    images = np.full((2, 3, 2, 2), 5, np.uint8)
    monkeypatch.setattr(scorer, "_post", lambda body: post(client, body).raise_for_status().content)
    assert scorer.score(images, [{}, {}]) == [5.0, 5.0]
    with pytest.raises(SamplesFailed) as failed:
        scorer.score(np.stack([images[0], 0 * images[1]]), [{}, {}])
    assert failed.value.scores == (5.0, None)
    assert failed.value.reasons == {1: "ValueError: it is black"}
    for results in ([], [{"id": "1", "score": 1.0}], [{"id": "0"}], [{"id": "0", "score": 1e999}]):
        answer = msgpack.packb({"results": results})
        monkeypatch.setattr(scorer, "_post", lambda _, answer=answer: answer)
        with pytest.raises(ScoringError):
            scorer.score(images[:1], [{}])


def test_an_address_is_needed() -> None:
    with pytest.raises(UserError, match=r"reward\.scorers\.r\.url: remote needs the address"):
        build_scorers([ScorerTable(name="r", type="remote", url="host:80")])


class Endpoint(ThreadingHTTPServer):
    """A scorer of somebody else's, without any of our code: the mean of each item's bytes."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.connections: set[object] = set()
        super().__init__(("127.0.0.1", 0), Asked)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Asked(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        assert isinstance(self.server, Endpoint)
        told = msgpack.unpackb(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append(({k.lower(): v for k, v in self.headers.items()}, told))
        self.server.connections.add(self.client_address)
        results = [
            {"id": each["id"], "score": sum(each["data"]) / len(each["data"])}
            for each in told["items"]
        ]
        key = self.headers["authorization"]
        wrong = key != "Bearer s3cret"
        body = f"no key {key}".encode() if wrong else msgpack.packb({"results": results})
        self.send_response(401 if wrong else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint() as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def test_a_server_is_asked_with_a_key_in_batches_over_one_connection(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCORES_KEY", "s3cret")
    remote = {"batch": 3, "key_env": "SCORES_KEY"}
    table = ScorerTable.model_validate(
        {"name": "mine", "type": "remote", "url": endpoint.url, "remote": remote}
    )
    [scorer] = build_scorers([table])
    images = np.stack([np.full((3, 4, 4), value, np.uint8) for value in range(7)])
    for _ in range(2):
        assert scorer.score(images, [{"prompt": "a cat"}] * 7) == list(range(7))
    assert [len(told["items"]) for _, told in endpoint.requests] == [3, 3, 1] * 2
    assert len(endpoint.connections) == 1
    headers, told = endpoint.requests[0]
    assert headers["content-type"] == headers["accept"] == MSGPACK
    assert told["items"][0]["shape"] == [3, 4, 4]
    assert told["items"][0]["metadata"] == {"prompt": "a cat"}
    assert "s3cret" not in table.model_dump_json()


def test_a_key_that_is_not_there_or_is_refused_is_told_without_the_key(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = {"key_env": "SCORES_KEY"}
    table = ScorerTable.model_validate(
        {"name": "mine", "type": "remote", "url": endpoint.url, "remote": remote}
    )
    monkeypatch.delenv("SCORES_KEY", raising=False)
    with pytest.raises(UserError, match=r"scorers\.mine\.remote\.key_env: SCORES_KEY is not"):
        build_scorers([table])
    monkeypatch.setenv("SCORES_KEY", "anothers3cret")
    [scorer] = build_scorers([table])
    with pytest.raises(ScoringError, match="refuses: 401: no key Bearer") as refused:
        scorer.score(np.zeros((1, 3, 4, 4), np.uint8), [{}])
    assert "anothers3cret" not in str(refused.value)


def test_our_own_server_takes_what_our_own_client_sends(client: TestClient) -> None:
    remote = RemoteScorer("http://testserver", patience=1)
    remote._client.close()
    remote._client = client  # type: ignore[assignment]
    client.headers["content-type"] = MSGPACK
    images = np.stack([np.full((3, 4, 4), value, np.uint8) for value in (7, 0, 9)])
    with pytest.raises(SamplesFailed) as failed:
        remote.score(images, [{}] * 3)
    assert failed.value.scores == (7.0, None, 9.0)

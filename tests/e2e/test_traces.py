"""A sample is followed through the four services by a collector of OpenTelemetry."""

import gzip
import itertools
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from shared.errors import UserError
from shared.process.otlp import tracing
from shared.process.settings import ServiceSettings
from tests.storm.cluster import cluster, until_true
from tests.storm.small import small

WAY = (
    ("scheduler", "send generate_fragment"), ("rollout", "generate"), ("rollout", "store"),
    ("rollout", "send fragment_generated"), ("reward", "score"),
    ("reward", "send fragment_scored"), ("scheduler", "send train_group"), ("trainer", "commit"),
)  # fmt: skip


class Collector(ThreadingHTTPServer):
    """Receives spans as OTLP's protobuf over HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Receiver)
        self.spans: list[tuple[str, Any]] = []
        """Service and span."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        request = ExportTraceServiceRequest()
        request.ParseFromString(body)
        for resource in request.resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            service = names["service.name"].removeprefix("digenrl-")
            spans = [span for scope in resource.scope_spans for span in scope.spans]
            self.server.spans += [(service, span) for span in spans]
        self.send_response(200 if self.path == "/v1/traces" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def ways(spans: list[tuple[str, Any]]) -> list[list[tuple[str, str]]]:
    """Return the way of each commit of a group: services and spans, from the root on."""
    by_id = {span.span_id: (service, span) for service, span in spans}
    found = []
    for service, span in spans:
        if span.name != "commit":
            continue
        way = [(service, span.name)]
        while span.parent_span_id:
            if span.parent_span_id not in by_id:
                break
            service, span = by_id[span.parent_span_id]
            way.append((service, span.name))
        found.append([each for each, _ in itertools.groupby(reversed(way))])  # several pieces
    return found


@pytest.mark.run
@pytest.mark.slow
async def test_a_sample_is_followed_through_the_four_services(
    tmp_path: Path, collector: Collector
) -> None:
    setting = small(tmp_path)
    more = {"DIGENRL_OTLP_ENDPOINT": collector.url}
    whole = [("scheduler", "group"), *WAY]
    async with cluster(tmp_path / "run", setting, more=more) as run:
        await run.until_step(setting.steps)
        groups = sum(len(record.trained) for record in await run.commits())

        async def all_have_come() -> bool:
            found = ways(collector.spans)
            return len(found) >= groups and all(way == whole for way in found)

        await until_true(all_have_come, seconds=20)
        log = run.log("rollout-0")
    assert len(ways(collector.spans)) == groups > 0
    traces = {span.trace_id for _, span in collector.spans}
    assert len(traces) == groups
    for _, span in collector.spans:
        assert span.end_time_unix_nano >= span.start_time_unix_nano
    fragments = [span for service, span in collector.spans if span.name == "generate"]
    assert {each.key for each in fragments[0].attributes} == {
        "batch", "group", "fragment", "worker",
    }  # fmt: skip
    links = [len(span.links) for _, span in collector.spans if span.name == "send train_group"]
    assert max(links) >= 1, "a group of several fragments names them all"
    sent = {span.span_id for _, span in collector.spans if span.name == "send train_group"}
    trained = {span.parent_span_id for _, span in collector.spans if span.name == "train"}
    assert trained == sent, "pieces are trained of what was sent"
    assert "Traceback" not in log


def test_a_collector_that_is_away_keeps_nobody(tmp_path: Path) -> None:
    settings = ServiceSettings(run="test", worker="one", otlp_endpoint="http://127.0.0.1:9")
    with tracing(settings, "rollout"):
        pass


def test_without_the_extra_the_setting_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exporter = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, exporter, None)
    settings = ServiceSettings(run="test", worker="one", otlp_endpoint="http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"needs? the extra `otlp`"), tracing(settings, "rollout"):
        pass

"""Gives spans to a collector of OpenTelemetry (OTLP over HTTP), from a thread of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shared import limits
from shared.bus.traces import Context, Span, Traces, trace_to
from shared.errors import UserError
from shared.process.settings import ServiceSettings
from shared.proxies import go_direct

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

SPANS = "/v1/traces"


@contextmanager
def tracing(settings: ServiceSettings, service: str) -> Iterator[None]:
    """Trace what this process does, if a collector is named.

    Raises:
        UserError: if the extra is not installed.
    """
    if not (endpoint := settings.otlp_endpoint):
        yield
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise UserError(
            "DIGENRL_OTLP_ENDPOINT: traces need the extra `otlp`: uv pip install -e '.[otlp]'"
        ) from error
    url = endpoint if endpoint.endswith(SPANS) else endpoint.rstrip("/") + SPANS
    go_direct(settings.nats_url.get_secret_value(), settings.s3_endpoint)
    processor = BatchSpanProcessor(
        OTLPSpanExporter(endpoint=url, timeout=limits.COLLECTOR_TIMEOUT_S),
        max_queue_size=limits.MAX_WAITING_SPANS,
        schedule_delay_millis=1000 * limits.EXPORT_INTERVAL_S,
        export_timeout_millis=1000 * limits.COLLECTOR_TIMEOUT_S,
    )  # fmt: skip
    resource = Resource.create({
        "service.name": f"digenrl-{service}", "service.instance.id": settings.worker,
        "digenrl.run": settings.run,
    })  # fmt: skip

    def export(span: Span) -> None:
        processor.on_end(_readable(span, resource))

    trace_to(Traces(export, settings.otlp_share))
    try:
        yield
    finally:
        trace_to(None)
        processor.force_flush(int(1000 * limits.COLLECTOR_FLUSH_S))
        processor.shutdown()  # type: ignore[no-untyped-call]


def _readable(span: Span, resource: "Resource") -> "ReadableSpan":
    from opentelemetry import trace
    from opentelemetry.sdk.trace import ReadableSpan

    def translated(context: Context) -> trace.SpanContext:
        sampled = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        return trace.SpanContext(context.trace, context.span, is_remote=False, trace_flags=sampled)

    parent = None if span.parent is None else Context(span.context.trace, span.parent)
    return ReadableSpan(
        name=span.name,
        context=translated(span.context),
        parent=None if parent is None else translated(parent),
        resource=resource,
        attributes=dict(span.fields),
        links=[trace.Link(translated(each)) for each in span.links],
        start_time=span.began,
        end_time=span.ended,
    )

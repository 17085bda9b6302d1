"""Spans of a group, from the scheduler's first command to the commit, without a collector."""

from collections.abc import Iterator

import pytest
import structlog

from shared.bus import traces
from shared.bus.traces import Context, Span, TracedWork, Traces, about, did, received, sent, span
from shared.messages.contracts import GroupFailed, TrainGroup
from tests import examples


@pytest.fixture
def spans() -> Iterator[list[Span]]:
    """The spans of this process, which is the scheduler."""
    found: list[Span] = []
    traces.trace_to(Traces(found.append))
    yield found
    traces.trace_to(None)


def train_group(*fragments: int) -> TrainGroup:
    return examples.group(*(examples.scored(examples.task(first_sample=n)) for n in fragments))


def test_without_a_collector_no_message_has_a_header_and_logs_say_what_they_are_about() -> None:
    task = examples.task(group=3)
    assert sent(task, None) is None and sent(task, {"dg-epoch": "1"}) == {"dg-epoch": "1"}
    with about(task):
        assert structlog.contextvars.get_contextvars() == {"batch": 0, "group": 3, "fragment": 0}
    with span("score", examples.generated(task)):
        assert structlog.contextvars.get_contextvars()["group"] == 3
    assert structlog.contextvars.get_contextvars() == {}


def test_a_group_is_one_trace_whose_training_needed_all_its_fragments(spans: list[Span]) -> None:
    tasks = [examples.task(first_sample=first) for first in (0, 2)]
    headers = [sent(task, {"dg-epoch": "1"}) for task in tasks]
    roots = {each.parent for each in spans}
    assert len(roots) == 1 and all(given and given["dg-epoch"] == "1" for given in headers)
    for task, given in zip(tasks, headers, strict=True):
        received(examples.generated(task), given)  # changes nothing: the scheduler sends none of it
        context = Context.parse((given or {})[traces.HEADER])
        assert context is not None
        scored = Context(context.trace, context.span + 1)
        received(examples.scored(task), {traces.HEADER: scored.header})
    sent(train_group(0, 2), None)
    train = spans[-1]
    assert train.name == "send train_group" and len(train.links) == 1
    assert train.parent not in roots and {each.context.trace for each in spans} == {
        train.context.trace
    }
    received(examples.published(1), None)
    assert (spans[-1].name, spans[-1].parent) == ("group", None)
    assert {spans[-1].context.span} == roots and spans[-1].ended >= spans[-1].began
    received(examples.published(2), None)
    assert [each.name for each in spans].count("group") == 1


def test_what_a_worker_does_follows_from_what_it_was_sent(spans: list[Span]) -> None:
    task = examples.task(group=1)
    received(task, {traces.HEADER: Context(7, 8).header})
    did("generate", task, seconds=2.0, worker="rollout-0")
    with span("store", task), about(task):
        assert structlog.contextvars.get_contextvars()["trace"] == f"{7:032x}"
        given = sent(examples.generated(task), None)
    by_name = {each.name: each for each in spans}
    generate, store = by_name["generate"], by_name["store"]
    assert generate.parent == 8 and generate.ended - generate.began >= 2_000_000_000
    assert generate.fields == {"batch": 0, "group": 1, "fragment": 0, "worker": "rollout-0"}
    assert store.parent == generate.context.span
    assert by_name["send fragment_generated"].parent == store.context.span
    assert given == {traces.HEADER: by_name["send fragment_generated"].context.header}


def test_of_what_came_without_a_header_nothing_is_traced(spans: list[Span]) -> None:
    received(train_group(0), None)
    did("train", train_group(0), seconds=1.0)
    event = GroupFailed(batch=0, group=0, attempt=0, reason="none")
    assert sent(event, None) is None and spans == []


@pytest.mark.parametrize("header", ["", "00-1-2-01", f"00-{'0' * 32}-{'1' * 16}-01", "x" * 55])
def test_a_header_that_is_none_is_ignored(header: str) -> None:
    assert Context.parse(header) is None
    good = Context(2**127, 2**63)
    assert Context.parse(good.header) == good


def test_a_share_of_the_groups_is_traced_and_memory_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(traces, "MAX_KEPT_SPANS", 50)
    found: list[Span] = []
    kept = Traces(found.append, share=0.25)
    for group in range(2000):
        kept.send(examples.task(group=group))
    assert 350 < len(found) < 650
    assert len(kept._newest) <= 50
    kept.finish(1)
    assert len([each for each in found if each.name == "group"]) == len(found) // 2
    assert not kept._roots and kept.parent_of(TracedWork(9, 9)) is None

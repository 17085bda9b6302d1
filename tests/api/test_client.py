"""The client has a method for each operation of the API, and reads what is really answered."""

import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from digenrl.api import client as client_module
from digenrl.api.checked_client import CheckedClient
from digenrl.api.client import Client, NoAnswer, Refused
from digenrl.api.front import api_routes
from digenrl.api.live import LiveRun
from digenrl.api.run_history import RunHistory
from services.scheduler.shell.api import create_app
from services.scheduler.shell.app import Scheduler
from shared.errors import UserError
from shared.process.http_access import Access
from shared.process.http_guard import Guard, own_names
from tests.api.past_run import past_run
from tests.api.served import app_of
from tests.follow.runs import RUN, Run
from tests.paths import ROOT
from tests.scheduler.shell.conftest import folder, scheduler
from tests.view.stored import stored_run

__all__ = ["folder", "scheduler"]  # fixtures

NOT_OPERATIONS = {"at", "close", "no_answer", "of", "open", "refused"}


@pytest.fixture
def live(scheduler: Scheduler) -> Client:
    return _of(create_app(scheduler))


@pytest.fixture
def past(tmp_path: Path) -> Client:
    return _of_past(past_run(tmp_path / "past"))


def _of_past(run: Run) -> Client:
    return _of(app_of(api_routes(RunHistory(run.store, RUN), LiveRun("", httpx.AsyncClient()))))


def _of(app: FastAPI) -> Client:
    guard = Guard(app, own_names("testserver"), access=Access(is_open=True))
    return CheckedClient(cast(httpx.Client, TestClient(guard)))


CALLS: dict[str, Callable[[Client], object]] = {
    "get_livez": Client.get_livez,
    "get_readyz": Client.get_readyz,
    "get_metrics": Client.get_metrics,
    "get_run": Client.get_run,
    "get_load": Client.get_load,
    "pause_run": Client.pause_run,
    "pause_at_failure_run": Client.pause_at_failure_run,
    "resume_run": Client.resume_run,
    "stop_run": Client.stop_run,
    "get_tag": Client.get_tag,
    "set_tag": lambda run: run.set_tag("fixed", 1),
    "list_workers": Client.list_workers,
    "drain_worker": lambda run: run.drain_worker("rollout-0"),
    "undrain_worker": lambda run: run.undrain_worker("rollout-0"),
    "list_batches": lambda run: run.list_batches(limit=1, before=1),
    "get_batch": lambda run: run.get_batch(0),
    "list_versions": Client.list_versions,
    "get_timeline": lambda run: run.get_timeline(1),
    "list_dead_letters": Client.list_dead_letters,
    "make_code": Client.make_code,
}
REFUSED: dict[str, Callable[[Client], object]] = {
    "get_usage": lambda run: run.get_usage(7),
    "get_dead_letter": lambda run: run.get_dead_letter(7),
    "retry_dead_letter": lambda run: run.retry_dead_letter(7),
    "drop_dead_letter": lambda run: run.drop_dead_letter(7),
}
PAST: dict[str, Callable[[Client], object]] = {
    "list_groups": lambda run: run.list_groups(0),
    "list_samples": lambda run: run.list_samples(0, "worst", limit=2),
    "get_sample": lambda run: run.get_sample(0, 1, 2),
    "get_sample_media": lambda run: run.get_sample_media(0, 1, 2),
    "list_audit": Client.list_audit,
    "list_logs": Client.list_logs,
    "get_storage": Client.get_storage,
    "get_status": Client.get_status,
}
SHOWN: dict[str, Callable[[Client], object]] = {
    "get_recipe": Client.get_recipe,
    "get_curves": lambda run: run.get_curves(after=1, limit=2).metrics,
    "list_evaluations": lambda run: run.list_evaluations(limit=1, before=4),
    "get_evaluation": lambda run: run.get_evaluation(4).samples,
    "get_media": lambda run: run.get_media(
        run.get_evaluation(4).samples[0].media.rpartition("/")[2]
    ),
}
ELSEWHERE = {"get_events", "get_plan", "export_version", "sample_prompt"}
"""Operations of test_events.py, below, and of test_export_routes.py and test_sample_now.py."""


def operations() -> dict[str, set[str]]:
    """Return the names of the parameters of each operation, without the key of a request."""
    return {
        operation["operationId"]: {
            each["name"] for each in operation.get("parameters", ()) if each["in"] != "header"
        }
        for methods in json.loads((ROOT / "docs" / "openapi.json").read_text())["paths"].values()
        for operation in methods.values()
    }


def test_every_operation_has_a_method_of_its_name_and_parameters_and_is_asked_here() -> None:
    known = operations()
    methods = {name for name in vars(Client) if not name.startswith("_")} - NOT_OPERATIONS
    assert methods == known.keys() == {*CALLS, *REFUSED, *PAST, *SHOWN, *ELSEWHERE}
    for name, parameters in known.items():
        taken = set(inspect.signature(getattr(Client, name)).parameters) - {"self"}
        assert parameters <= taken, name


def test_what_a_scheduler_answers_is_read(live: Client) -> None:
    for name, call in CALLS.items():
        assert call(live) is not None, name
    for name, call in REFUSED.items():
        with pytest.raises(Refused) as found:
            call(live)
        assert found.value.status == 404, name


def test_what_is_read_from_the_store_is_read(past: Client, tmp_path: Path) -> None:
    for name, call in PAST.items():
        assert call(past), name
    evaluated = _of_past(stored_run(tmp_path, timelines=False))
    for name, call in SHOWN.items():
        assert call(evaluated), name
    page = past.list_samples(0, "worst", limit=2)
    assert page.samples[0].reward == 0.0 and page.next == "2"


def test_recipe_curves_and_evaluations_are_those_of_the_run(tmp_path: Path) -> None:
    run = _of_past(stored_run(tmp_path, timelines=False))
    assert run.get_recipe().recipe["run"]["name"] == RUN
    first, rest = run.get_curves(limit=3), run.get_curves(after=3)
    assert (first.versions, first.next, rest.versions, rest.next) == ([1, 2, 3], 3, [4], None)
    assert first.metrics["reward_mean"] + rest.metrics["reward_mean"] == [0.25, 0.5, 0.75, 1.0]
    assert [each.version for each in run.list_evaluations()] == [4, 0]
    assert run.list_evaluations()[0].gold == {"other": 0.5}
    gallery = run.get_evaluation(4).samples
    assert [each.prompt for each in gallery][:2] == ["the digit 0", "the digit 1"]
    assert run.get_media(gallery[0].still.rpartition("/")[2]).startswith(b"\x89PNG")
    for call in (lambda: run.get_evaluation(2), lambda: run.get_media("recipe.json")):
        with pytest.raises(Refused) as found:
            call()
        assert found.value.status == 404


def test_what_a_scheduler_answered_is_answered_after_the_end_from_the_store(past: Client) -> None:
    """All reads; the run has one batch, which dead letter 1 is about."""
    run = past.get_run()
    assert (run.phase, run.step, run.waiting_for) == ("stopped", 1, "operator")
    assert (run.reward_mean, run.num_dead_letters) == (0.5, 0)
    assert past.list_workers() == [] and past.get_tag().mode == "auto"
    assert [each.version for each in past.list_versions()] == [1, 0]
    assert [each.version for each in past.list_versions(before=1)] == [0]
    [batch] = past.list_batches()
    assert past.list_batches(before=0) == [] and batch.status == "committed"
    assert past.get_batch(0).groups[1].rewards == [None, 0.75, 0.5, 0.5]
    [letter] = past.list_dead_letters("over")
    assert past.list_dead_letters() == [] and letter.state == "over"
    assert past.get_dead_letter(1).reason == letter.reason == "out of memory"
    for name, call in REFUSED.items():
        with pytest.raises(Refused) as found:
            call(past)
        assert found.value.status == (404 if name.startswith("get_") else 409), name
    with pytest.raises(Refused, match="batch 1 was not committed"):
        past.get_batch(1)


def test_a_request_whose_answer_is_lost_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "RETRY_DELAY_S", 0.0)
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        if len(asked) == 1:
            raise httpx.ReadError("reset", request=request)
        return httpx.Response(202, json={"action": "pause", "id": "x"})

    transport = httpx.MockTransport(answer)
    run = Client(httpx.Client(transport=transport, base_url="http://run"))
    assert run.pause_run().action == "pause" and len(asked) == 2


def test_events_are_taken_up_where_they_broke_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "RETRY_DELAY_S", 0.0)
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.params.get("after", ""))
        at = len(asked)
        lines = f'retry: 1\n\n:\n\nid: c{at}\nevent: commit\ndata: {{"version": {at}}}\n\n'
        return httpx.Response(200, text=lines + 'event: run\ndata: {"phase": "running"}\n\n')

    run = Client(httpx.Client(transport=httpx.MockTransport(answer), base_url="http://run"))
    events: Iterator[client_module.Event] = run.get_events("start")
    found = [next(events) for _ in range(4)]
    assert [each.name for each in found] == ["commit", "run"] * 2
    assert asked == ["start", "c1"]


def test_nobody_who_answers_and_somebody_else_who_does_are_said() -> None:
    with pytest.raises(NoAnswer, match=r"--scheduler: http://127\.0\.0\.1:1 does not answer"):
        Client.at("http://127.0.0.1:1").get_run()
    other = httpx.MockTransport(lambda request: httpx.Response(200, json={"phase": 1}))
    with pytest.raises(UserError, match="is no API of this release: /v1/run"):
        CheckedClient(httpx.Client(transport=other, base_url="http://run")).get_run()
    page = httpx.MockTransport(lambda request: httpx.Response(200, text="<html>"))
    with pytest.raises(NoAnswer, match="is no API of this release: /v1/run"):
        Client(httpx.Client(transport=page, base_url="http://run")).get_run()


def test_a_program_reads_responses_as_our_commands_do(past: Client) -> None:
    """Without our types: as dictionaries whose keys are attributes."""
    program = Client(past.http)
    letter: Any = program.list_dead_letters("over")[0]
    assert dict(letter) == past.list_dead_letters("over")[0].model_dump(mode="json")
    assert letter.state == "over" and letter.work.batch == 0
    assert not hasattr(letter, "colour")

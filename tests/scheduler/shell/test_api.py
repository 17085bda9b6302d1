"""The HTTP API over a scheduler in mid-run."""

import asyncio
import re
import time
from dataclasses import replace
from typing import Any, cast

import pytest
from fastapi.testclient import TestClient
from prometheus_client import REGISTRY
from pydantic import BaseModel

from services.scheduler.core.inputs import WorkerJoined
from services.scheduler.core.machine import step
from services.scheduler.shell import api_batches, api_letters, api_load, api_models
from services.scheduler.shell.api import create_app
from services.scheduler.shell.app import Scheduler
from services.scheduler.shell.load import slowest
from services.scheduler.shell.metrics import RUN, StepMetrics, measure_commit
from services.scheduler.shell.roster import LastStatus
from services.scheduler.shell.views import run_figures
from services.scheduler.sim.staleness import StalenessDecision
from shared.limits import MAX_RECENT_STEPS
from shared.messages.workers import Device, GpuUse, Transferred
from shared.process.http_access import CodeView
from shared.process.http_api import Problem
from shared.process.service import ProbeView
from shared.run import usage
from shared.run.chain import SEGMENT_STEPS
from shared.run.layout import timeline_key, usage_key
from shared.run.usage import BatchUsage, Timeline
from tests import examples
from tests.scheduler.shell.served import METRICS, Outbox, commit, stored
from tests.shared.store.hosts import CountedReads


@pytest.fixture
def schema(scheduler: Scheduler) -> dict[str, Any]:
    """The API as it describes itself."""
    return create_app(scheduler).openapi()


def test_a_scheduler_that_has_not_read_the_run_tells_nothing_of_it(
    client: TestClient, scheduler: Scheduler
) -> None:
    """After every start and takeover it told step 0, then the phase "waiting" and no letters."""
    log, scheduler.state = scheduler.run_log, replace(scheduler.state, recovering=True)
    log.is_read = False
    for path in ("/v1/run", "/v1/dead-letters", "/v1/dead-letters/1"):
        answer = client.get(path)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    scheduler.state = replace(scheduler.state, recovering=False)
    assert client.get("/v1/run").status_code == 503
    log.is_read = True
    assert client.get("/v1/run").json()["step"] == 1
    assert client.get("/v1/dead-letters").json() == []


def test_the_run_says_where_it_is_and_what_it_waits_for(client: TestClient) -> None:
    run = client.get("/v1/run").json()
    assert (run["step"], run["steps"], run["phase"]) == (1, 3, "running")
    assert run["waiting_for"] == "rollout"
    assert run["reward_mean"] == 0.5
    assert run["eta_seconds"] == 2 * 2.0
    assert run["num_workers"] == {"rollout": 1, "reward": 0, "trainer": 0}
    assert (run["max_staleness"], run["max_staleness_reason"]) == (0, None)


def test_the_run_says_why_samples_may_be_stale(scheduler: Scheduler, client: TestClient) -> None:
    scheduler.staleness = StalenessDecision(max_staleness=0, gain=1.05, reason="it gains little")
    assert client.get("/v1/run").json()["max_staleness_reason"] == "it gains little"


def test_of_many_batches_the_newest_are_in_memory_and_others_are_read_in_segments(
    scheduler: Scheduler, client: TestClient, folder: CountedReads
) -> None:
    chain = scheduler.chain
    for version in range(2, 20 * SEGMENT_STEPS):
        chain.add(stored(version))
        if (version + 1) % SEGMENT_STEPS == 0:
            asyncio.run(chain.keep(version + 1))
    folder.num_reads = 0
    assert len(client.get("/v1/batches?limit=200").json()) == 200
    assert len(client.get("/v1/versions?limit=200").json()) == 200
    assert (folder.num_reads, len(chain.recent)) == (0, MAX_RECENT_STEPS)
    old = client.get("/v1/batches?limit=40&before=100").json()
    assert [each["batch"] for each in old] == list(range(99, 59, -1))
    assert old[0]["metrics"] == METRICS
    assert folder.num_reads == 3
    assert client.get("/v1/batches?before=0").json() == []
    assert [each["batch"] for each in client.get("/v1/batches?before=2").json()] == [1, 0]
    assert [each["version"] for each in client.get("/v1/versions?before=2").json()] == [1, 0]


def test_what_devices_did_is_read_of_one_batch(
    scheduler: Scheduler, client: TestClient, folder: CountedReads
) -> None:
    usage = BatchUsage(batch=0, seconds=2.0, devices={"rollout-0": {"generating": 1.5}})
    key = usage_key("test", 0)
    asyncio.run(scheduler.store.write(key, usage.model_dump_json().encode()))
    shown = client.get("/v1/batches/0/usage").json()
    assert shown["devices"] == {"rollout-0": {"generating": 1.5}}
    assert (shown["batch"], shown["seconds"], shown["forecast_seconds"]) == (0, 2.0, None)
    assert client.get("/v1/batches/1/usage").status_code == 404
    asyncio.run(scheduler.store.write(key, b"{damaged"))
    assert client.get("/v1/batches/0/usage").status_code == 404


def test_a_timeline_is_read_of_a_committed_batch_and_shown_of_the_one_in_flight(
    scheduler: Scheduler, client: TestClient
) -> None:
    stored = Timeline(batch=0, seconds=2.0, devices={"rollout-0": ((0.0, "generating"),)})
    asyncio.run(scheduler.store.write(timeline_key("test", 0), stored.encode()))
    assert client.get("/v1/batches/0/timeline").json() == stored.model_dump(mode="json")
    scheduler.meter.take()
    scheduler.meter.advance(1.0, {"rollout-0": "generating"})
    scheduler.meter.advance(2.0, {"rollout-0": "generating"})
    scheduler.meter.advance(3.0, {"rollout-0": "tail"})
    shown = client.get("/v1/batches/1/timeline").json()
    assert shown["batch"] == 1 and shown["devices"]["rollout-0"][-1][1] == "tail"
    assert client.get("/v1/batches/7/timeline").status_code == 404


def test_batches_and_versions_are_listed_newest_first(client: TestClient) -> None:
    assert [batch["batch"] for batch in client.get("/v1/batches").json()] == [1, 0]
    assert len(client.get("/v1/batches?limit=1").json()) == 1
    assert [version["version"] for version in client.get("/v1/versions").json()] == [1, 0]


def test_a_batch_shows_its_groups(client: TestClient) -> None:
    assert client.get("/v1/batches/0").json()["groups"][0]["rewards"] == [0.0, 1.0, 1.0, 0.0]
    in_flight = client.get("/v1/batches/1").json()
    assert in_flight["status"] == "in_flight"
    assert sum(in_flight["num_fragments"].values()) == 2
    assert in_flight["staleness"] == {"0": 4}


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/batches/9", 404),
        ("/v1/batches/x", 422),
        ("/v1/batches/-1", 422),
        ("/v1/batches?limit=0", 422),
        ("/v1/nowhere", 404),
    ],
)
def test_errors_are_problem_details(client: TestClient, path: str, status: int) -> None:
    answer = client.get(path)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["status"] == status
    assert answer.json()["detail"]


def test_an_operators_request_goes_on_the_bus(client: TestClient, scheduler: Scheduler) -> None:
    answer = client.post("/v1/run/pause")
    assert answer.status_code == 202
    [request] = cast(Outbox, scheduler.bus).published
    assert request.kind == "operator_request" and request.action == "pause"


def test_tag_says_what_was_decided_and_why(client: TestClient, scheduler: Scheduler) -> None:
    trainer = WorkerJoined("trainer-0-a", "trainer-0", "trainer")
    scheduler.state, _ = step(scheduler.plan, scheduler.state, trainer, 2.0)
    tag = client.get("/v1/tag").json()
    assert tag["mode"] == "auto"
    [decision] = tag["decisions"]
    assert (decision["batch"], decision["groups"], decision["reason"]) == (1, 0, "warm-up")
    assert decision["measured_gain"] is None


def test_an_operator_chooses_the_mode_of_tag(client: TestClient, scheduler: Scheduler) -> None:
    assert client.post("/v1/tag", json={"mode": "fixed", "groups": 1}).status_code == 202
    [request] = cast(Outbox, scheduler.bus).published
    assert request.kind == "tag_request" and (request.mode, request.groups) == ("fixed", 1)


def test_where_no_trainer_can_be_lent_nobody_lends_it(
    client: TestClient, scheduler: Scheduler
) -> None:
    schedule = scheduler.plan.schedule.model_copy(update={"mode": "fluid"})
    scheduler.plan = replace(scheduler.plan, schedule=schedule)
    answer = client.post("/v1/tag", json={"mode": "off"})
    assert answer.status_code == 409 and "schedule.mode fluid" in answer.json()["detail"]
    assert cast(Outbox, scheduler.bus).published == []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"mode": "sometimes"}, "body.mode"),
        ({"mode": "fixed"}, "groups: mode fixed needs it"),
        ({"mode": "fixed", "groups": 99}, "groups: a batch has 2, not 99"),
        ({"mode": "auto", "grups": 1}, "body.grups"),
    ],
)
def test_a_faulty_request_to_tag_names_the_field(
    client: TestClient, body: dict[str, object], said: str
) -> None:
    answer = client.post("/v1/tag", json=body)
    assert answer.status_code == 422
    assert said in answer.json()["detail"]


def test_workers_show_what_they_wait_for_and_why_they_are_refused(
    client: TestClient, scheduler: Scheduler
) -> None:
    small = Device(kind="RTX", memory_bytes=2**30, needs_bytes=3 * 2**30)
    status = examples.status("rollout", "refused", worker="small", device=small)
    scheduler.roster.statuses["small-a"] = LastStatus(status, 0.0)
    mine, refused = client.get("/v1/workers").json()
    assert (mine["use"], mine["num_in_hand"], mine["refused"]) == ("generating", 2, None)
    assert refused["refused"] == "the model needs 3.00 GiB, this RTX has 1.00 GiB"
    assert refused["use"] is None


def test_workers_show_their_host_their_site_their_gpu_and_where_their_probes_are(
    client: TestClient, scheduler: Scheduler
) -> None:
    device, url = Device(kind="H100", gpu="2,3"), "http://10.0.0.7:8001"
    status = examples.status(
        "trainer", "training", device=device, host="node7", site="lab", url=url
    )
    scheduler.roster.statuses["trainer-0-a"] = LastStatus(status, 0.0)
    near, trainer = client.get("/v1/workers").json()
    assert (near["site"], trainer["site"]) == ("home", "lab")
    assert (trainer["host"], trainer["gpu"]) == ("node7", "2,3")
    assert trainer["url"] == "http://10.0.0.7:8001"


def test_every_worker_shows_the_rates_of_its_line(client: TestClient, scheduler: Scheduler) -> None:
    """A reward worker has rates as well, although no schedule depends on its line."""
    line = {"received": Transferred(num_bytes=2_500_000, seconds=2.0), "round_trip": 0.05}
    status = examples.status("reward", "scoring").model_copy(update=line)
    scheduler.roster.statuses["reward-0-a"] = LastStatus(status, 0.0)
    [reward] = [each for each in client.get("/v1/workers").json() if each["service"] == "reward"]
    assert (reward["mbits_up"], reward["mbits_down"]) == (None, 10.0)
    assert reward["round_trip_seconds"] == 0.05


def test_a_worker_is_drained_by_its_name_and_shows_it(
    client: TestClient, scheduler: Scheduler
) -> None:
    assert client.post("/v1/workers/nobody/drain").status_code == 404
    answer = client.post("/v1/workers/rollout-0/drain")
    assert (answer.status_code, answer.json()["action"]) == (202, "drain")
    [request] = cast(Outbox, scheduler.bus).published
    assert request.kind == "worker_request" and request.worker == "rollout-0"
    scheduler.state, _ = step(scheduler.plan, scheduler.state, request, 2.0)
    [shown] = client.get("/v1/workers").json()
    assert (shown["drain"], shown["num_in_hand"]) == ("draining", 2)
    status = examples.status("reward", "scoring", worker="r")
    scheduler.roster.statuses["r-a"] = LastStatus(status, 0.0)
    refused = client.post("/v1/workers/r/drain")
    assert refused.status_code == 409 and "SIGTERM" in refused.json()["detail"]


def test_a_finished_run_takes_no_requests(client: TestClient, scheduler: Scheduler) -> None:
    scheduler.state, _ = step(scheduler.plan, scheduler.state, examples.published(3), 2.0)
    assert client.post("/v1/run/stop").status_code == 409


def test_probes_and_metrics_answer(client: TestClient, scheduler: Scheduler) -> None:
    assert client.get("/livez").status_code == 200
    assert client.get("/readyz").status_code == 503
    scheduler.health.is_ready()
    assert client.get("/readyz").status_code == 200
    measure_commit(commit(1))
    metrics = client.get("/metrics").text
    assert "digenrl_onpolicy_ratio_error 1e-08" in metrics
    assert 'digenrl_scorer_reward_mean{scorer="proxy"} 0.25' in metrics
    assert 'scorer=""' not in metrics
    assert "digenrl_grad_norm" not in metrics, "of which the commit says nothing"


def test_before_the_first_commit_nothing_is_said_of_steps() -> None:
    metrics = StepMetrics()
    assert list(metrics.collect()) == []
    metrics.record(METRICS)
    assert len(list(metrics.collect())) == 3


def test_staleness_is_counted_from_the_version_that_generated_a_group() -> None:
    def counted(steps: str) -> float:
        return REGISTRY.get_sample_value("digenrl_staleness_steps_total", {"steps": steps}) or 0.0

    fresh, stale = counted("0"), counted("1")
    on_policy = commit(2)
    [group] = on_policy.trained
    late = on_policy.model_copy(
        update={"trained": (group.model_copy(update={"policy_version": 0}),)}
    )
    measure_commit(on_policy)
    measure_commit(late)
    assert (counted("0") - fresh, counted("1") - stale) == (4.0, 4.0)


def test_every_route_is_described(schema: dict[str, Any]) -> None:
    paths = schema["paths"]
    assert {"/v1/run", "/v1/workers", "/v1/batches", "/v1/batches/{batch}", "/v1/versions",
            "/v1/run/pause", "/v1/run/resume", "/v1/run/stop", "/livez", "/readyz",
            "/metrics"} <= set(paths)  # fmt: skip
    names = []
    for path, methods in paths.items():
        for method, operation in methods.items():
            assert operation["description"], path
            assert all(parameter["description"] for parameter in operation.get("parameters", []))
            names.append(operation["operationId"])
            assert operation["operationId"].split("_")[0] in (
                "get", "list", "set", "make", "pause", "resume", "stop", "retry", "drop",
                "drain", "undrain",
            ), f"{method} {path}"  # fmt: skip
    assert len(set(names)) == len(names)


def test_every_field_is_described_and_every_model_has_an_example_that_it_accepts(
    schema: dict[str, Any],
) -> None:
    known = {
        each.__name__: each
        for module in (api_models, api_batches, api_letters, api_load, usage)
        for each in (*vars(module).values(), CodeView, Problem, ProbeView)
        if isinstance(each, type) and issubclass(each, BaseModel)
    }
    described = schema["components"]["schemas"]
    assert len(described) >= 12
    for name, model in described.items():
        for field, about in model["properties"].items():
            assert about.get("description"), f"{name}.{field}"
        assert model["examples"], name
        [example] = known[name].model_json_schema()["examples"]  # FastAPI leaves nulls out
        assert set(example) == set(model["properties"]), name
        known[name].model_validate(example)


def test_every_error_is_documented_as_it_is_answered(schema: dict[str, Any]) -> None:
    problem = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            answers = operation["responses"]
            errors = {status for status in answers if int(status) >= 400}
            wanted = {"401", "421"} | ({"403", "413", "415"} if method == "post" else set())
            assert wanted <= errors, path
            for status in errors - {"503"}:
                assert answers[status]["content"] == problem, f"{path} {status}"
    probe = schema["paths"]["/readyz"]["get"]["responses"]
    assert probe["503"]["content"] == probe["200"]["content"]
    assert set(schema["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == {"text/plain"}


def test_alarms_learn_what_the_run_does_while_this_scheduler_commands(
    client: TestClient, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "digenrl_phase" not in client.get("/metrics").text, "another one commands"
    monkeypatch.setattr(RUN, "look", lambda: run_figures(scheduler, time.monotonic() - 5))
    metrics = client.get("/metrics").text
    assert f'digenrl_phase{{phase="{scheduler.state.phase}"}} 1.0' in metrics
    assert metrics.count("digenrl_phase{") == 6
    missing = re.findall(r'digenrl_missing_workers\{service="(\w+)"\} 1.0', metrics)
    assert missing == client.get("/v1/run").json()["missing_workers"]
    [seconds] = re.findall(r"digenrl_seconds_since_commit ([\d.]+)", metrics)
    assert float(seconds) >= 0
    waiting = {each["queue"]: each["samples"] for each in client.get("/v1/load").json()["queues"]}
    told = re.findall(r'digenrl_queue_samples\{queue="(\w+)"\} ([\d.]+)', metrics)
    assert {name: float(number) for name, number in told} == waiting


def test_metrics_have_the_use_of_a_worker_s_gpus(
    client: TestClient, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RUN, "look", lambda: run_figures(scheduler, time.monotonic()))
    assert "digenrl_gpu_watts{" not in client.get("/metrics").text, "no worker has a GPU"
    name, last = next(iter(scheduler.roster.statuses.items()))
    use = GpuUse(memory_bytes=5, utilisation=0.5, watts=300.0)
    used = replace(last, status=last.status.model_copy(update={"gpu_use": use}))
    monkeypatch.setitem(scheduler.roster.statuses, name, used)
    metrics = client.get("/metrics").text
    for line in ("memory_bytes{} 5.0", "utilisation{} 0.5", "watts{} 300.0"):
        assert f"digenrl_gpu_{line}".replace("{}", f'{{worker="{last.status.worker}"}}') in metrics


def test_the_slowest_worker_is_named_beside_the_mean() -> None:
    found = slowest({"a": 1.0, "b": 3.0})
    assert found is not None and (found.worker, found.mean_seconds_per_sample) == ("b", 2.0)
    assert slowest({"a": 1.0}) is None

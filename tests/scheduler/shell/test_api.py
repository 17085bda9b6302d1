"""The HTTP API over a scheduler in mid-run."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from fastapi.testclient import TestClient
from prometheus_client import REGISTRY
from pydantic import BaseModel

from services.scheduler.core.machine import WorkerJoined, step
from services.scheduler.core.state import Phase, State
from services.scheduler.core.usage import BatchUsage
from services.scheduler.planning.staleness import StalenessDecision
from services.scheduler.shell import api_models
from services.scheduler.shell.api import create_app
from services.scheduler.shell.app import Scheduler
from services.scheduler.shell.metrics import StepMetrics, measure_commit
from services.scheduler.shell.roster import Seen
from services.scheduler.shell.views import seconds_per_step
from shared.bus.bus import Bus
from shared.messages.contracts import Message
from shared.messages.workers import Device, WorkerStatus
from shared.process.http_api import Problem
from shared.process.service import Health, ProbeView
from shared.run.chain import RECENT, SHORT
from shared.run.commits import CommitRecord, StoredRecord, TrainedGroup, record_digest
from shared.run.layout import commit_key, usage_key
from shared.run.versions import VersionIndex
from shared.store import ObjectStore
from shared.store.folder import FolderBackend
from tests import examples

METRICS = {"reward_mean": 0.5, "onpolicy_ratio_error": 1e-8, "reward_mean/proxy": 0.25}


class Outbox:
    """Stands where the bus is; keeps what was published."""

    run = "test"

    def __init__(self) -> None:
        self.published: list[Message] = []

    async def publish(self, message: Message) -> bool:
        self.published.append(message)
        return True


def commit(version: int) -> CommitRecord:
    group = TrainedGroup(
        group=0,
        attempt=0,
        policy_version=version - 1 if version else 0,
        fragments=((0, 4, 0),),
        rewards=(0.0, 1.0, 1.0, 0.0),
        parts={},
        workers=("rollout-0-a",),
    )
    return CommitRecord(
        run="test",
        policy=examples.policy(version),
        parent=None,
        weights=examples.ref("weights"),
        checkpoint=examples.ref("checkpoint"),
        trained=(group,) if version else (),
        metrics=METRICS if version else {},
        worker="trainer-0",
    )


def stored(version: int) -> StoredRecord:
    record = commit(version)
    return StoredRecord(record, record_digest(record.encode()))


class CountedReads(FolderBackend):
    """A folder that counts what is read of it."""

    num_reads = 0

    async def read(self, key: str) -> bytes | None:
        self.num_reads += 1
        return await super().read(key)


@pytest.fixture
def folder(tmp_path: Path) -> CountedReads:
    for version in (0, 1):
        path = tmp_path / commit_key("test", version)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(commit(version).encode())
    return CountedReads(tmp_path)


@pytest.fixture
def scheduler(folder: CountedReads) -> Scheduler:
    plan = examples.plan()
    state, _ = step(plan, State(), WorkerJoined("rollout-0-a", "rollout-0", "rollout"), 0.0)
    state, _ = step(plan, state, examples.published(1), 1.0)
    status = WorkerStatus(
        service="rollout", worker="rollout-0", address="rollout-0-a", activity="generating"
    )
    scheduler = Scheduler(
        plan,
        cast(Bus, Outbox()),
        ObjectStore(folder),
        cast(VersionIndex, None),
        Health(),
        state=state,
        committed_at=[0.0, 2.0, 4.0, 7.0],
    )
    for version in (0, 1):
        scheduler.chain.add(stored(version))
    scheduler.roster.seen["rollout-0-a"] = Seen(status, 0.0)
    return scheduler


@pytest.fixture
def client(scheduler: Scheduler) -> TestClient:
    return TestClient(create_app(scheduler))


@pytest.fixture
def schema(scheduler: Scheduler) -> dict[str, Any]:
    """The API as it describes itself."""
    return create_app(scheduler).openapi()


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
    for version in range(2, 20 * SHORT):
        chain.add(stored(version))
        if (version + 1) % SHORT == 0:
            asyncio.run(chain.keep(version + 1))
    folder.num_reads = 0
    assert len(client.get("/v1/batches?limit=200").json()) == 200
    assert len(client.get("/v1/versions?limit=200").json()) == 200
    assert (folder.num_reads, len(chain.recent)) == (0, RECENT)
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
    assert shown == {"batch": 0, "seconds": 2.0, "devices": {"rollout-0": {"generating": 1.5}}}
    assert client.get("/v1/batches/1/usage").status_code == 404


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
    status = WorkerStatus(
        service="rollout", worker="small", address="small-a", activity="refused", device=small
    )
    scheduler.roster.seen["small-a"] = Seen(status, 0.0)
    mine, refused = client.get("/v1/workers").json()
    assert (mine["use"], mine["num_in_hand"], mine["refused"]) == ("generating", 2, None)
    assert refused["refused"] == "the model needs 3.00 GiB, this RTX has 1.00 GiB"
    assert refused["use"] is None


def test_workers_show_their_host_their_gpu_and_where_their_probes_are(
    client: TestClient, scheduler: Scheduler
) -> None:
    status = WorkerStatus(
        service="trainer",
        worker="trainer-0",
        address="trainer-0-a",
        activity="training",
        device=Device(kind="H100", gpu="2,3"),
        host="node7",
        url="http://10.0.0.7:8001",
    )
    scheduler.roster.seen["trainer-0-a"] = Seen(status, 0.0)
    _, trainer = client.get("/v1/workers").json()
    assert (trainer["host"], trainer["gpu"]) == ("node7", "2,3")
    assert trainer["url"] == "http://10.0.0.7:8001"


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
                "get", "list", "set", "pause", "resume", "stop"
            ), f"{method} {path}"  # fmt: skip
    assert len(set(names)) == len(names)


def test_every_field_is_described_and_every_model_has_an_example_that_it_accepts(
    schema: dict[str, Any],
) -> None:
    known = {
        each.__name__: each
        for each in (*vars(api_models).values(), Problem, ProbeView)
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
            wanted = {"421"} | ({"403", "413", "415"} if method == "post" else set())
            assert wanted <= errors, path
            for status in errors - {"503"}:
                assert answers[status]["content"] == problem, f"{path} {status}"
    probe = schema["paths"]["/readyz"]["get"]["responses"]
    assert probe["503"]["content"] == probe["200"]["content"]
    assert set(schema["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == {"text/plain"}


def test_a_run_without_workers_says_what_it_waits_for_and_who_is_missing(
    client: TestClient, scheduler: Scheduler
) -> None:
    scheduler.state = State()
    run = client.get("/v1/run").json()
    assert (run["phase"], run["waiting_for"]) == ("waiting", "trainer")
    assert run["missing_workers"] == ["rollout", "reward", "trainer"]
    joined = WorkerJoined("trainer-0-a", "trainer-0", "trainer")
    scheduler.state, _ = step(scheduler.plan, scheduler.state, joined, 0.0)
    assert client.get("/v1/run").json()["missing_workers"] == ["rollout", "reward"]
    scheduler.plan = examples.with_schedule(scheduler.plan, mode="colocated")
    assert client.get("/v1/run").json()["missing_workers"] == ["reward"]


def test_encoders_are_shown_and_missed_only_where_the_run_needs_them(
    client: TestClient, scheduler: Scheduler
) -> None:
    assert "encoder" not in client.get("/v1/run").json()["num_workers"]
    scheduler.plan = replace(scheduler.plan, needs_encoder=True)
    run = client.get("/v1/run").json()
    assert run["num_workers"] == {"rollout": 1, "reward": 0, "trainer": 0, "encoder": 0}
    assert run["missing_workers"] == ["reward", "trainer", "encoder"]
    status = WorkerStatus(
        service="encoder", worker="encoder-0", address="encoder-0-a", activity="encoding",
        note="no prompts",
    )  # fmt: skip
    scheduler.roster.seen["encoder-0-a"] = Seen(status, 0.0)
    assert client.get("/v1/run").json()["missing_workers"] == ["reward", "trainer"]
    [shown] = [each for each in client.get("/v1/workers").json() if each["use"] is None]
    assert (shown["service"], shown["activity"], shown["note"]) == (
        "encoder", "encoding", "no prompts",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("phase", "waits_for"),
    [("paused", "operator"), ("stopped", "operator"), ("failed", "operator"),
     ("finished", "nothing")],
)  # fmt: skip
def test_a_run_that_does_not_go_on_waits_for_no_worker(
    client: TestClient, scheduler: Scheduler, phase: Phase, waits_for: str
) -> None:
    scheduler.state = replace(scheduler.state, phase=phase)
    run = client.get("/v1/run").json()
    assert (run["waiting_for"], run["missing_workers"]) == (waits_for, [])


def test_a_worker_shows_its_own_seconds_per_sample_and_nobody_elses(
    client: TestClient, scheduler: Scheduler
) -> None:
    for service in ("reward", "trainer", "rollout"):
        address = f"{service}-9-a"
        status = WorkerStatus(
            service=service, worker=f"{service}-9", address=address, activity="starting"
        )
        scheduler.roster.seen[address] = Seen(status, 0.0)
    costs = scheduler.state.costs.observe_rollout("rollout-0-a", 0.5)
    scheduler.state = replace(scheduler.state, costs=costs)

    def shown() -> dict[str, float | None]:
        workers = client.get("/v1/workers").json()
        return {worker["worker"]: worker["seconds_per_sample"] for worker in workers}

    assert shown() == {"rollout-0": 0.5, "reward-9": None, "rollout-9": None, "trainer-9": None}
    scheduler.state = replace(scheduler.state, costs=costs.observe("help", 0.7))
    assert shown()["trainer-9"] == 0.7


def test_the_pace_is_the_median_of_the_newest_steps() -> None:
    assert seconds_per_step([]) is None
    assert seconds_per_step([5.0]) is None
    assert seconds_per_step([0.0, 1.0, 2.0, 10.0]) == 1.0

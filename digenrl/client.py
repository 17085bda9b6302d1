"""A typed client of a run's HTTP API: one method per operation, named as the API names it.

    with Client.at("http://127.0.0.1:8000", token=token) as run:
        print(run.get_run().phase, [worker.worker for worker in run.list_workers()])
        run.drain_worker("rollout-3")
        for event in run.get_events():
            ...

Ask the run's page for everything, or the scheduler for what is now (docs/openapi.json says which is
where). What is sent twice is done once: each request that changes something has a key of its own,
and is repeated if its answer is lost.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import TypeAdapter, ValidationError

from digenrl.api.exported import EXPORT_S, AdapterLayout
from digenrl.api.models import (
    AuditPage,
    GroupPage,
    PlanView,
    SampleHistory,
    SamplePage,
    StorageView,
)
from digenrl.api.shown import CurvesView, EvaluationDetail, EvaluationView, RecipeView
from services.scheduler.shell.api_batches import (
    BatchDetail,
    BatchView,
    TimelineView,
    UsageView,
    VersionView,
)
from services.scheduler.shell.api_letters import DeadLetterDetail, DeadLetterView, Settled
from services.scheduler.shell.api_load import LoadView
from services.scheduler.shell.api_models import Accepted, RunView, TagView, WorkerView
from shared.errors import UserError
from shared.messages.contracts import TagMode
from shared.process.http_access import CodeView
from shared.process.service import ProbeView
from shared.process.settings import ClientSettings
from shared.run.dead_letters import Wanted

TIMEOUT_S = 30.0
PLAN_S = 400.0
"""Longest time that a plan takes that waits for others."""
TRIES = 3
AGAIN_S = 1.0
"""Seconds before the next try, and before events are asked for anew."""
Order = Literal["number", "worst", "best", "unscored"]
Params = dict[str, str | int | None]
T = TypeVar("T")


class NoAnswer(UserError):
    """Nobody answers at the address, or what answers is no API of ours."""


class Refused(UserError):
    """The service has answered with a problem."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class Event(NamedTuple):
    """Something that happened."""

    id: str
    """What `get_events(after=...)` goes on from; empty if the event is not repeated."""
    name: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Client:
    """Asks one service of a run; raises NoAnswer if it is silent, and Refused if it refuses."""

    http: httpx.Client
    """With the address and whatever proves who asks."""

    @classmethod
    def at(cls, url: str, *, token: str = "", timeout: float = TIMEOUT_S) -> Self:
        """Return a client of an address. Without a token it sends DIGENRL_API_TOKEN; servers are
        verified by the machine's certificates and those of DIGENRL_CA."""
        settings = ClientSettings()
        headers = {"authorization": f"Bearer {token}"} if token else settings.headers
        verify = settings.trusted if url.startswith("https:") else False
        return cls(
            httpx.Client(
                base_url=url.rstrip("/"), headers=headers, timeout=timeout, verify=verify,
                trust_env=False,
            )
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    # --- the run -----------------------------------------------------------------------------

    def get_livez(self) -> ProbeView:
        return self._get(ProbeView, "/livez", ok=(503,))

    def get_readyz(self) -> ProbeView:
        return self._get(ProbeView, "/readyz", ok=(503,))

    def get_metrics(self) -> str:
        return self._ask("GET", "/metrics").text

    def make_code(self) -> CodeView:
        return self._post(CodeView, "/v1/codes")

    def get_run(self) -> RunView:
        return self._get(RunView, "/v1/run")

    def get_load(self) -> LoadView:
        return self._get(LoadView, "/v1/load")

    def pause_run(self) -> Accepted:
        return self._post(Accepted, "/v1/run/pause")

    def pause_at_failure_run(self) -> Accepted:
        return self._post(Accepted, "/v1/run/pause-at-failure")

    def resume_run(self) -> Accepted:
        return self._post(Accepted, "/v1/run/resume")

    def stop_run(self) -> Accepted:
        return self._post(Accepted, "/v1/run/stop")

    def get_tag(self) -> TagView:
        return self._get(TagView, "/v1/tag")

    def set_tag(self, mode: TagMode, groups: int | None = None) -> Accepted:
        return self._post(Accepted, "/v1/tag", json={"mode": mode, "groups": groups})

    # --- workers -----------------------------------------------------------------------------

    def list_workers(self) -> list[WorkerView]:
        return self._get(list[WorkerView], "/v1/workers")

    def drain_worker(self, worker: str) -> Accepted:
        return self._post(Accepted, f"/v1/workers/{quote(worker, safe='')}/drain")

    def undrain_worker(self, worker: str) -> Accepted:
        return self._post(Accepted, f"/v1/workers/{quote(worker, safe='')}/undrain")

    # --- batches and versions ----------------------------------------------------------------

    def list_batches(self, limit: int = 50, before: int | None = None) -> list[BatchView]:
        return self._get(list[BatchView], "/v1/batches", {"limit": limit, "before": before})

    def get_batch(self, batch: int) -> BatchDetail:
        return self._get(BatchDetail, f"/v1/batches/{batch}")

    def get_usage(self, batch: int) -> UsageView:
        return self._get(UsageView, f"/v1/batches/{batch}/usage")

    def get_timeline(self, batch: int) -> TimelineView:
        return self._get(TimelineView, f"/v1/batches/{batch}/timeline")

    def list_versions(self, limit: int = 50, before: int | None = None) -> list[VersionView]:
        return self._get(list[VersionView], "/v1/versions", {"limit": limit, "before": before})

    def export_version(
        self, version: int | Literal["best", "newest"], layout: AdapterLayout = "diffusers"
    ) -> bytes:
        """Return a ZIP file with the adapter's files; it takes seconds to be made."""
        path, wanted = f"/v1/versions/{version}/adapter", {"layout": layout}
        return self._ask("GET", path, params=wanted, timeout=EXPORT_S).content

    def list_groups(self, batch: int, limit: int = 50, after: str = "") -> GroupPage:
        return self._get(GroupPage, f"/v1/batches/{batch}/groups", {"limit": limit, "after": after})

    def list_samples(
        self, batch: int, order: Order = "number", limit: int = 50, after: str = ""
    ) -> SamplePage:
        wanted: Params = {"order": order, "limit": limit, "after": after}
        return self._get(SamplePage, f"/v1/batches/{batch}/samples", wanted)

    def get_sample(self, batch: int, group: int, sample: int) -> SampleHistory:
        return self._get(SampleHistory, f"/v1/batches/{batch}/samples/{group}/{sample}")

    def get_sample_media(self, batch: int, group: int, sample: int) -> bytes:
        path = f"/v1/batches/{batch}/samples/{group}/{sample}/media"
        return self._ask("GET", path).content

    # --- recipe, curves, evaluations ---------------------------------------------------------

    def get_recipe(self) -> RecipeView:
        return self._get(RecipeView, "/v1/recipe")

    def get_curves(self, after: int = 0, limit: int = 500) -> CurvesView:
        return self._get(CurvesView, "/v1/curves", {"after": after, "limit": limit})

    def list_evaluations(self, limit: int = 50, before: int | None = None) -> list[EvaluationView]:
        wanted: Params = {"limit": limit, "before": before}
        return self._get(list[EvaluationView], "/v1/evaluations", wanted)

    def get_evaluation(self, version: int) -> EvaluationDetail:
        return self._get(EvaluationDetail, f"/v1/evaluations/{version}")

    def get_media(self, name: str) -> bytes:
        return self._ask("GET", f"/v1/media/{quote(name, safe='')}").content

    # --- dead letters, audit, storage --------------------------------------------------------

    def list_dead_letters(
        self, state: Wanted = "open", limit: int = 50, before: int | None = None
    ) -> list[DeadLetterView]:
        asked: Params = {"state": state, "limit": limit, "before": before}
        return self._get(list[DeadLetterView], "/v1/dead-letters", asked)

    def get_dead_letter(self, number: int) -> DeadLetterDetail:
        return self._get(DeadLetterDetail, f"/v1/dead-letters/{number}")

    def retry_dead_letter(self, number: int) -> Settled:
        return self._post(Settled, f"/v1/dead-letters/{number}/retry")

    def drop_dead_letter(self, number: int) -> Settled:
        return self._post(Settled, f"/v1/dead-letters/{number}/drop")

    def list_audit(self, limit: int = 50, after: str = "") -> AuditPage:
        return self._get(AuditPage, "/v1/audit", {"limit": limit, "after": after})

    def get_storage(self) -> StorageView:
        return self._get(StorageView, "/v1/storage")

    def get_plan(
        self,
        hosts: str = "",
        devices: str = "",
        profile: str = "",
        staleness: int | None = None,
        host_gpus: int | None = None,
    ) -> PlanView:
        wanted: Params = {
            "hosts": hosts, "devices": devices, "profile": profile, "staleness": staleness,
            "host_gpus": host_gpus,
        }  # fmt: skip
        patience = {"timeout": httpx.Timeout(PLAN_S).as_dict()}
        return self._get(PlanView, "/v1/plan", wanted, extensions=patience)

    # --- events ------------------------------------------------------------------------------

    def get_events(self, after: str = "") -> Iterator[Event]:
        """Yield events for ever, after one that is known: over restarts of whoever serves them,
        each once. ``after``: an event's id, "start", or nothing for from now on.

        Raises:
            Refused: if the service refuses.
        """
        while True:
            try:
                for event in self._events(after):
                    after = event.id or after
                    yield event
            except httpx.HTTPError:
                pass
            time.sleep(AGAIN_S)

    def _events(self, after: str) -> Iterator[Event]:
        asked = {"after": after} if after else {}
        timeout = httpx.Timeout(TIMEOUT_S)  # a comment comes every 15 s
        with self.http.stream("GET", "/v1/events", params=asked, timeout=timeout) as answer:
            if answer.is_error:
                answer.read()
                raise Refused(answer.status_code, _detail(answer))
            fields: dict[str, str] = {}
            for line in answer.iter_lines():
                if line:
                    name, _, value = line.partition(":")
                    fields[name] = value.removeprefix(" ")
                    continue
                if "event" in fields:
                    data = json.loads(fields["data"])
                    yield Event(fields.get("id", ""), fields["event"], data)
                fields = {}

    def _get(
        self,
        kind: type[T],
        path: str,
        params: Params | None = None,
        ok: tuple[int, ...] = (),
        **more: Any,
    ) -> T:
        given = {name: each for name, each in (params or {}).items() if each not in (None, "")}
        return self._read(kind, self._ask("GET", path, ok, params=given, **more))

    def _post(self, kind: type[T], path: str, **more: Any) -> T:
        return self._read(kind, self._ask("POST", path, **more))

    def _read(self, kind: type[T], answer: httpx.Response) -> T:
        try:
            return TypeAdapter(kind).validate_json(answer.content)
        except ValidationError as error:
            raise NoAnswer(
                f"{self.http.base_url} is no API of this release: {answer.request.url.path}: "
                f"{error.errors(include_url=False)[0]['msg']}"
            ) from error

    def _ask(self, method: str, path: str, ok: tuple[int, ...] = (), **more: Any) -> httpx.Response:
        answer = None
        for tries in reversed(range(TRIES)):
            try:
                answer = self.http.request(method, path, **more)
                break
            except httpx.ConnectError as error:
                raise self._silent(error) from None
            except httpx.HTTPError as error:
                if not tries:
                    raise self._silent(error) from None
                time.sleep(AGAIN_S)
        assert answer is not None
        if answer.is_success or answer.status_code in ok:
            return answer
        raise Refused(answer.status_code, _detail(answer))

    def _silent(self, error: httpx.HTTPError) -> NoAnswer:
        return NoAnswer(f"--scheduler: {self.http.base_url} does not answer: {error}")


def _detail(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"the service answers {answer.status_code}"

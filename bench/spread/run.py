"""Has a version announced to the rollout workers of several hosts, and waits until all have it.

Workers, brokers and store are real; a worker's device only looks at the head of what it is given.
The store and the brokers are on a host of their own. Every process is forked from this one, so that
64 of them start within seconds, and moves to its host before it does anything.
"""

import asyncio
import multiprocessing
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from pydantic import SecretStr

from bench.cluster.blobs import adapter_blob, digest_of, head_of
from bench.spread.network import Host, network
from digenrl.local.brokers.embedded import BUCKET, USER, plan_brokers
from services.rollout.policy_loader import PolicyLoader
from shared.devices.protocols import RolloutDevice, StagedVersion
from shared.errors import Unavailable, UserError
from shared.messages.contracts import Policy, PolicyPublished
from shared.messages.records import HOME
from shared.process.settings import ServiceSettings
from shared.process.worker import Worker, WorkerContext
from shared.run.commits import CommitRecord, commit, record_digest
from shared.run.layout import weights_folder
from shared.run.manifest import StoredTensors
from shared.run.versions import Version
from shared.store import ObjectStore, open_store
from shared.store.host_cache import host_cache
from shared.telemetry import DIGESTED_BYTES, SHARED_BYTES, quiet_logs

PASSWORD = "spread"
SMALL = 1024
"""Bytes of version 0."""
PORT = 7800
LOOK_S = 0.05
PATIENCE_S = 120.0
FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True, slots=True)
class Spread:
    """What was measured of one number of hosts."""

    hosts: int
    workers: int
    by_worker: list[list[float]]
    """Seconds from each version's announcement until each worker has adopted it."""
    from_store: float
    """Bytes that workers have read from the store per version, in sizes of a version."""
    from_peers: float
    digested: float
    """Bytes that workers have digested per version, in sizes of a version."""

    @property
    def seconds(self) -> list[float]:
        """Seconds from each version's announcement to the last worker that has adopted it."""
        return [max(each) for each in self.by_worker]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    host: Host
    settings: ServiceSettings
    size: int
    versions: int


def measure(
    numbers: Sequence[int], *, workers: int, size: int, versions: int,
    megabytes_per_s: float | None, folder: Path, shares: bool = True,
) -> Iterator[Spread]:  # fmt: skip
    """Measures each number of hosts, with so many ``workers`` on each host.

    Raises:
        UserError: if this machine has no network namespaces.
    """
    quiet_logs()
    with (
        network([megabytes_per_s] * (max(numbers) + 1)) as (store, *hosts),
        _brokers(store, folder) as settings,
    ):
        for number in numbers:
            run = settings.model_copy(update={"run": f"spread-{number}"})
            publisher = Plan(host=store, settings=run, size=size, versions=versions)
            of_workers = [
                _of_worker(publisher, host, folder / f"{number}-{place}", f"{place}-{each}", shares)
                for place, host in enumerate(hosts[:number])
                for each in range(workers)
            ]
            yield _measured(number, publisher, of_workers)


def measure_sites(
    near: Sequence[float], far: Sequence[float], far_line: float,
    *, size: int, versions: int, megabytes_per_s: float, folder: Path,
) -> Spread:  # fmt: skip
    """Measures a worker on each host with such a line, some of them in a far site. The store's line
    has ``megabytes_per_s``. Raises UserError as `measure` does."""
    quiet_logs()
    with (
        network([megabytes_per_s, *near], far, far_line) as (store, *hosts),
        _brokers(store, folder) as settings,
    ):
        publisher = Plan(host=store, settings=settings, size=size, versions=versions)
        sites = [HOME] * len(near) + ["far"] * len(far)
        workers = [
            _of_worker(publisher, host, folder / f"{each}", f"{each}", site=site)
            for each, (host, site) in enumerate(zip(hosts, sites, strict=True))
        ]
        return _measured(len(hosts), publisher, workers)


def _of_worker(
    plan: Plan, host: Host, cache: Path, name: str, shares: bool = True, site: str = HOME
) -> Plan:
    update = {
        "worker": f"rollout-{name}", "host_cache": str(cache.absolute()), "site": site,
        "share_at": (host.address, PORT) if shares else None,
    }  # fmt: skip
    return replace(plan, host=host, settings=plan.settings.model_copy(update=update))


@contextmanager
def _brokers(host: Host, folder: Path) -> Iterator[ServiceSettings]:
    """Starts brokers on a host, where they answer other hosts as well."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = plan_brokers(folder / "brokers", PASSWORD, at=host.address)
    with ExitStack() as stack:
        for program in plan.programs:
            log = stack.enter_context((folder / f"{program.name}.log").open("wb"))
            child = subprocess.Popen(
                host.command(program.argv), stdout=log, stderr=log,
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **program.environment},
            )  # fmt: skip
            stack.callback(child.wait)
            stack.callback(child.kill)
        yield ServiceSettings(
            run="spread",
            nats_url=SecretStr(f"nats://{USER}:{PASSWORD}@{host.address}:{plan.nats_port}"),
            redis_url=SecretStr(f"redis://:{PASSWORD}@{host.address}:{plan.redis_port}"),
            store_url=f"s3://{BUCKET}",
            s3_endpoint=f"http://{host.address}:{plan.s3_port}",
            s3_access_key=SecretStr(USER),
            s3_secret_key=SecretStr(PASSWORD),
        )


def _measured(number: int, publisher: Plan, workers: Sequence[Plan]) -> Spread:
    seconds, counts = [], Counter[str]()
    with ExitStack() as stack:
        trainer = stack.enter_context(_process(publish, publisher))
        _received(trainer)  # version 0, with which workers begin
        started = [stack.enter_context(_process(follow, plan)) for plan in workers]
        for worker in started:
            _received(worker)
        for _ in range(publisher.versions):
            trainer.send("go")
            announced = _received(trainer)
            seconds.append([_received(worker) - announced for worker in started])
        for worker in started:
            counts.update(_received(worker))
    total = publisher.versions * publisher.size
    return Spread(
        number, len(workers), seconds,
        *(counts[each] / total for each in ("store", "peer", "object")),
    )  # fmt: skip


def _received(pipe: Connection) -> Any:
    if not pipe.poll(PATIENCE_S):
        raise UserError("nothing came from a process; its log says more")
    return pipe.recv()


Work = Callable[[Plan, Connection], Coroutine[Any, Any, None]]


@contextmanager
def _process(work: Work, plan: Plan) -> Iterator[Connection]:
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=_on_host, args=(work, plan, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()


def _on_host(work: Work, plan: Plan, pipe: Connection) -> None:
    plan.host.enter()
    asyncio.run(work(plan, pipe))


def policy_of(version: int) -> Policy:
    return Policy(version=version, weights_digest=f"{version:064x}")


async def publish(plan: Plan, pipe: Connection) -> None:
    """Publishes versions as the trainer does, each when it is told to."""
    settings, run, parent = plan.settings, plan.settings.run, None
    store = await _answering(settings)
    async with settings.connect_bus() as bus, settings.connect_index() as index:
        await bus.ensure_streams()
        for version in range(plan.versions + 1):
            policy = policy_of(version)
            data = adapter_blob(policy.weights_digest, plan.size if version else SMALL)
            weights = await store.put(weights_folder(run), data, suffix=".bin")
            record = CommitRecord(
                run=run, policy=policy, parent=parent, weights=weights, checkpoint=weights,
                worker="trainer",
            )  # fmt: skip
            if version:
                await asyncio.to_thread(pipe.recv)
            await commit(store, record)
            parent = record_digest(record.encode())
            await index.publish(Version(policy=policy, weights=weights))
            pipe.send(time.monotonic())
            await bus.publish(
                PolicyPublished(
                    policy=policy, weights=weights, worker="trainer", seconds=0.0, checksum=None
                )
            )
        await asyncio.sleep(PATIENCE_S)


async def _answering(settings: ServiceSettings) -> ObjectStore:
    """Returns the store, once it and NATS answer."""
    store = open_store(settings.store)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await store.write("ready", b"")
                async with settings.connect_bus():
                    return store
            except Unavailable:
                await asyncio.sleep(0.2)


@dataclass(slots=True)
class Looking:
    """A device that looks at the first bytes of weights, and does nothing else."""

    async def stage(self, weights: StoredTensors) -> StagedVersion:
        return Looked(digest_of(await head_of(weights)))


@dataclass(frozen=True, slots=True)
class Looked:
    digest: str

    async def adopt(self) -> None:
        pass


async def follow(plan: Plan, pipe: Connection) -> None:
    """Adopts each version as a rollout worker does, and tells when; at the end, what was read."""
    settings = plan.settings
    redis_url = settings.redis_url.get_secret_value()
    async with (
        host_cache(settings.cache, redis_url=redis_url, run=settings.run) as cache,
        settings.connect_bus() as bus,
        settings.connect_index() as index,
    ):
        store = replace(open_store(settings.store), cache=cache)
        worker = Worker("rollout", settings.worker, "waiting_for_trainer")
        device = cast("RolloutDevice", Looking())
        loader = PolicyLoader(device, WorkerContext(bus, store, worker), index)
        following = asyncio.create_task(loader.follow())
        for version in range(plan.versions + 1):
            while loader.newest < version:  # noqa: ASYNC110 -- it tells nobody
                await asyncio.sleep(LOOK_S)
            if not await loader.adopt(policy_of(version)):
                raise UserError(f"version {version} was passed over")
            if version:
                pipe.send(time.monotonic())
            else:
                pipe.send("ready")
                before = _counts()
        pipe.send({name: count - before[name] for name, count in _counts().items()})
        await following


def _counts() -> dict[str, float]:
    """Returns the bytes that this process has read, by source, and digested."""
    found = {
        name: SHARED_BYTES.labels(source=name)._value.get() for name in ("store", "peer", "cache")
    }
    return found | {"object": DIGESTED_BYTES.labels(of="object")._value.get()}

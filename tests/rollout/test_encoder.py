"""Encoders make the conditions of the batches to come, nearest first, and share the work."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.rollout.encoder import EncoderApp
from services.rollout.service import _encode
from shared.bus.bus import Bus
from shared.errors import ContractError, FaultyConditions, UserError
from shared.process.worker import Worker, WorkerContext
from shared.process.worker_process import WorkerProcess
from shared.recipe.recipe import Recipe, load_recipe, override
from shared.run.commits import commit, record_digest
from shared.run.conditions import forget_conditions, read_conditions
from shared.run.run_recipe import prompt_order
from shared.store import ObjectStore
from shared.store.folder import FolderBackend
from tests import examples
from tests.examples import ENCODING
from tests.paths import DIGITS
from tests.stored_recipe import store_recipe
from tests.waiting import until

GROUPS, AHEAD, STEPS = 3, 2, 20
WAIT_S = 20.0


@dataclass
class FakeEncoder:
    done: list[str] = field(default_factory=list)
    free: asyncio.Event = field(default_factory=asyncio.Event)
    seconds: float = 0.001
    refused: set[str] = field(default_factory=set)
    """Prompts that it cannot encode."""

    async def conditions(
        self, prompt: str, source: bytes | None = None, negative: str | None = None
    ) -> bytes:
        await self.free.wait()
        await asyncio.sleep(self.seconds)
        self.done.append(prompt)
        if prompt in self.refused:
            raise ContractError("the prompt cannot be encoded: no template")
        return prompt.upper().encode()


@dataclass
class Encoders:
    bus: Bus
    store: ObjectStore
    recipe: Recipe
    devices: list[FakeEncoder]
    workers: list[Worker]
    apps: list[EncoderApp]
    running: "list[asyncio.Task[None]]"
    parent: str | None = None

    @property
    def run(self) -> str:
        return self.recipe.run.name

    def prompts(self, *batches: int) -> list[str]:
        """Prompts of these batches, in the order of their groups."""
        order = prompt_order(self.recipe)
        groups = [(batch, group) for batch in batches for group in range(GROUPS)]
        return [order.of_group(batch, group, GROUPS).text for batch, group in groups]

    async def has(self, *batches: int) -> None:
        """Wait until everything that these batches need is stored."""
        async with asyncio.timeout(WAIT_S):
            for prompt in self.prompts(*batches):
                while (await self.stored(prompt)) is None:  # noqa: ASYNC110 -- it is a store
                    await asyncio.sleep(0.01)

    async def stored(self, prompt: str) -> bytes | None:
        found = await read_conditions(self.store, self.run, ENCODING.digest(prompt))
        return None if found is None else found.packed

    async def publish_version(self, number: int) -> None:
        record = examples.record(number, run=self.run, parent=self.parent)
        self.parent = record_digest(record.encode())
        await commit(self.store, record)
        await self.bus.publish(examples.published(number))


Start = Callable[..., AbstractAsyncContextManager[Encoders]]


@contextlib.asynccontextmanager
async def encoders(
    nats_url: str, folder: Path, *, workers: int = 1, started: int | None = None, **changes: Any
) -> AsyncIterator[Encoders]:
    """Encoders that work as soon as their ``free`` is set, beside a run without a commit."""
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(f"prompt {number}" for number in range(60)))
    given = {key.replace("__", "."): value for key, value in changes.items()}
    recipe = override(load_recipe(DIGITS), {
        "run.name": "test", "run.steps": STEPS, "batch.groups": GROUPS, "data.prompts": prompts,
        "encoder.workers": workers, "encoder.ahead": AHEAD, **given,
    })  # fmt: skip
    store = ObjectStore(FolderBackend(folder / "objects"))
    await store_recipe(store, recipe)
    async with contextlib.AsyncExitStack() as stack:
        made = Encoders(None, store, recipe, [], [], [], [])  # type: ignore[arg-type]
        for number in range(workers if started is None else started):
            name = f"encoder-{number}"
            bus = await stack.enter_async_context(Bus.connect(nats_url, run="test", name=name))
            await bus.ensure_streams()
            device, worker = FakeEncoder(), Worker("encoder", name, "waiting_for_trainer")
            app = EncoderApp(device, WorkerContext(bus, store, worker), recipe, ENCODING)
            made.bus = bus
            made.devices.append(device)
            made.workers.append(worker)
            made.apps.append(app)
            made.running.append(asyncio.create_task(app.run()))
        yield made
        for task in made.running:
            task.cancel()
        await asyncio.gather(*made.running, return_exceptions=True)


@pytest.fixture
def start(nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    monkeypatch.setattr("services.rollout.limits.IDLE_RECHECK_S", 0.1)
    return partial(encoders, nats_url, tmp_path)


@pytest.fixture
async def run(start: Start) -> AsyncIterator[Encoders]:
    async with start() as run:
        yield run


async def test_prompts_are_encoded_in_the_order_in_which_they_are_needed_and_no_further_ahead(
    run: Encoders,
) -> None:
    [device], [worker] = run.devices, run.workers
    device.free.set()
    await run.has(0, 1, 2)
    assert device.done == run.prompts(0, 1, 2), "before there is any version"
    assert await run.stored(device.done[0]) == device.done[0].upper().encode()
    await run.publish_version(0)
    await run.publish_version(1)
    await run.has(3)
    await asyncio.sleep(0.3)
    assert device.done == run.prompts(0, 1, 2, 3), "once each"
    assert (worker.num_done, worker.activity) == (4 * GROUPS, "waiting_for_trainer")


async def test_a_batch_that_is_over_is_left_for_the_newest(run: Encoders) -> None:
    await run.publish_version(0)
    run.devices[0].free.set()
    await run.has(0)
    run.devices[0].free.clear()
    for number in range(1, 6):
        await run.publish_version(number)
    await until(lambda: run.apps[0].newest == 5)
    begun = len(run.devices[0].done)
    run.devices[0].free.set()
    await run.has(5, 6, 7)
    skipped = {*run.prompts(3, 4)} - {*run.devices[0].done[: begun + 1]}
    assert not skipped & set(run.devices[0].done)


async def test_what_nobody_has_committed_is_not_believed(run: Encoders) -> None:
    run.devices[0].free.set()
    await run.has(0, 1, 2)
    await run.bus.publish(examples.published(9))
    await asyncio.sleep(0.3)
    assert run.devices[0].done == run.prompts(0, 1, 2)


async def test_several_encoders_share_the_work_and_one_is_enough_for_all_of_it(
    start: Start,
) -> None:
    async with start(workers=2, encoder__ahead=9) as run:
        for device in run.devices:
            device.seconds = 0.05
            device.free.set()
        batches = range(10)
        await run.has(*batches)
        one, other = (device.done for device in run.devices)
        wanted = run.prompts(*batches)
        assert {*one, *other} == set(wanted)
        assert min(len(one), len(other)) >= len(wanted) / 4
        assert len(one) + len(other) <= 1.35 * len(wanted), "few of them twice"
        run.running[0].cancel()
        await run.publish_version(0)
        await run.publish_version(1)
        await run.has(10)


async def test_encoders_of_one_name_find_shares_of_their_own(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.rollout.encoder.first_share", lambda name, number: 0)
    async with start(workers=2, encoder__ahead=9) as run:
        for device in run.devices:
            device.seconds = 0.05
            device.free.set()
        await run.has(*range(10))
        done = [len(device.done) for device in run.devices]
        assert sum(done) <= 1.35 * 10 * GROUPS, done


async def test_what_was_found_faulty_is_encoded_again(run: Encoders) -> None:
    run.devices[0].free.set()
    await run.has(0, 1, 2)
    prompt = run.prompts(1)[0]
    await forget_conditions(run.store, run.run, ENCODING.digest(prompt))
    await run.has(1)
    assert run.devices[0].done == [*run.prompts(0, 1, 2), prompt]


async def test_a_prompt_that_cannot_be_encoded_has_its_reason_stored_and_the_others_go_on(
    run: Encoders,
) -> None:
    [device] = run.devices
    prompt = run.prompts(0)[1]
    device.refused.add(prompt)
    device.free.set()
    await run.has(1, 2)
    with pytest.raises(FaultyConditions, match=r"cannot be encoded: no template"):
        await run.stored(prompt)
    device.refused.clear()
    await forget_conditions(run.store, run.run, ENCODING.digest(prompt))
    await run.has(0)


async def test_a_run_that_goes_on_longer_has_more_batches_to_encode(start: Start) -> None:
    async with start(run__steps=2) as run:
        run.devices[0].free.set()
        await run.has(0, 1)
        for number in range(3):
            await run.publish_version(number)
        await asyncio.sleep(0.3)
        assert run.devices[0].done == run.prompts(0, 1), "there is no batch 2"
        await store_recipe(run.store, override(run.recipe, {"run.steps": 3}))
        await run.has(2)


async def test_an_encoder_that_nobody_would_ask_says_which_key_to_set() -> None:
    process = SimpleNamespace(settings=None, recipe=load_recipe(DIGITS))
    with pytest.raises(UserError, match=r"^encoder\.workers: 0, .* set it to the number"):
        await _encode(cast(WorkerProcess, process))

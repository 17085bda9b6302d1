"""The services of one run as processes of the world: each begins as its command has it begin, with
emulated devices in place of networks."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bench.cluster.build import Emulation, Named, member_hosts, rollout_devices
from bench.cluster.generation import EmulatedEncoder
from bench.cluster.processes import ENCODING
from bench.cluster.scoring import EmulatedScorer
from services.reward.app import RewardApp
from services.reward.scorer import WeightedScorer
from services.rollout.app import RolloutApp
from services.rollout.encoder import EncoderApp
from services.scheduler.shell import service as scheduler_service
from services.trainer.fluid.member import MemberApp
from services.trainer.fluid.store_exchange import StoreExchange
from shared.devices.conditions import EncodedConditions
from shared.messages.workers import Device
from shared.process.settings import ServiceSettings
from shared.process.worker_process import WorkerProcess, WorkerService, run_worker
from shared.recipe.recipe import Recipe
from shared.run.previews import PreviewRule
from tests.world.members import counting_member

GIB = 1 << 30
RANKS = 2
"""Processes of a shard group."""

Work = Callable[[WorkerProcess], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Site:
    """What the services of a run have in common."""

    folder: Path
    emulation: Emulation
    recipe: Recipe
    num_groups: int
    """Members that are shard groups, which only train: the first ones."""
    flawed: set[tuple[str, int]] = field(default_factory=set)
    """Names of devices and the versions that they have made with other bits."""

    def names(self) -> list[str]:
        """Name all services of the run, schedulers apart."""
        setting = self.emulation.setting
        trainers = [each.name for host in member_hosts(setting) for each in host]
        rollout = [f"rollout-{number}" for number in range(setting.num_rollout)]
        encoders = [f"encoder-{number}" for number in range(setting.encoders)]
        return [*rollout, *encoders, "reward-0", "reward-1", *trainers]

    async def run(self, name: str, settings: ServiceSettings) -> None:
        """Be the service of that name until it ends."""
        if name.startswith("scheduler"):
            await scheduler_service.run(settings, self.recipe, recipe_folder=self.folder)
            return
        service, work = self._work(name)
        await run_worker(service, settings, work)

    def _work(self, name: str) -> tuple[WorkerService, Work]:
        service, _, number = name.partition("-")
        if service == "rollout":
            return "rollout", partial(self._generate, int(number))
        if service == "encoder":
            return "encoder", self._encode
        if service == "reward":
            return "reward", self._score
        hosts = member_hosts(self.emulation.setting)
        members = {each.name: each for host in hosts for each in host}
        is_group = name in list(members)[: self.num_groups]
        return "trainer", partial(self._be_member, members[name], is_group)

    def _encoded(self, process: WorkerProcess) -> EncodedConditions | None:
        setting = self.emulation.setting
        return EncodedConditions(process.store, setting.run, ENCODING) if setting.encoders else None

    async def _generate(self, number: int, process: WorkerProcess) -> None:
        device = rollout_devices(self.emulation)[number]
        registered = self.emulation.registered(device.kind, "rollout", concurrency=1)
        recipe = process.recipe
        async with (
            process.connect("waiting_for_trainer", registered) as context,
            process.settings.connect_index() as index,
        ):
            app = RolloutApp(
                device, context, index, max_staleness=recipe.schedule.staleness_limit,
                encoded=self._encoded(process), previews=PreviewRule.from_recipe(recipe),
            )  # fmt: skip
            await process.run(app.run(), context)

    async def _encode(self, process: WorkerProcess) -> None:
        async with process.connect("waiting_for_trainer", Device(memory_bytes=GIB)) as context:
            device = EmulatedEncoder(self.emulation.sizes)
            app = EncoderApp(device, context, process.recipe, ENCODING)
            await process.run(app.run(), context)

    async def _score(self, process: WorkerProcess) -> None:
        scorers = [WeightedScorer("emulated", 1.0, EmulatedScorer())]
        async with process.connect("waiting_for_rollout", Device(memory_bytes=GIB)) as context:
            await process.run(RewardApp(scorers, context).run(), context)

    async def _be_member(self, named: Named, is_group: bool, process: WorkerProcess) -> None:
        member = counting_member(
            self.emulation, named, process.recipe, _ready, is_group=is_group, flawed=self.flawed
        )
        generates = process.recipe.run_schedule.trainer_generates
        concurrency, ranks = int(generates), RANKS if is_group else 1
        registered = self.emulation.registered(
            named.kind, "trainer", concurrency=concurrency
        ).model_copy(update={"ranks": ranks})
        async with process.connect("waiting_for_rollout", registered) as context:
            exchange = StoreExchange(process.store, member.layout)
            app = MemberApp(
                member, member.generating, exchange, process.recipe, context,
                encoded=self._encoded(process),
            )  # fmt: skip
            await process.run(app.run(), context)


async def _ready() -> None:
    """All members of a world begin at once."""

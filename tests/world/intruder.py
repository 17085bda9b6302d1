"""Somebody who has stolen the key of one role, and does all that it lets him do.

What may come of it follows from docs/security.md. A role's key may harm what workers of the role
make, under their names (`HARMFUL`); in half of the worlds the intruder keeps to a name of its own,
and then nothing at all may come of it. A trainer's key may end and falsify the run, so it is always
used so. Whatever an intruder does,

    the store and NATS let it do nothing that its role may not
    nothing is lost or trained twice, and staleness, parents and stored versions are as ever
    a run that does not finish says why: it has failed, or a service that starts names the damage

and only where it uses names of others, or destroys what its role has stored, may a run not finish.
Where it answers for others with a key of `HARMFUL`, it chooses which samples, scores or
conditions are trained: digests and rewards are not compared with those of an undisturbed run.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from random import Random

import nats.errors
from nats.js.errors import APIError

from services.trainer.fluid.sums import StoredSum, SumPart
from shared.bus.bus import Bus
from shared.bus.marks import in_epoch
from shared.diffusion.sampling.tensors import pack
from shared.errors import DigenRLError
from shared.messages import subjects
from shared.messages.codec import decode, encode
from shared.messages.contracts import (
    FragmentGenerated,
    GenerateFragment,
    ObjectRef,
    Policy,
    PolicyPublished,
    Trajectories,
)
from shared.messages.rights import RIGHTS, WORKERS, Right, Role
from shared.messages.subjects import message_subject
from shared.messages.workers import Device, WorkerStatus
from shared.process.settings import ServiceSettings
from shared.run.layout import batch_folder
from shared.run.rights import WRITES
from shared.store import ObjectStore
from tests.storm.forged import STORED, foreign_keys, results
from tests.world.draws import RUN
from tests.world.loop import Process
from tests.world.nature import begun
from tests.world.world import World

NAME = "intruder"
ADDRESS = f"{NAME}-00000000"
BETWEEN_S = 0.1
"""Mean seconds between two things that it does."""
SENT_S = 0.5
"""Seconds in which NATS has answered a message that it stores."""
DIGEST = "a" * 64
NAMES = (
    "junk", "00000099.json.bak", "00000099/junk", "by/junk.json", "99999999999.json",
    f"00000099/{DIGEST}", f"{DIGEST}.safetensors", f"by/{DIGEST}.json", f"00000000/{DIGEST}.z",
    "00000000.json", "00000099/0.0.0", "wanted.json", "log/00000001.json",
    "a/records/00000099.json", "libraries.trainer.json",
)  # fmt: skip
"""Names that objects of a folder might have; most are none of its folder's."""
HARMFUL: tuple[Role, ...] = ("rollout", "reward", "encoder")
"""Roles whose key, used under names of others, may falsify what is trained."""
Act = Callable[[], Awaitable[None]]


@dataclass(slots=True, eq=False)
class Intruder:
    world: World
    role: Role
    violations: list[str] = field(default_factory=list)
    """What it was let do and may not."""
    random: Random = field(init=False)
    as_others: bool = field(init=False)
    """Whether it acts under names of others, too."""
    store: ObjectStore = field(init=False)
    process: Process = field(init=False)
    _tasks: list[GenerateFragment] = field(default_factory=list)
    _made: list[FragmentGenerated] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = self.world.random_of(NAME)
        self.as_others = self.role != "trainer" and self.random.random() < 0.5
        self.process = begun(self.world.drawn.seed, NAME, 0)
        self.store = self.world.open_store(self._settings.store)

    @property
    def is_harmful(self) -> bool:
        """Whether what is trained may be false."""
        return self.as_others and self.role in HARMFUL

    @property
    def _settings(self) -> ServiceSettings:
        return self.world.settings_of(NAME, self.role)

    async def live(self) -> None:
        while True:
            with contextlib.suppress(DigenRLError):
                async with self._settings.connect_bus() as bus, asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._learn(bus))
                    while True:
                        await asyncio.sleep(self.random.expovariate(1 / BETWEEN_S))
                        with contextlib.suppress(
                            DigenRLError, nats.errors.Error, APIError, OSError
                        ):
                            await self.random.choice(self._acts(bus))()

    def _acts(self, bus: Bus) -> list[Act]:
        def on(act: Callable[[Bus], Awaitable[None]]) -> Act:
            return lambda: act(bus)

        acts = [
            self._write_foreign, self._delete_foreign, self._write_odd,
            *map(on, (self._command, self._send_junk, self._answer, self._bury)),
        ]  # fmt: skip
        if self.role == "trainer":
            acts += [on(self._announce), self._forge_sum]
        if self.role == "rollout":  # a fragment is with a device for a moment only
            acts += [on(self._answer)] * 8
        if self.as_others:
            acts += [
                self._overwrite, self._delete_own,
                *map(on, (self._answer_for_others, self._answer_for_others, self._report)),
            ]  # fmt: skip
        return acts

    # --- the store ---

    def _objects(self, *, own: bool) -> list[str]:
        mine = tuple(f"{RUN}/{each}" for each in WRITES[self.role])
        under = self.world.bucket.objects.under(f"{RUN}/")
        return [key for key in under if key.startswith(mine) is own]

    async def _write_foreign(self) -> None:
        key = self.random.choice([*foreign_keys(RUN, self.role), *self._objects(own=False)])
        await self.store.write(key, b"{}")
        self.violations.append(f"a key of {self.role} has written {key}")

    async def _delete_foreign(self) -> None:
        if keys := self._objects(own=False):
            key = self.random.choice(keys)
            await self.store.delete([key])
            self.violations.append(f"a key of {self.role} has deleted {key}")

    async def _write_odd(self) -> None:
        folder = self.random.choice([e for e in WRITES[self.role] if not e.endswith(".json")])
        name = self.random.choice(NAMES[:5] if self.role == "trainer" else NAMES)
        await self.store.create(f"{RUN}/{folder}{name}", self._junk())

    async def _overwrite(self) -> None:
        if keys := self._objects(own=True):
            key, other = self.random.choice(keys), self.random.choice(keys)
            copied = await self.store.read(other)
            await self.store.write(key, self.random.choice((copied or b"", self._junk())))

    async def _delete_own(self) -> None:
        if keys := self._objects(own=True):
            await self.store.delete([self.random.choice(keys)])

    async def _forge_sum(self) -> None:
        """Store a sum of nothing as that of a fluid device, before the next exchange."""
        keys = self.world.bucket.objects.under(f"{RUN}/batches/")
        if told := [key for key in keys if "/exchange/" in key and "total" not in key]:
            batch, name = self.world.num_commits - 1, self.random.choice(told).rsplit("/", 1)[1]
            folder = batch_folder(RUN, batch)
            forged = await self.store.put(folder, pack({}), suffix=".sum.safetensors")
            of_nothing = StoredSum(parts=(SumPart(ref=forged, ranges=()),))
            said = self.random.choice((self._junk(), of_nothing.model_dump_json().encode()))
            await self.store.write(f"{folder}/exchange/0.0/{name}", said)

    def _junk(self) -> bytes:
        return self.random.choice((b"", b"{}", b"[1]", self.random.randbytes(40)))

    # --- NATS ---

    async def _learn(self, bus: Bus) -> None:
        """Read what the role may read, and remember tasks and results of others."""
        readable = [each.stream for each in RIGHTS if self.role in each.readers and each.stream]
        for stream in (subjects.TASK, subjects.TRAJ):
            if stream in readable:
                async for received in bus.follow(stream):
                    if isinstance(received.message, GenerateFragment):
                        self._tasks.append(received.message)
                    if isinstance(received.message, FragmentGenerated):
                        self._made.append(received.message)
                        self._tasks.append(_task_of(received.message))

    async def _command(self, bus: Bus) -> None:
        """Send what others may send: commands, marks of a foreign epoch, announcements."""
        foreign = [each for each in RIGHTS if self.role not in each.publishers and each.stream]
        right = self.random.choice(foreign)
        subject = self.random.choice((_subject(right), f"dg.{RUN}.task.epoch.99"))
        data = self._junk()
        if self._tasks and right.kind is GenerateFragment:
            task = self.random.choice(self._tasks)
            subject, data = message_subject(RUN, task), encode(task)
        await bus.jetstream.publish(subject, data, timeout=SENT_S, headers=in_epoch(99))
        self.violations.append(f"a key of {self.role} has sent {subject}")

    async def _send_junk(self, bus: Bus) -> None:
        """Send bytes that are no message, and messages of others under an own subject."""
        mine = [each for each in RIGHTS if self.role in each.publishers and each.stream]
        if mine:
            task = encode(self.random.choice(self._tasks)) if self._tasks else b""
            data = self.random.choice((self._junk(), task))
            subject = _subject(self.random.choice(mine))
            await bus.jetstream.publish(subject, data, timeout=SENT_S, headers=in_epoch(99))

    async def _bury(self, bus: Bus) -> None:
        """Send to the dead letters what nobody could not read."""
        readable = [each.stream for each in RIGHTS if self.role in each.readers and each.stream]
        if readable:
            stream, number = self.random.choice(readable), self.random.randrange(200)
            subject = f"dg.{RUN}.quarantine.{stream.name}.{number}"
            await bus.jetstream.publish(subject, self._junk(), timeout=SENT_S)

    async def _answer(self, bus: Bus) -> None:
        """Finish, fail and give back what was given to others, under a name of its own."""
        if self._tasks:
            task, other = self.random.choice(self._tasks[-8:]), self.random.choice(self._tasks)
            stored = await self._stored_of(bus, other)
            await self._send_results(bus, task, ADDRESS, stored or STORED)

    async def _answer_for_others(self, bus: Bus) -> None:
        """Answer in the name of who has the task, with what was made of another one."""
        if not self._tasks:
            return
        task, other = self.random.choice(self._tasks[-8:]), self.random.choice(self._tasks)
        stored = await self._stored_of(bus, other)
        if self.role in ("rollout", "trainer", "reward"):
            await self._send_results(bus, task, task.worker, stored or STORED)

    async def _stored_of(self, bus: Bus, task: GenerateFragment) -> Trajectories | None:
        """Look at the result of a task, as who finds a slot taken does."""
        for made in self._made:
            if made.fragment == task.fragment:
                return made.stored
        if self.role in ("rollout", "trainer"):
            subject = message_subject(RUN, task).replace(".task.", ".traj.")
            found = await bus.jetstream.get_last_msg(subjects.TRAJ.name, subject)
            message = decode(found.data or b"")
            if isinstance(message, FragmentGenerated):
                self._made.append(message)
                return message.stored
        return None

    async def _send_results(
        self, bus: Bus, task: GenerateFragment, name: str, stored: Trajectories
    ) -> None:
        message = self.random.choice(results(self.role, task, name, stored))
        subject = message_subject(RUN, message)
        with contextlib.suppress(nats.errors.TimeoutError):  # refused, or NATS is away
            await bus.jetstream.publish(subject, encode(message), timeout=SENT_S)

    async def _announce(self, bus: Bus) -> None:
        """Announce a version that was never committed."""
        weights = ObjectRef(key=f"{RUN}/weights/{DIGEST}.safetensors", sha256=DIGEST, size=1)
        number = self.world.num_commits + self.random.choice((-1, 0, 1))
        policy = Policy(version=max(0, number), weights_digest=DIGEST)
        said = PolicyPublished(
            policy=policy, weights=weights, worker=ADDRESS, seconds=0.0, checksum=None
        )
        await bus.jetstream.publish(message_subject(RUN, said), encode(said), timeout=SENT_S)

    async def _report(self, bus: Bus) -> None:
        """Say to be a worker of the role that was started again."""
        names = [name for name, each in self.world.services.items() if each.role == self.role]
        if self.role in WORKERS and names:
            worker = self.random.choice(names)
            address = f"{worker}-{self.random.randbytes(4).hex()}"
            await bus.send(
                WorkerStatus(
                    service=self.role, worker=worker, address=address,  # type: ignore[arg-type]
                    activity="waiting_for_trainer", device=Device(concurrency=1),
                )
            )  # fmt: skip


@contextlib.contextmanager
def intrusion(world: World) -> Iterator[Intruder | None]:
    """Have the intruder of this seed, if there is one, at work in the block."""
    role = world.drawn.intruder
    if role is None:
        yield None
        return
    intruder = Intruder(world, role)
    world.say(f"intruder {role} as {'others' if intruder.as_others else 'itself'}")
    intruder.process.start(intruder.live())
    yield intruder
    intruder.process.kill()


def _task_of(made: FragmentGenerated) -> GenerateFragment:
    """Return the task that a result answers."""
    return GenerateFragment(
        fragment=made.fragment, policy=made.policy, prompt=made.prompt, window_start=0,
        worker=made.worker,
    )  # fmt: skip


def _subject(right: Right) -> str:
    """Return a subject of a kind of message, in the intruder's own name."""
    words = right.subject.split(".")
    words[1] = RUN
    filled = [each if each != "*" else "99" if words[2] == "fluid" else ADDRESS for each in words]
    tail = {"task": 5, "traj": 5, "rew": 5, "grad": 4, "part": 4}.get(words[2])
    if filled[-1] != ">":
        return ".".join(filled)
    numbers = [str(number) for number in range((tail or 4) - 1)]
    return ".".join([*filled[:-1], *([ADDRESS] if tail else []), *numbers])

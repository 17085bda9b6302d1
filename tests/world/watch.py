"""The clients that observe a world, drawn from its seed, and the verdict on what they were told."""

import asyncio
import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from tests.world import observers, seen
from tests.world.companions import serve_events
from tests.world.draws import RUN
from tests.world.nature import begun
from tests.world.observers import Observer
from tests.world.seen import Observation
from tests.world.world import PORTS, World

PAGE = 9000
LATE_S = 25.0
"""Seconds after a commit by which nobody is told an older step."""
READ_S = range(2, 9)
"""Seconds in which a reader of events has read all, at least and at most."""
READERS = ("program", "browser")
FOLLOWS_S = 60.0
"""Seconds after the last commit in which a follower ends: it may wait 30 s for a scheduler that
hangs."""
COMMIT = re.compile(r"([\d.]+) \S+ (?:create|write) world/commits/(\d{8})\.json$")


@dataclass(slots=True)
class Watch:
    world: World
    seen: list[Observation] = field(default_factory=list)
    tasks: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)

    def start(self) -> None:
        """Start the observers of this seed: each costs 20 to 60 ms."""
        world, random = self.world, self.world.random_of("observers")
        kinds: dict[str, Callable[[Observer], Coroutine[Any, Any, None]]] = {
            "up": observers.follow_as_up,
            "watch": observers.follow_as_watch,
            "poll": lambda each: observers.poll(each, every_s=2.0),
            "status": lambda each: observers.poll(each, every_s=5.0, whole=True),
            "program": observers.read_events,
            "browser": observers.read_events_as_browser,
        }
        settings = world.settings_of("page", "client", PAGE)
        schedulers = [f"http://127.0.0.1:{PORTS[name]}" for name in world.services if name in PORTS]
        store = world.open_store(settings.store)
        self._begin("page", serve_events(world.web, settings, store, schedulers[0]))
        for name, observe in kinds.items():
            url = random.choice(schedulers)
            if random.random() < 0.4:
                url = f"http://127.0.0.1:{PAGE}" if name in READERS else url
                self._begin(name, observe(Observer(name, url, self.seen.append)))

    async def settle(self) -> None:
        """Wait until followers have ended, for as long as they may take, and readers have read."""
        followers = [self.tasks[name] for name in ("up", "watch") if name in self.tasks]
        if followers:
            await asyncio.wait(followers, timeout=FOLLOWS_S)
        await asyncio.sleep(READ_S.start)
        readers = [name for name in READERS if name in self.tasks]
        for _ in READ_S:
            stored = await observers.stored_events(self.world.judging, RUN)
            if not seen.events_out_of_order(self.seen, stored, alive=readers):
                break
            await asyncio.sleep(1.0)

    def _begin(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        process = begun(self.world.drawn.seed, name, 0)
        process.at_death.append(lambda: self.world.web.kill(name))
        self.tasks[name] = process.start(work)

    async def violations(self) -> list[str]:
        """Return what observers were told that is not so, once they have settled."""
        world, log = self.world, self.seen
        times: dict[int, float] = {}
        for found in filter(None, map(COMMIT.match, world.log)):
            if int(found[2]) <= world.drawn.setting.steps:  # whoever may, stores others beside
                times.setdefault(int(found[2]), float(found[1]))
        commits = [times[version] for version in sorted(times)]
        finished = commits[-1] if world.is_finished else float("inf")
        stored = await observers.stored_events(world.judging, RUN)
        return [
            *seen.steps_that_go_back(log), *seen.ends_that_are_taken_back(log),
            *seen.letters_that_go_back(log), *seen.server_errors(log),
            *seen.steps_against_commits(log, commits, late_s=LATE_S),
            *seen.events_out_of_order(log, stored, alive=READERS),
            *seen.late_followers(
                log, finished=finished, now=world.loop.now, patience_s=FOLLOWS_S
            ),
            *world.web.errors, *map(_end, filter(_has_failed, self.tasks.values())),
        ]  # fmt: skip


def _has_failed(task: "asyncio.Task[None]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None


def _end(task: "asyncio.Task[None]") -> str:
    return f"{task.get_name()} ended: {task.exception()!r}"

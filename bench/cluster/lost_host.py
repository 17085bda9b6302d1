"""What a host costs that dies in mid-run and comes back: a row's services, one host of which is
killed in the middle of a batch and started anew at once, as a supervisor would.

    python -m bench lost-host qwen-image-32-on-policy

Only emulated seconds are scaled. The host is missed when its devices join again, or after 5 s of
silence, and a process takes seconds to start: these are as long as in a real run, so that at a
scale of 4 they cost four times as much of a batch. Both figures are given.
"""

import asyncio
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from bench.cluster.processes import MEMBERS
from bench.cluster.session import started
from bench.cluster.setting import Setting
from bench.runner.session import Session
from shared.errors import UserError

WARM_UP = 2
"""Batches until costs are known, and the size of fragments is chosen."""
AFTER = 3
"""Batches after the one in which the host dies: until all is as it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostHost:
    """Seconds are those of the emulation: multiply by the scale."""

    host: str
    scale: float
    batch_seconds: list[float]
    """Seconds of every batch, from commit to commit."""
    struck: int
    """Place among them of the batch in which the host dies."""
    lost_after: float
    """Seconds from that batch's opening to the host's death."""

    @property
    def usual_seconds(self) -> float:
        """Median of the batches after warm-up that the death has not touched."""
        return median([*self.batch_seconds[WARM_UP : self.struck], *self.batch_seconds[-1:]])

    @property
    def lost_seconds(self) -> float:
        """How much longer the struck batch, and all after it, took than they usually do."""
        late = self.batch_seconds[self.struck :]
        return sum(late) - len(late) * self.usual_seconds


async def measure(session: Session, setting: Setting, *, part: float = 0.5) -> LostHost:
    """Kill the last host of members when ``part`` of a batch has passed.

    Raises:
        UserError: if the setting has no two hosts of members.
    """
    if setting.num_member_hosts < 2:
        raise UserError("row: a host is lost of two or more with fluid devices; name a fluid row")
    session.num_runs += 1
    struck = 2 * WARM_UP  # as many batches as before tell what is usual
    last = struck + 1 + AFTER
    update = {"run": f"{setting.run}-{session.num_runs}", "steps": last + 1}
    setting = setting.model_copy(update=update)
    host = f"{MEMBERS}{setting.num_member_hosts - 1}"
    killed, tasks = list[float](), list[asyncio.Task[None]]()
    async with started(session, setting, session.new_folder(setting.run)) as watch:
        watch.may_die.add(host)

        async def kill(after: float) -> None:
            await asyncio.sleep(after)
            process = watch.services.children[host].process
            assert process is not None
            process.send_signal(signal.SIGKILL)
            killed.append(time.monotonic())

        def note(version: int) -> None:
            if version == struck:
                usual = median(_differences(watch.commits[WARM_UP:]))
                tasks.append(asyncio.create_task(kill(part * usual)))

        await watch.follow(0, last, note, streams=False)
        commits = watch.commits
    return LostHost(
        host=host, scale=setting.scale, batch_seconds=_differences(commits[: last + 1]),
        struck=struck, lost_after=killed[0] - commits[struck],
    )  # fmt: skip


def _differences(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]

"""Devices behind a line in `digenrl plan`: what they do, what crosses, and what they gain.

The best split of each mode at home is simulated with the sites, and without each of them. Devices
of a site generate; with fluid members they also train in another simulation, and the faster counts.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from digenrl.planning.hosts import parse_hosts
from digenrl.planning.planner import PlanResult
from digenrl.planning.work import seconds_words
from services.scheduler.costs.capacity import fits
from services.scheduler.costs.profile import Profile
from services.scheduler.sim.measured import SimulationResult
from services.scheduler.sim.profiled import simulate
from services.scheduler.sim.sites import Site, SiteUse
from shared.errors import UserError
from shared.messages.records import HOME, token
from shared.models.catalogue import latent_shape
from shared.models.published import find_configuration
from shared.recipe.recipe import Recipe
from shared.run.retention import batch_bytes

MBIT = 1e6 / 8
"""Bytes."""
EXAMPLE = "NAME:KIND=COUNT@UP/DOWN,RTTms in Mbit/s, e.g. lab:a100=16@100/100,40ms"
SITE = re.compile(
    r"(?P<name>[^:]*):(?P<devices>[^@]*)@(?P<up>[^/]*)/(?P<down>[^,]*),(?P<rtt>.*)(?i:ms)"
)
PACKED_SHARE = 0.5
"""Bytes of media that are packed without loss, over their pixels'."""
BATCHES = 2


@dataclass(frozen=True, slots=True)
class SiteAdvice:
    """Work of a site, and the seconds of a step with all sites and without this one."""

    site: Site
    use: SiteUse
    declines: str
    """Work that its devices do not get, and why; empty if they get all."""
    step_seconds: float
    seconds_without: float

    def fields(self) -> dict[str, Any]:
        """Return this for programs, with bytes and seconds."""
        return {
            "site": asdict(self.site), "per_step": self.use._asdict(),
            "declines": self.declines,
            "step_seconds": self.step_seconds, "seconds_without": self.seconds_without,
        }  # fmt: skip

    def __str__(self) -> str:
        site, use = self.site, self.use
        work = [f"generate {use.samples:.0f} samples"] if use.samples else []
        work += ["train"] if use.sums else []
        does = "; ".join(each for each in (" and ".join(work), self.declines) if each)
        return (
            f"site {site.name}: {site.count} {site.kind} behind {site.up / MBIT:.9g}/"
            f"{site.down / MBIT:.9g} Mbit/s, {2e3 * site.delay:g} ms, "
            f"{does}; in a step {use.up / 1e6:,.0f} MB leave "
            f"and {use.down / 1e6:,.0f} MB come; {seconds_words(self.step_seconds)} s/step, "
            f"{seconds_words(self.seconds_without)} without it"
        )


def parse_sites(texts: Sequence[str], profile: Profile) -> list[Site]:
    """Parse texts like ``lab:a100=16@100/100,40ms``.

    Raises:
        UserError: names the part and the remedy.
    """
    sites: dict[str, Site] = {}
    for text in texts:
        part = SITE.fullmatch(text.strip())
        if part is None:
            raise UserError(f"--site: {text!r} is not {EXAMPLE}")
        name = token(part["name"].strip(), field="--site")
        if name in (HOME, *sites):
            own = " (--devices and --hosts are at home)" if name == HOME else ""
            raise UserError(f"--site: {name} is given twice{own}; give each site a name of its own")
        devices = parse_hosts("--site", part["devices"], profile, host_gpus=1).devices
        if len(devices) > 1:
            raise UserError(f"--site: {name} has several kinds; give each kind as a site")
        up, down = (_number(part[way], "rate", text) * MBIT for way in ("up", "down"))
        delay = _number(part["rtt"], "round trip", text) / 2e3
        [(kind, count)] = devices.items()
        sites[name] = Site(name=name, kind=kind, count=count, up=up, down=down, delay=delay)
    return list(sites.values())


def _number(word: str, what: str, text: str) -> float:
    number = float(word) if re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*", word) else 0.0
    if not 0 < number < math.inf:
        words = f"the {what} {word!r} is not a decimal number above 0"
        raise UserError(f"--site: {text!r}: {words}; give {EXAMPLE}")
    return number


def advise_sites(
    planned: PlanResult, recipe: Recipe, sites: Sequence[Site]
) -> tuple[SiteAdvice, ...]:
    """Simulate the sites.

    Raises:
        UserError: if a site's devices cannot hold the model.
    """
    profile = planned.profile
    for site in sites:
        if (reason := fits(profile, site.kind, "rollout")) is not None:
            raise UserError(f"--site: {site.name}: {reason}")
    whole = best_step(planned, recipe, sites)
    without = (
        best_step(planned, recipe, [other for other in sites if other is not each])
        for each in sites
    )
    return tuple(
        SiteAdvice(
            site, whole.sites[site.name], whole.declines[site.name], whole.step_seconds,
            other.step_seconds,
        )
        for site, other in zip(sites, without, strict=True)
    )  # fmt: skip


def best_step(planned: PlanResult, recipe: Recipe, sites: Sequence[Site]) -> SimulationResult:
    """Simulate the best split of each mode with these sites, and return the fastest."""
    first = {choice.schedule.mode: choice for choice in reversed(planned.choices)}
    candidates = (
        simulate(
            planned.profile, rollout=choice.split.rollout, trainer=choice.split.trainer,
            schedule=recipe.run_schedule.changed(
                mode=mode, max_staleness=choice.schedule.max_staleness
            ),
            sites=each, sample_bytes=sample_bytes(recipe), batches=BATCHES, seed=None,
        )
        for mode, choice in first.items() for each in _in_roles(planned.profile, mode, sites)
    )  # fmt: skip
    return min(candidates, key=lambda each: each.step_seconds)


def _in_roles(profile: Profile, mode: str, sites: Sequence[Site]) -> Iterator[Sequence[Site]]:
    yield sites
    able = [fits(profile, site.kind, "member") is None for site in sites]
    if mode == "fluid" and any(able):
        yield [replace(site, trains=may) for site, may in zip(sites, able, strict=True)]


def sample_bytes(recipe: Recipe) -> int:
    """Return the bytes of a stored sample: its states and its media. Conditions are stored once for
    a prompt of a run."""
    model, batch = recipe.model, recipe.batch
    folder = find_configuration(model.folder, model.name).folder
    shape = latent_shape(folder, height=model.height, width=model.width, frames=model.frames)
    states = batch_bytes(recipe, shape) / batch.groups / batch.group_size
    share = PACKED_SHARE if recipe.rollout.media == "lossless" else 1.0
    return round(states + share * 3 * model.height * model.width * model.frames)

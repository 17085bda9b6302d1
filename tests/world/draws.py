"""What a seed stands for: a run, where it lives, and how often something fails."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

from bench.cluster.setting import Setting, recipe_of, write_prompts
from shared.learning.algorithms import DEFAULT
from shared.messages.rights import Role
from shared.recipe.recipe import Recipe, override
from shared.recipe.schedule import RunSchedule
from tests.profile.tiny import tiny_profile
from tests.storm.small import NAME as LAGGING

RUN = "world"
PROMPTS = 64
INTRUDERS: tuple[Role, ...] = ("rollout", "reward", "client", "encoder", "trainer")
SHARES = (0, 1, 1, 2, 8)
"""How much a seed favours a kind of fault; one that lacks some kinds reaches other states."""
Mode = Literal["disaggregated", "sequential", "colocated"]
PATIENT = 0.25
"""Share of seeds in which no deadline of seconds makes good what nobody else would."""
FOLLOWED = 0.2
"""Share of the seeds in which an old policy samples."""
SHARED = 0.3
"""Share of the seeds in which some members are shard groups, which only train."""
FAR = 0.12
"""Share of seeds in which some devices are at a site behind slow lines."""
FAR_DEVICES = 0.4
SLOW_LINES = (1e-4, 1e-3)
"""Seconds per byte: weights take .4 to 4 s."""
FAULTLESS = 0.05
"""Share of seeds without faults: what stands still in calm weather is found there at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    seed: int
    setting: Setting
    changes: Mapping[str, Any]
    """Keys of the recipe."""
    updates: int
    """Optimizer steps per batch."""
    lags: bool
    """Whether an old policy samples."""
    standby: bool
    """Whether there is a second scheduler."""
    slowest_message: float
    """Seconds that bytes take to a broker, or from it, at most."""
    slowest_request: float
    """Seconds that the store takes for a request, at most."""
    between_faults: float
    """Mean seconds."""
    fault_seconds: float
    """Seconds after which nothing fails any more."""
    num_groups: int
    """Members that are shard groups: the first ones."""
    has_slow_lines: bool
    """Whether some devices are at a site behind slow lines."""
    intruder: Role | None
    """Role whose key somebody has stolen."""

    def seconds_per_byte(self, name: str) -> float:
        """Return how slow the line of a process is, in both directions; 0 for one at home."""
        random = Random(f"{self.seed}/line/{name}")
        is_device = name.startswith(("rollout", "trainer"))
        if not (self.has_slow_lines and is_device and random.random() < FAR_DEVICES):
            return 0.0
        return random.uniform(*SLOW_LINES)

    def recipe(self, folder: Path) -> Recipe:
        return override(recipe_of(self.setting, folder), dict(self.changes))


def prepare(folder: Path) -> None:
    """Write what all runs read: prompts, and a model that nobody opens."""
    write_prompts(folder, PROMPTS)
    (folder / "no-model").mkdir(exist_ok=True)
    (folder / "no-model" / "model_index.json").write_text("{}")


def draw(seed: int, folder: Path) -> Draw:
    random = Random(f"{seed}/draw")
    is_fluid = random.random() < 0.45
    updates = random.choice((1, 1, 2))
    staleness: Literal[0, 1] = random.choice((0, 0, 1))
    setting = _setting(random, folder, is_fluid, staleness)
    if Random(f"{seed}/patience").random() < PATIENT:
        schedule = setting.schedule.model_copy(update={"slot_deadline_s": "auto"})
        setting = setting.model_copy(update={"schedule": schedule})
    lags = Random(f"{seed}/policy").random() < FOLLOWED
    changes: dict[str, Any] = {
        "trainer.updates": updates,
        "algorithm.name": LAGGING if lags else DEFAULT,
        "algorithm.nft_decay": int(lags),
        "run.keep_last": random.choice((1, 2, 3)),
        "trainer.deterministic": setting.schedule.deterministic,
    }
    calm = random.random() < FAULTLESS
    return Draw(
        seed=seed,
        setting=setting,
        changes=changes,
        updates=updates,
        lags=lags,
        standby=random.random() < 0.3,
        slowest_message=random.choice((0.002, 0.002, 0.02, 0.2)),
        slowest_request=random.choice((0.002, 0.01, 0.1)),
        between_faults=random.uniform(0.5, 4.0),
        fault_seconds=0.0 if calm else random.uniform(2.0, random.choice((8.0, 15.0, 30.0))),
        num_groups=_num_groups(seed, setting.num_trainer),
        has_slow_lines=Random(f"{seed}/remote").random() < FAR,
        intruder=random.choice(INTRUDERS) if random.random() < 0.25 else None,
    )


def _num_groups(seed: int, most: int) -> int:
    random = Random(f"{seed}/groups")
    return random.randint(1, most) if random.random() < SHARED else 0


def _setting(random: Random, folder: Path, is_fluid: bool, staleness: Literal[0, 1]) -> Setting:
    groups = random.choice((2, 4, 4, 6))
    merged = not is_fluid and random.random() < 0.2
    shape = {"shared_steps": 2.0, "merged_steps": 1} if merged else {}
    profile = tiny_profile(folder, groups=groups, **shape)
    trainers = random.choice((1, 2, 2, 3) if is_fluid else (1, 1, 2))
    deterministic = random.random() < 0.4
    modes: tuple[Mode, ...] = (*("disaggregated",) * 8, "sequential", "colocated")
    setting = Setting(
        run=RUN,
        profile=str(profile),
        rollout=_rollout(random, is_fluid),
        trainer={"H100": trainers},
        encoders=random.choice((0, 0, 0, 1)),
        scale=random.choice((10.0, 30.0, 30.0, 100.0)),
        steps=random.randint(2, 5),
        seed=random.randrange(1000),
        schedule=RunSchedule(
            mode="fluid" if is_fluid else random.choice(modes),
            deterministic=deterministic,
            fragment_size=random.choice(("auto", "auto", 1, 2, 4)),
            tag=random.choice(("auto", "off", 1, 2)),
            max_staleness=staleness,
            slot_deadline_s=random.choice((5.0, 15.0)),
        ),
        host_devices=random.choice((1, 8)),
        shard_bytes=random.choice((2_000, 1 << 20)),
    )  # fmt: skip
    colocated = setting.schedule.mode == "colocated"
    return setting.model_copy(update={"rollout": {}}) if colocated else setting


def _rollout(random: Random, is_fluid: bool) -> dict[str, int]:
    """Fluid devices may have workers that only generate; other modes need one at least."""
    kinds = ("H100", "H20", "A100")
    number = random.choice((0, 0, 1)) if is_fluid else random.choice((1, 2, 2, 3))
    found: dict[str, int] = {}
    for _ in range(number):
        kind = random.choice(kinds)
        found[kind] = found.get(kind, 0) + 1
    return found

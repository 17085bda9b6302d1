"""Rows of the tables: a model on some hosts, on-policy or one step ahead, each with a recipe.

Hosts are as `digenrl check --hosts` takes them. What a row's recipe says is here, and its file in
`bench/recipes` is made from it (`python -m bench recipes`).
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from bench.cluster.case import Case
from bench.cluster.modes import Chosen
from bench.cluster.request import WORKLOADS
from bench.cluster.setting import row_profile
from digenrl.planning.hosts import parse_hosts
from digenrl.planning.runnable import HOST_GPUS
from services.scheduler.costs.floor import floor_seconds
from services.scheduler.costs.profile import Profile, load_profile
from services.scheduler.costs.split import Split
from shared.recipe.recipe import Recipe, load_recipe

RECIPES = Path(__file__).parents[1] / "recipes"
Way = Literal["on-policy", "one-step"]
Keys = dict[str, dict[str, Any]]
"""Table -> key -> value."""

POOLS = {
    "32": "h100x8*4",
    "64": "h100x8*8",
    "16-a100-16": "h100x8*2+a100x8*2",
    "16-h20-16": "h100x8*2+h20x8*2",
    "16-l40s-16": "h100x8*2+l40sx8*2",
    "8": "h100x8",
}
"""What rows are called by -> their hosts."""
BATCH_SECONDS: dict[Way, float] = {"on-policy": 7.0, "one-step": 6.0}
"""Seconds that an emulated batch takes at its best. Messages and fsync take as many milliseconds as
in a real run; on-policy they lie between two batches, where no other work hides them."""
AS_MANY = 32
"""Devices from which a batch takes longer in proportion: all of them stand on the same cores."""
UNLIKE = 2.0
"""Times as long on-policy if devices are unlike: the last pieces of a batch are more, and smaller,
and each waits for its messages."""
LONGER = 2.0
"""Times as long on-policy if a real batch takes minutes: a millisecond counts 15 to 72 times even
then."""
MINUTES = 200.0
"""Seconds that such a batch takes at least."""
SLOWLY = ("hunyuan-32-one-step", "hunyuan-64-on-policy", "wan-64-on-policy")
"""Rows whose emulated batches take twice as long: a batch of 4 to 14 minutes is so near to its
floor that this machine's messages, which count `scale` times, decided the figure."""
BASES = {
    "qwen-image": "qwen-image",
    "flux": "flux1-dev.32-gpu",
    "wan": "wan2.1-14b.32-gpu",
    "hunyuan": "hunyuanvideo.32-gpu",
}
"""Workload -> the shipped recipe, of which rows change devices, staleness and placement only."""
ENCODED_ON_CPU = {"workers": 1, "threads": 16, "device": "cpu"}
SMALL: dict[str, Keys] = {
    "qwen-image": {
        "rollout": {"workers": 16},
        "trainer": {"devices": 16},
        "schedule": {"fragment_size": 8},
    },
    "flux": {"encoder": ENCODED_ON_CPU},
    "wan": {"encoder": ENCODED_ON_CPU},
    "hunyuan": {},
}
"""What lets L40S take part, with eight rows of FLUX.1 a pass: text encoders elsewhere, and, if it
cannot train, it only generates. A device whose weights come from its host takes as long for one
sample as for five, and "auto" learns one overhead for all devices: of unlike ones the size is
better said."""
STREAMED = {"qwen-image": ("L40S",)}
"""Workload -> kinds whose workers have DIGENRL_ROLLOUT_MEMORY=streamed, where they are too small
for the network."""


@dataclass(frozen=True)
class Row:
    workload: str
    pool: str
    way: Way

    @property
    def name(self) -> str:
        return f"{self.workload}-{self.pool}-{self.way}"

    @property
    def hosts(self) -> str:
        return POOLS[self.pool]

    @property
    def path(self) -> Path:
        return RECIPES / f"{self.name}.toml"

    @property
    def streamed(self) -> tuple[str, ...]:
        kinds = STREAMED.get(self.workload, ())
        return tuple(kind for kind in kinds if kind in self.devices)

    @property
    def keys(self) -> Keys:
        """What the recipe says beyond the one that it is based on."""
        found: Keys = {
            "run": {"name": self.name},
            "trainer": {"devices": sum(self.devices.values())},
            "schedule": {"max_staleness": 1} if self.way == "one-step" else {},
        }
        small = SMALL[self.workload] if "L40S" in self.devices else {}
        for table, keys in small.items():
            found[table] = {**found.get(table, {}), **keys}
        return found

    @cached_property
    def devices(self) -> dict[str, int]:
        hosts = parse_hosts("hosts", self.hosts, self._profile, host_gpus=HOST_GPUS)
        return hosts.devices

    @cached_property
    def recipe(self) -> Recipe:
        return load_recipe(self.path)

    @property
    def profile(self) -> Profile:
        """The profile's costs, with the memory that the recipe takes."""
        return row_profile(self._profile, self.recipe, self.streamed)

    @property
    def split(self) -> Split:
        """The fastest are members, and the rest generate, as `digenrl check` has it."""
        members, left = {}, self.recipe.trainer.devices
        speeds = self._profile.devices
        for kind in sorted(self.devices, key=lambda kind: -speeds[kind].training_speed):
            members[kind] = min(left, self.devices[kind])
            left -= members[kind]
        rollout = {kind: n - members[kind] for kind, n in self.devices.items()}
        return Split(
            {kind: n for kind, n in rollout.items() if n},
            {kind: n for kind, n in members.items() if n},
        )

    @property
    def command(self) -> str:
        """Checks the recipe on these hosts."""
        streamed = f" --streamed {','.join(self.streamed).lower()}" if self.streamed else ""
        return f"digenrl check bench/recipes/{self.path.name} --hosts '{self.hosts}'{streamed}"

    def case(self, *, rounds: int, batches: int, one_step_batches: int) -> Case:
        mode = Chosen(self.way, self.split, self.recipe.run_schedule)
        return Case(
            profile=self.profile, devices=self.devices, modes=(mode,), rounds=rounds,
            scale=self.scale, batches=batches,
            one_step_batches=one_step_batches, recipe=self.path, streamed=self.streamed,
        )  # fmt: skip

    @property
    def batch_seconds(self) -> float:
        """Seconds that an emulated batch takes at its best."""
        seconds = BATCH_SECONDS[self.way]
        if self.way == "on-policy":
            seconds *= LONGER if self.floor_seconds > MINUTES else 1.0
            seconds *= UNLIKE if len(self.devices) > 1 else 1.0
        if self.name in SLOWLY:
            seconds *= LONGER
        return seconds * max(1.0, sum(self.devices.values()) / AS_MANY)

    @property
    def scale(self) -> float:
        """How many times faster than real it is run."""
        return round(max(1.0, self.floor_seconds / self.batch_seconds), 2)

    @property
    def floor_seconds(self) -> float:
        return floor_seconds(self.profile, self.devices)

    @property
    def _profile(self) -> Profile:
        return load_profile(WORKLOADS[self.workload])


WAYS: tuple[Way, ...] = ("on-policy", "one-step")
ROWS = [
    Row(workload, pool, way)
    for pool in POOLS
    if pool != "8"
    for way in WAYS
    for workload in WORKLOADS
]
UNSCALED = Row("qwen-image", "8", "on-policy")
"""What `python -m bench unscaled` runs, in no table: a host, in real time, with all bytes."""


def row_of(name: str) -> Row:
    """Return the row of this name."""
    return next(row for row in (*ROWS, UNSCALED) if row.name == name)


def toml_of(row: Row) -> str:
    """Write the row's recipe."""
    lines = [
        f"# {row.hosts}, {row.way}. Made by `python -m bench recipes` from bench/cluster/rows.py.",
        SCORED,
        f"# {row.command} --elsewhere",
        "",
        f'base = "../../recipes/{BASES[row.workload]}.toml"',
    ]
    for table, keys in sorted((table, keys) for table, keys in row.keys.items() if keys):
        lines += ["", f"[{table}]", *(f"{key} = {_toml(value)}" for key, value in keys.items())]
    return "\n".join(lines) + "\n"


SCORED = "# Samples are scored where they are generated, in the seconds of the cost profile."


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)

"""What one run of the emulated cluster is: devices, schedule and scale, and the recipe for it."""

import math
from collections.abc import Collection, Mapping
from pathlib import Path

from pydantic import Field

from bench.cluster.shipped import shipped
from digenrl.planning.recipes import model_use
from digenrl.trace.memory import with_memory
from services.scheduler.core.unissued import full_size
from services.scheduler.costs.floor import floor_seconds
from services.scheduler.costs.profile import Profile, VariantName, load_profile
from services.scheduler.costs.recipes import batch_shape
from services.scheduler.costs.shape import Shape
from services.scheduler.sim.steady import steady_plan
from shared.messages.records import Record, Token
from shared.recipe import tables
from shared.recipe.recipe import Recipe, load_recipe
from shared.recipe.rewards import Evaluation, Reward, ScorerTable
from shared.recipe.sampling import Sampling
from shared.recipe.schedule import RunSchedule, Schedule
from shared.recipe.trainer import Trainer

DEVICES_PER_NODE = 8
MIN_REWARD_WORKERS = 2
REFERENCE_DEVICES = 32
SCALES = {"qwen-image": 10.0, "flux1-dev": 15.0, "wan2.1-14b": 100.0, "hunyuanvideo": 200.0}
"""Scales at which a batch on 32 H100s lasts about four seconds."""
BATCH_S = 4.0
"""Seconds that a batch of any other model lasts at its best."""


class Setting(Record):
    """Everything that the processes of one run need to know."""

    run: Token
    profile: str
    variant: VariantName = "lora"
    rollout: dict[str, int]
    """Devices by kind."""
    trainer: dict[str, int]
    encoders: int = 0
    """Number of encoders; with any, devices that generate do not encode prompts themselves."""
    scale: float = Field(gt=0)
    steps: int = Field(gt=0)
    """Number of batches."""
    seed: int = 0
    schedule: RunSchedule = RunSchedule(tag="off")
    host_devices: int = Field(default=DEVICES_PER_NODE, gt=0)
    """Fluid devices of a host."""
    recipe: Path | None = None
    """The row's recipe, of which everything is run but model, prompts and rewards."""
    streamed: tuple[str, ...] = ()
    """Kinds of device whose workers stream the network."""
    all_bytes: bool = False
    """Whether every byte is moved that a run moves, whatever the scale."""
    shard_bytes: int = Field(default=tables.Run.model_fields["shard_bytes"].default, gt=0)
    """Most bytes of a stored object of weights, or of a checkpoint."""

    @property
    def num_rollout(self) -> int:
        return sum(self.rollout.values())

    @property
    def num_trainer(self) -> int:
        return sum(self.trainer.values())

    @property
    def num_nodes(self) -> int:
        """Hosts that fetch adapters."""
        return math.ceil(self.num_rollout / DEVICES_PER_NODE)

    @property
    def num_member_hosts(self) -> int:
        """Hosts with members, each of which is a process here."""
        return math.ceil(self.num_trainer / self.host_devices)

    @property
    def num_reward(self) -> int:
        """Reward workers, one per host: in the profiles samples are scored where they are."""
        return max(MIN_REWARD_WORKERS, self.num_nodes + self.num_member_hosts)

    def load_profile(self) -> Profile:
        """Returns the costs that devices are held by."""
        profile = load_profile(self.profile, self.variant)
        if self.recipe is not None:
            profile = row_profile(profile, load_recipe(self.recipe), self.streamed)
        return shipped(profile, self.trainer)


def row_profile(profile: Profile, recipe: Recipe, streamed: Collection[str]) -> Profile:
    """Returns the profile's costs with the memory that a recipe takes.

    Args:
        streamed: kinds of device whose workers stream the network.
    """
    devices = recipe.rollout.workers + recipe.trainer.devices
    plan = steady_plan(batch_shape(recipe), batches=1, schedule=recipe.run_schedule)
    use = model_use(recipe, profile, fragment=full_size(plan, devices))
    return with_memory(profile, use, streamed)


def default_scale(profile: Profile, devices: Mapping[str, int]) -> float:
    """Returns the scale at which a batch lasts as long as on 32 H100s at the model's usual one."""
    best = floor_seconds(profile, devices)
    if profile.name not in SCALES:
        return max(1.0, best / BATCH_S)
    equal = floor_seconds(profile, {"H100": REFERENCE_DEVICES})
    return round(SCALES[profile.name] * best / equal, 2)


def recipe_of(setting: Setting, folder: Path) -> Recipe:
    """Makes the recipe that the services run, with the prompts in ``folder``. Its model is never
    opened."""
    if setting.recipe is not None:
        return _emulated(load_recipe(setting.recipe), setting, folder)
    shape = setting.load_profile().shape
    return Recipe(
        run=tables.Run(name=setting.run, seed=setting.seed, steps=setting.steps),
        model=tables.Model(folder=folder / "no-model", height=8, width=8),
        data=tables.Data(prompts=folder / "prompts.jsonl"),
        sampling=_sampling(shape),
        batch=tables.Batch(groups=shape.groups, group_size=shape.group_size),
        trainer=Trainer(learning_rate=1e-4, devices=setting.num_trainer),
        rollout=tables.Rollout(
            workers=setting.num_rollout,
            media="raw",  # there are no pixels
        ),
        encoder=tables.Encoder(workers=setting.encoders),
        reward=Reward(scorers=(ScorerTable(name="emulated", type="emulated"),)),
        schedule=Schedule.model_validate(
            setting.schedule.model_dump(include=set(Schedule.model_fields))
        ),
    )


def _emulated(recipe: Recipe, setting: Setting, folder: Path) -> Recipe:
    """Returns a row's recipe over devices that are emulated: there are no model, no pixels and no
    rewards of its own."""
    plain = recipe.model_dump()
    changes = {
        "run": {"name": setting.run, "seed": setting.seed, "steps": setting.steps},
        "model": {"folder": folder / "no-model"},
        "data": {"prompts": folder / "prompts.jsonl"},
        "sampling": {"sigmas": Sampling.model_fields["sigmas"].default},
        "rollout": {"media": "raw"},
        "reward": {"scorers": (ScorerTable(name="emulated", type="emulated").model_dump(),)},
    }
    for table, keys in changes.items():
        plain[table].update(keys)
    plain["evaluation"] = Evaluation().model_dump()
    return Recipe.model_validate(plain)


def _sampling(shape: Shape) -> Sampling:
    """Returns sampling that takes as many steps, alone and together, as the profile says."""
    start = max(0, round(shape.shared_steps) - 1)
    return Sampling(
        steps=shape.steps,
        window=shape.trained_steps,
        first_window_starts=(start, start),
        shared_noise=shape.merged_steps > 0,
    )


def write_prompts(folder: Path, number: int) -> None:
    """Writes prompts that all differ, so that no conditioning is stored already."""
    lines = (f'{{"prompt": "prompt {index}", "metadata": {{}}}}\n' for index in range(number))
    (folder / "prompts.jsonl").write_text("".join(lines))

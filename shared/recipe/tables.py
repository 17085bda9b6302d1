"""The tables of a recipe and what follows from them together, before anything is checked."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from shared.learning.advantages import Advantages
from shared.messages.contracts import MAX_GROUP_SIZE
from shared.messages.records import Token
from shared.recipe.fields import NonNegative, Positive, Rate, Table
from shared.recipe.rewards import Evaluation, Reward
from shared.recipe.sampling import Algorithm, Sampling
from shared.recipe.schedule import RunSchedule, Schedule
from shared.recipe.trainer import Trainer


class Run(Table):
    name: Token
    seed: NonNegative = 0
    steps: Positive
    """Optimizer steps; one batch each."""
    keep_last: Positive = 3
    """Newest versions whose weights and checkpoint are kept."""
    keep_every: Positive | None = None
    """Versions from one that is kept for good to the next."""


class Lora(Table):
    rank: Positive = 32
    alpha: Annotated[float, Field(gt=0)] = 64.0
    targets: tuple[str, ...] = ()
    """Suffixes of module names. Empty: the ones that the model family's adapter names."""


class Model(Table):
    folder: Path
    """A diffusers folder; relative to the recipe."""
    height: Positive
    width: Positive
    frames: Positive = 1
    """Frames of a video."""
    guidance: Rate = 1.0
    """Guidance in sampling and training: classifier-free, or an input of the network where it takes
    it (FLUX.1, HunyuanVideo). 1 is none."""
    text_tokens: Positive | None = None
    """Tokens at which a prompt is cut off in sampling and training, and to which it is padded where
    the family has no text mask; by default the family's (docs/recipes.md)."""
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    """Type of the weights; latents, log-probs and trained weights are float32 at least."""
    device: Literal["cpu"] | None = None
    """cpu: every process leaves the GPUs alone. Without it, each takes one where there are any."""
    matmul_precision: Literal["high", "highest"] = "high"
    """Precision of float32 matrix products on a GPU, when sampling and training. high: TF32,
    several times as fast; highest: not rounded."""
    trained: Literal["lora", "full"] = "lora"
    """An adapter beside frozen weights, or all weights of the network."""
    lora: Lora = Lora()


class Data(Table):
    prompts: Path
    """A file or a folder, see `shared.learning.prompts.read_prompts`; relative to the recipe."""


class Batch(Table):
    groups: Positive
    """Prompts per optimizer step."""
    group_size: Annotated[int, Field(ge=2, le=MAX_GROUP_SIZE)]


class Rollout(Table):
    workers: NonNegative = 1
    """Number of workers that `digenrl up` starts; 0 where all devices are the trainer's."""
    threads: Positive = 1
    can_train: bool = False
    """Whether rollout devices compute gradients of whole groups while the trainer is behind."""


class Tables(Table):
    """All tables of a recipe."""

    run: Run
    model: Model
    data: Data
    sampling: Sampling
    batch: Batch
    algorithm: Algorithm = Algorithm()
    trainer: Trainer
    rollout: Rollout = Rollout()
    reward: Reward
    schedule: Schedule = Schedule()
    evaluation: Evaluation = Evaluation()

    @property
    def trainer_may_help(self) -> bool:
        """Whether the trainer's devices also generate. Ranks wait for one another instead."""
        return self.run_schedule.lends_trainer and self.trainer.ranks == 1

    @property
    def run_schedule(self) -> RunSchedule:
        """The schedule with what other tables imply: the same bytes need the same fragments, and
        between two optimizer steps of a batch a trainer has weights that are no version."""
        table, pipelined = self.schedule, self.schedule.mode == "pipelined"
        lends = pipelined and self.trainer.updates == 1 and table.tag != "off"
        whole = self.trainer.deterministic and table.fragment_size == "auto"
        return RunSchedule.model_validate({
            **table.model_dump(),
            "fragment_size": self.batch.group_size if whole else table.fragment_size,
            "tsp_steps": "auto" if self.sampling.window == 1 else table.tsp_steps,
            "tag": table.tag if lends else 0,
            "max_staleness": table.staleness_limit,
            "deterministic": self.trainer.deterministic,
            "gradient_help": self.rollout.can_train and pipelined,
        })  # fmt: skip

    @property
    def advantages(self) -> Advantages:
        weights = tuple((scorer.name, scorer.weight) for scorer in self.reward.scorers)
        normalised = self.algorithm.rewards == "normalised"
        return Advantages(
            self.algorithm.advantage_std, weights if normalised else (), self.reward.max_failed
        )

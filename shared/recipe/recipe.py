"""A recipe: everything that defines a run, as one TOML file.

Read and checked before anything is started; the resolved recipe is stored with the run, where
every service takes it from. docs/recipes.md describes each key.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from shared.errors import UserError
from shared.learning.advantages import Advantages
from shared.learning.algorithms import ALGORITHMS
from shared.messages.contracts import MAX_FRAGMENTS_PER_GROUP, MAX_GROUP_SIZE
from shared.messages.records import Token
from shared.models.catalogue import pipeline_sigmas
from shared.recipe.checks import check_at_most, check_devices, check_divides, check_messages
from shared.recipe.errors import describe
from shared.recipe.files import read_tables
from shared.recipe.implied import with_implied
from shared.recipe.paths import resolved
from shared.recipe.rewards import Evaluation, Reward, ScorerTable, check_evaluation
from shared.recipe.sampling import Algorithm, Sampling, SigmaGrid
from shared.recipe.schedule import RunSchedule, Schedule
from shared.recipe.stored import settled
from shared.recipe.table import NonNegative, Positive, Rate, Table
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
    """Of a video."""
    guidance: Rate = 1.0
    """In sampling and training: classifier-free, or told to the network where it takes that
    (FLUX.1, HunyuanVideo). 1 is none."""
    text_tokens: Positive | None = None
    """Tokens at which a prompt is cut off in sampling and training, and to which it is padded where
    the family has no text mask; by default the family's (docs/recipes.md)."""
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    """Of the weights. Latents, log-probs and what is trained are float32 at least."""
    device: Literal["cpu"] | None = None
    """cpu: every process leaves the GPUs alone. Without it, each takes one where there are any."""
    matmul_precision: Literal["high", "highest"] = "high"
    """Of products of float32 matrices on a GPU, in sampling and training. high: rounded to TF32,
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
    """How many `digenrl up` starts; 0 where the trainer's devices are all there are."""
    threads: Positive = 1
    can_train: bool = False
    """Whether rollout devices compute gradients of whole groups while the trainer is behind."""


class Recipe(Table):
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
        """Whether the trainer's devices generate besides. Ranks wait for one another instead."""
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

    @model_validator(mode="before")
    @classmethod
    def _implied_by_the_algorithm(cls, plain: Any) -> Any:
        return with_implied(plain) if isinstance(plain, Mapping) else plain

    @model_validator(mode="after")
    def _parts_make_up_the_whole(self) -> Self:
        size = self.batch.group_size
        if isinstance(self.trainer.micro_batch, int):
            check_divides(self.trainer.micro_batch, size, "trainer.micro_batch", "batch.group_size")
        fragment = self.schedule.fragment_size
        if isinstance(fragment, int):
            check_divides(fragment, size, "schedule.fragment_size", "batch.group_size")
            if size // fragment > MAX_FRAGMENTS_PER_GROUP:
                smallest = -(-size // MAX_FRAGMENTS_PER_GROUP)
                raise ValueError(
                    f"schedule.fragment_size: too small for this group; at least {smallest}"
                )
        check_messages(self)
        check_at_most(
            self.schedule.tsp_steps, self.sampling.window, "schedule.tsp_steps", "sampling.window"
        )
        check_at_most(self.schedule.tag, self.batch.groups, "schedule.tag", "batch.groups")
        check_devices(self)
        self._check_variant()
        check_evaluation(self.evaluation, self.sampling)
        return self

    def _check_variant(self) -> None:
        variants = ALGORITHMS[self.algorithm.name].variants
        if self.sampling.variant not in variants:
            raise ValueError(
                f"sampling.variant: {self.algorithm.name} does not sample with "
                f"{self.sampling.variant!r}; use {' or '.join(map(repr, variants))}"
            )


def load_recipe(path: Path) -> Recipe:
    """Read, check and resolve a recipe: TOML, or the JSON of one that is resolved already.

    Raises:
        UserError: one line that names the file, the key and the remedy.
    """
    plain = read_tables(path)
    try:
        return _resolved(Recipe.model_validate(plain), path.resolve().parent)
    except ValidationError as error:
        raise UserError(f"{path}: {describe(error, Recipe)}") from error


def stored_recipe(data: bytes) -> Recipe:
    """The recipe of a run that this release or an earlier one has stored, as it meant it.

    Raises:
        ValueError: if it is none; pydantic's ValidationError is one.
    """
    return Recipe.model_validate(settled(data, Recipe))


def override(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with some keys set anew ("run.steps": 5); None leaves a key as it is.

    Raises:
        UserError: if a value is not one that the key takes.
    """
    plain = recipe.model_dump()
    for key, value in changes.items():
        if value is not None:
            table, field = key.split(".")
            plain[table][field] = value
    try:
        return Recipe.model_validate(plain)
    except ValidationError as error:
        raise UserError(describe(error, Recipe)) from error


def _resolved(recipe: Recipe, base: Path) -> Recipe:
    """With every path made absolute, and the model's own sigmas as numbers if the model is here."""

    def scorers(given: tuple[ScorerTable, ...]) -> tuple[ScorerTable, ...]:
        return tuple(scorer.at(base) for scorer in given)

    def absolute(path: Path | None) -> Path | None:
        return None if path is None else resolved(path, base)

    def updated(table: Any, **update: Any) -> Any:
        return table.model_copy(update=update)

    evaluation, folder = recipe.evaluation, resolved(recipe.model.folder, base)
    sigmas, evaluation_sigmas = _sigmas(recipe, folder)
    return recipe.model_copy(
        update={
            "model": updated(recipe.model, folder=folder),
            "sampling": updated(recipe.sampling, sigmas=sigmas),
            "data": updated(recipe.data, prompts=resolved(recipe.data.prompts, base)),
            "reward": updated(recipe.reward, scorers=scorers(recipe.reward.scorers)),
            "evaluation": updated(
                evaluation,
                sigmas=evaluation_sigmas,
                scorers=scorers(evaluation.scorers),
                digits=absolute(evaluation.digits),
                prompts=absolute(evaluation.prompts),
            ),
        }
    )


def _sigmas(recipe: Recipe, folder: Path) -> tuple[SigmaGrid, SigmaGrid | None]:
    """Of sampling and of the evaluation: the model's own as numbers, if the model is here."""
    sampling, evaluation, size = recipe.sampling, recipe.evaluation, recipe.model
    trained, evaluated = sampling.sigmas, evaluation.sigmas
    if not folder.is_dir():
        return trained, evaluated
    if (evaluated or trained) == "model":  # other steps and sizes have other numbers
        evaluated = pipeline_sigmas(
            folder,
            evaluation.steps or sampling.steps,
            height=evaluation.height or size.height,
            width=evaluation.width or size.width,
            frames=size.frames,
        )
    if trained == "model":
        trained = pipeline_sigmas(
            folder, sampling.steps, height=size.height, width=size.width, frames=size.frames
        )
    return trained, evaluated

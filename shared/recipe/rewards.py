"""The tables of a recipe about rewards: for training, and for the evaluation."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from shared.limits import MAX_LOST_CALLS
from shared.messages.records import Token
from shared.recipe.dataset import Dataset
from shared.recipe.fields import NonNegative, Positive, Table, check_unique
from shared.recipe.rubrics import HIGHEST, PUBLISHED, RUBRICS
from shared.recipe.sampling import Sampling, SigmaGrid, check_sigmas

QUESTION = """\
This picture was made for the following description.

{prompt}

Judge how well the picture shows what the description asks for, and how well it is made. Answer \
with one number from 0 (it fails at both) to {highest} (perfect at both), and nothing else."""

PYTHON, FUNCTION = "python", "score"
"""Type of a scorer that is a function of the user's own, and the function's name by default."""
IDENTIFIER = r"^[A-Za-z_][A-Za-z0-9_]*$"
GROUP_SCORER_TYPES = (PYTHON, "remote")
"""Types that may score whole groups."""


class KeyTable(Table):
    key_env: Annotated[str, Field(min_length=1)] | None = None
    """Environment variable that holds the API key, which is sent as a bearer token. Default: no key
    is sent."""
    key_file: Path | None = None
    """File that holds only the API key, relative to the recipe."""

    @model_validator(mode="after")
    def _one_key(self) -> Self:
        if self.key_env is not None and self.key_file is not None:
            raise ValueError("key_file: give key_env or key_file, not both")
        return self


class Judge(KeyTable):
    model: Annotated[str, Field(min_length=1)]
    """Name of the model at the endpoint."""
    prompt: Annotated[str, Field(min_length=1)] = QUESTION
    """Question asked with each sample. `{prompt}` stands for the sample's prompt, `{highest}` for
    the best number."""
    rubric: Annotated[str, Field(json_schema_extra={"enum": sorted(RUBRICS)})] | None = None
    """Name of a prepared question in place of `prompt`; `docs/rewards.md` lists them."""
    frames: Annotated[Positive, Field(le=64)] | None = None
    """Number of evenly spread frames of a video in one request. Default: each frame is judged
    alone, and the score is the mean."""
    highest: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0
    """Best number; the worst is 0. The score is the answer divided by it."""
    options: dict[str, JsonValue] = Field(default={"temperature": 0})
    """Further fields of the request, such as `max_tokens` and `seed`."""
    at_once: Annotated[Positive, Field(le=256)] = 8
    """Maximum concurrent requests of a reward worker."""

    @model_validator(mode="before")
    @classmethod
    def _question_of_the_rubric(cls, plain: Any) -> Any:
        name = plain.get("rubric") if isinstance(plain, Mapping) else None
        if name is None:
            return plain
        if name not in RUBRICS:
            raise ValueError(
                f"rubric: {name!r} is unknown; use one of: {', '.join(sorted(RUBRICS))}"
            )
        if plain.get("prompt", RUBRICS[name]) != RUBRICS[name]:
            raise ValueError("rubric: excludes prompt, since both are questions; leave one out")
        highest = {"highest": HIGHEST} if name in PUBLISHED else {}
        return {**plain, **highest, "prompt": RUBRICS[name]}

    @model_validator(mode="after")
    def _no_reserved_option(self) -> Self:
        reserved = {"model", "messages", "stream"} & self.options.keys()
        if reserved:
            raise ValueError(f"options: {sorted(reserved)[0]} cannot be set here")
        return self


class Remote(KeyTable):
    batch: Annotated[Positive, Field(le=1024)] = 32
    """Maximum samples per request."""


class ScorerTable(Table):
    name: Token
    """Name of the scorer in tables, metrics and options."""
    type: Token
    """Type of the scorer; `docs/rewards.md` lists all types."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Weight of the score in the reward."""
    folder: Path | None = None
    """Folder of the scorer's weights, relative to the recipe. `digenrl fetch` makes it."""
    source: Path | None = None
    """File with your own function, as `file.py:function`, relative to the recipe."""
    function: Annotated[str, Field(pattern=IDENTIFIER)] = FUNCTION
    """Name of the function in `source`."""
    scores: Literal["samples", "groups"] = "samples"
    """`samples`: each sample is scored alone; `groups`: one call scores a whole group."""
    url: str | None = None
    """URL of a remote scorer's server or of a judge's API."""
    patience: Annotated[float, Field(gt=0, le=3600)] = 120.0
    """Maximum seconds to wait for an answer of a server or of your own function."""
    judge: Judge | None = None
    """Vision-language model that judges samples, and its question."""

    remote: Remote = Remote()
    """Format of the requests to a remote scorer."""

    @model_validator(mode="before")
    @classmethod
    def _file_and_function(cls, plain: Any) -> Any:
        source = plain.get("source") if isinstance(plain, Mapping) else None
        if not isinstance(source, str) or ":" not in source:
            return plain
        file, _, function = source.rpartition(":")
        return {**plain, "source": file, "function": function}

    @model_validator(mode="after")
    def _own_code_has_a_source(self) -> Self:
        if self.type == PYTHON and self.source is None:
            raise ValueError('source: missing; name your file, source = "my_reward.py:score"')
        if self.type != PYTHON and self.source is not None:
            raise ValueError(f'source: only a scorer of type "{PYTHON}" has one, not {self.type!r}')
        if self.scores == "groups" and self.type not in GROUP_SCORER_TYPES:
            raise ValueError(
                f"scores: {self.type} scores each sample by itself; leave it out, or set type to "
                + " or ".join(f'"{name}"' for name in GROUP_SCORER_TYPES)
            )
        return self

    @property
    def longest_s(self) -> float:
        """Seconds that a fragment may take longer than usual, because calls of a function of the
        user's own hang: each time there is a wait for the call, and one for a new process."""
        return 2 * MAX_LOST_CALLS * self.patience if self.type == PYTHON else 0.0

    def at(self, base: Path) -> Self:
        """Return the table with paths relative to ``base`` made absolute."""
        judge = self.judge and self.judge.absolute(base, "key_file")
        remote = self.remote.absolute(base, "key_file")
        return self.absolute(base, "folder", "source").model_copy(
            update={"judge": judge, "remote": remote}
        )


class Reward(Table):
    workers: Positive = 1
    """Number of reward workers that `digenrl up` starts."""
    threads: Positive = 1
    """CPU threads of each reward worker."""
    scorers: tuple[ScorerTable, ...] = Field(min_length=1)
    """Scorers of the training reward, each a table `[[reward.scorers]]`."""
    max_failed: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Maximum share of a group's samples without a reward. A group with more is dropped."""
    max_share: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.5
    """Maximum share of a step that the networks of the rewards may take. `digenrl check` refuses a
    plan in which they take more."""

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        check_unique("scorers", [scorer.name for scorer in self.scorers])
        return self


class Evaluation(Table):
    """Measurements before, during and after a run: by ODE, and at a fixed seed."""

    every: Positive | None = None
    """Optimizer steps between two evaluations during the run. Default: evaluations before and after
    the run only."""
    seed: NonNegative = 0
    """Seed of the evaluated samples."""
    samples_per_prompt: Positive = 4
    """Number of evaluated samples per prompt, sampled without noise (ODE)."""
    steps: Annotated[int, Field(ge=2, le=1000)] | None = None
    """Denoising steps of evaluated samples; default: as in training."""
    sigmas: SigmaGrid | None = None
    """Noise schedule of evaluated samples, as `sampling.sigmas`; default: as in training."""
    height: Positive | None = None
    """Height of evaluated samples in pixels; default: as in training."""
    width: Positive | None = None
    """Width of evaluated samples in pixels; default: as in training."""
    threads: Positive = 1
    """CPU threads of the evaluation."""
    prompts: Path | None = None
    """Prompts that are evaluated, read as `data.prompts` is; relative to the recipe. Without it,
    those that `held_out` keeps from training."""
    held_out: NonNegative | None = None
    """Number of different prompts of `data.prompts` that are evaluated and never trained. By
    default a tenth of 20 or more, at most 32, unless `prompts` or `dataset` names others; of fewer
    none, so that the prompts of training are evaluated."""
    dataset: Dataset | None = None
    """Data set of the Hugging Face hub, or files of this host whose columns have other names, in
    place of `evaluation.prompts`."""
    scorers: tuple[ScorerTable, ...] = ()
    """Gold rewards, each a table `[[evaluation.scorers]]`: measured at evaluations and never
    trained on. An alarm fires if one falls while the training reward rises."""
    digits: Path | None = None
    """Folder of the held-out digit judges, which training never uses; relative to the recipe."""

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        check_unique("scorers", [scorer.name for scorer in self.scorers])
        return self

    def located(self, base: Path) -> Self:
        """Return the table with the files that it means on this host, and with a commit."""
        table = self.absolute(base, "digits", "prompts")
        if self.dataset is None:
            return table
        dataset = self.dataset.located(base)
        update = {"prompts": dataset.prompts, "dataset": dataset}
        return table.model_copy(update=update)


def check_evaluation(table: Evaluation, sampling: Sampling) -> None:
    """Raises ValueError, which names the key, if the evaluation has no noise schedule."""
    steps = table.steps or sampling.steps
    if table.sigmas is None:
        if steps != sampling.steps and not isinstance(sampling.sigmas, str):
            raise ValueError(
                f"evaluation.steps: sampling.sigmas are numbers, for {sampling.steps} steps; give "
                f"evaluation.sigmas as well, {steps + 1} numbers or the name of a schedule"
            )
    elif not isinstance(table.sigmas, str):
        check_sigmas("evaluation.sigmas", table.sigmas, steps)

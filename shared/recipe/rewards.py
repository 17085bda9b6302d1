"""The tables of a recipe that say what samples are worth: to training, and to the evaluation."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from shared.messages.records import Token
from shared.recipe.dataset import Dataset
from shared.recipe.fields import NonNegative, Positive, Table, check_unique
from shared.recipe.rubrics import RUBRICS
from shared.recipe.sampling import Sampling, SigmaGrid, check_sigmas

QUESTION = """\
This picture was made for the following description.

{prompt}

Judge how well the picture shows what the description asks for, and how well it is made. Answer \
with one number from 0 (it fails at both) to {highest} (perfect at both), and nothing else."""

PYTHON, FUNCTION = "python", "score"
"""Type of a scorer that is a function of the user's own, and the function's name by default."""
IDENTIFIER = r"^[A-Za-z_][A-Za-z0-9_]*$"
OF_GROUPS = (PYTHON, "remote")
"""Types that may score whole groups."""
MOST_LOST = 3
"""Calls of a fragment that may hang or end their process before the others are given up."""


class Judge(Table):
    model: Annotated[str, Field(min_length=1)]
    """Name of the model at the endpoint."""
    prompt: Annotated[str, Field(min_length=1)] = QUESTION
    """Question beside the image; {prompt} stands for the sample's prompt, {highest} for the key."""
    rubric: (
        Literal["preference", "fit", "edit", "video-quality", "video-motion", "video-fit"] | None
    ) = None
    """Name of a question in place of ``prompt``; docs/rewards.md has them."""
    frames: Annotated[Positive, Field(le=64)] | None = None
    """Frames of a video, evenly spread, that a request shows. Without it, each frame is judged by
    itself, and the score is the mean."""
    highest: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0
    """Best number; the worst is 0. Scores are the number divided by it, from 0 to 1."""
    options: dict[str, JsonValue] = Field(default={"temperature": 0})
    """Further fields of the request that the endpoint knows: max_tokens, seed, ..."""
    at_once: Annotated[Positive, Field(le=256)] = 8
    """Requests that a reward worker has under way."""
    key_env: Annotated[str, Field(min_length=1)] | None = None
    """Name of the environment variable that holds the API key. Without it and ``key_file``, none
    is sent."""
    key_file: Path | None = None
    """File that holds the API key and nothing else; relative to the recipe."""

    @model_validator(mode="before")
    @classmethod
    def _question_of_the_rubric(cls, plain: Any) -> Any:
        asked = RUBRICS.get(str(plain.get("rubric"))) if isinstance(plain, Mapping) else None
        if asked is None:
            return plain
        if plain.get("prompt", asked) != asked:
            raise ValueError("rubric: is a question, and prompt another; leave one of them out")
        return {**plain, "prompt": asked}

    @model_validator(mode="after")
    def _one_key(self) -> Self:
        if self.key_env is not None and self.key_file is not None:
            raise ValueError("key_file: give key_env or key_file, not both")
        reserved = {"model", "messages", "stream"} & self.options.keys()
        if reserved:
            raise ValueError(f"options: {sorted(reserved)[0]} is not for options to say")
        return self


class Remote(Table):
    format: Literal["msgpack", "json"] = "msgpack"
    """Format of requests and answers. json: pixels in base64, a third larger."""
    batch: Annotated[Positive, Field(le=1024)] = 32
    """Largest number of samples in a request."""
    key_env: Annotated[str, Field(min_length=1)] | None = None
    """Name of the environment variable that holds the API key, which is sent as a bearer token.
    Without it and ``key_file``, none is sent."""
    key_file: Path | None = None
    """File that holds the API key and nothing else; relative to the recipe."""

    @model_validator(mode="after")
    def _one_key(self) -> Self:
        if self.key_env is not None and self.key_file is not None:
            raise ValueError("key_file: give key_env or key_file, not both")
        return self


class ScorerTable(Table):
    name: Token
    type: Token
    """Type of the scorer; docs/rewards.md lists them."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    folder: Path | None = None
    """Folder of its weights; relative to the recipe."""
    source: Path | None = None
    """File with a function of the user's own, `file.py:function`; relative to the recipe."""
    function: Annotated[str, Field(pattern=IDENTIFIER)] = FUNCTION
    """Name of that function, which `source` says as well."""
    scores: Literal["samples", "groups"] = "samples"
    """groups: a score depends on the other samples of its group, so that all of them are scored in
    one call, and none alone."""
    url: str | None = None
    """URL of a remote scorer's server, or of a judge's API."""
    patience: Annotated[float, Field(gt=0, le=3600)] = 120.0
    """Seconds to wait for an answer of a remote scorer or a judge, or for a call of a function of
    the user's own."""
    judge: Judge | None = None
    """Model that a judge asks, and how."""

    remote: Remote = Remote()
    """Form of the requests to a remote scorer's server."""

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
            raise ValueError(f'source: only a scorer of type "{PYTHON}" has one; set its type')
        if self.scores == "groups" and self.type not in OF_GROUPS:
            raise ValueError(
                f"scores: {self.type} scores each sample by itself; leave it out, or set type to "
                + " or ".join(f'"{name}"' for name in OF_GROUPS)
            )
        return self

    @property
    def longest_s(self) -> float:
        """Seconds that a fragment may take longer than usual, because calls of a function of the
        user's own hang: each time there is a wait for the call, and one for a new process."""
        return 2 * MOST_LOST * self.patience if self.type == PYTHON else 0.0

    def at(self, base: Path) -> Self:
        """Return the table with paths relative to ``base`` made absolute."""
        judge = self.judge and self.judge.absolute(base, "key_file")
        remote = self.remote.absolute(base, "key_file")
        return self.absolute(base, "folder", "source").model_copy(
            update={"judge": judge, "remote": remote}
        )


class Reward(Table):
    workers: Positive = 1
    threads: Positive = 1
    scorers: tuple[ScorerTable, ...] = Field(min_length=1)
    max_failed: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Largest share of a group's samples without a reward; with more the group is dropped."""

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        check_unique("scorers", [scorer.name for scorer in self.scorers])
        return self


class Evaluation(Table):
    """Says what is measured before, after and during a run: by ODE, and at a fixed seed."""

    every: Positive | None = None
    """Optimizer steps from one evaluation to the next, while the run goes on. Without it, versions
    are measured before and after only."""
    seed: NonNegative = 0
    samples_per_prompt: Positive = 4
    steps: Annotated[int, Field(ge=2, le=1000)] | None = None
    """Denoising steps; by default as in training, like sigmas, height and width."""
    sigmas: SigmaGrid | None = None
    height: Positive | None = None
    """Height of the images in pixels."""
    width: Positive | None = None
    threads: Positive = 1
    """CPU threads of the evaluation."""
    prompts: Path | None = None
    """Held out, read as `data.prompts` is; relative to the recipe. Without it, training's."""
    dataset: Dataset | None = None
    """A data set of the Hugging Face hub, or files of this host with columns of other names, in
    place of `prompts`."""
    scorers: tuple[ScorerTable, ...] = ()
    """Gold rewards: measured at evaluations, and never trained on."""
    digits: Path | None = None
    """Folder of the held-out judges of handwritten digits, never used in training; relative to
    the recipe. Without it only the training rewards are compared."""

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

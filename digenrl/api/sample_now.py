"""Samples a prompt of the caller's own with versions of a run, by `digenrl generate`.

Processes of their own sample, one at a time: neither readers of the page nor the run wait for them.
The newest results are kept in memory.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException
from pydantic import ConfigDict, Field

from digenrl.api.commands import Turns, run_command
from digenrl.api.run_history import RunHistory
from services.scheduler.shell.api_models import View, example
from shared.caches import keep_newest
from shared.limits import MAX_TEXT
from shared.process.http_api import PATTERN_TEXTS, errors

SAMPLE_S = 1800.0
"""Longest time that the samples of a version take; then the process is ended."""
MAX_KEPT, MAX_FILES = 32, 1024
"""Results that are kept, and their files."""
LINK = "/v1/media/prompt-3-4-000-0.png"
TEXT_WITHOUT_NUL = r"^[^\x00]*$"
PATTERN_TEXTS[TEXT_WITHOUT_NUL] = "has the character NUL; leave it out"
Version = Annotated[int, Field(ge=0, lt=2**31)]


class SampleRequest(View):
    """A prompt, and one or two versions that sample it from the same noise."""

    model_config = ConfigDict(
        **example(prompt="a red car", versions=[0, 4], seed=0, num_each=1),
        frozen=True, extra="forbid", str_strip_whitespace=True,
    )  # fmt: skip

    prompt: Annotated[str, Field(min_length=1, max_length=MAX_TEXT, pattern=TEXT_WITHOUT_NUL)]
    versions: Annotated[tuple[Version, ...], Field(min_length=1, max_length=2)]
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    num_each: Annotated[int, Field(ge=1, le=8)] = 1
    """Samples of each version."""


class PromptSample(View):
    """A sample of a prompt."""

    model_config = example(version=4, still=LINK, media=LINK, reward=0.93, why_unscored="")

    version: int
    """Version that generated it."""
    still: str
    """Location of the picture, or of the middle frame of the video."""
    media: str
    """Location of the picture or video."""
    reward: float | None = None
    """Score of the recipe's reward; null if it cannot score the sample."""
    why_unscored: str = ""
    """Why it has no reward."""


@dataclass(slots=True)
class SampleNow:
    """Samples prompts with versions of one run."""

    history: RunHistory
    environment: Mapping[str, str]
    """Variables that locate the store, for a separate process."""
    stage: dict[str, str | float | None] = field(default_factory=dict)
    """Prompt and present stage of the request in work, and the share of its denoising steps that
    are done, None before the first one; empty without a request."""
    known: dict[SampleRequest, list[PromptSample]] = field(default_factory=dict)
    """Samples of earlier requests."""
    _turns: Turns = field(default_factory=Turns)
    _number: int = 0

    async def samples(self, request: SampleRequest) -> list[PromptSample]:
        """Return the samples of a prompt.

        Raises:
            HTTPException: if a version does not exist or is not kept, or others wait.
        """
        await self.history.look()
        if max(request.versions) > self.history.version:
            raise HTTPException(404, f"version: the newest version is {self.history.version}")
        async with self._turns.turn():
            try:
                if request not in self.known:
                    made = [s for each in request.versions for s in await self._made(request, each)]
                    keep_newest(self.known, request, made, MAX_KEPT)
                return self.known[request]
            finally:
                self.stage = {}

    async def _made(self, request: SampleRequest, version: int) -> list[PromptSample]:
        at, num, scores = request.versions.index(version), len(request.versions), dict[str, Any]()
        self._number, recipe = self._number + 1, self.history.recipe

        def show(stage: str, share: float | None) -> None:
            self.stage = {"prompt": request.prompt, "stage": stage, "share": share}

        def follow(line: str) -> None:
            told = json.loads(line) if line.startswith("{") else {}
            scores.update(told)
            if "done" in told:
                done, of = told["done"], told["of"]
                step = f"samples with version {version}: step {done} of {of}"
                scored = f"scores the samples of version {version}"
                show(scored if done == of else step, (at + done / of) / num)

        show(f"loads version {version}", at / num or None)
        is_base = version == 0 and recipe is not None and recipe.model.adapter is None
        with tempfile.TemporaryDirectory(prefix="digenrl-samples-") as folder:
            await run_command(
                "generate", self.history.run, "--version", "base" if is_base else str(version),
                f"--prompt={request.prompt}", "--seed", str(request.seed),
                "--num", str(request.num_each), "--out", folder, "--json",
                environment=self.environment, limit_s=SAMPLE_S, on_line=follow,
            )  # fmt: skip
            return self._kept(version, Path(folder), scores["rewards"], scores["why_unscored"])

    def _kept(
        self, version: int, folder: Path, rewards: Sequence[float | None], why: str
    ) -> list[PromptSample]:
        """Keep the pictures in a folder, or the videos with their middle frames."""
        samples, files = [], sorted(each for each in folder.iterdir() if each.is_file())
        for path, reward in zip(files, rewards, strict=True):
            frames = sorted(path.with_suffix("").glob("*.png"))
            links = []
            for each in [*frames[len(frames) // 2 :][:1], path]:
                name = f"prompt-{self._number}-{version}-{path.stem}{each.suffix}"
                keep_newest(self.history.prompted, name, each.read_bytes(), MAX_FILES)
                links.append(f"/v1/media/{name}")
            samples.append(PromptSample(
                version=version, still=links[0], media=links[-1], reward=reward,
                why_unscored=why if reward is None else "",
            ))  # fmt: skip
        return samples


def sample_routes(sampling: SampleNow) -> APIRouter:
    router = APIRouter(tags=["versions"])

    @router.post("/v1/samples", operation_id="sample_prompt", responses=errors(404, 409, 503))
    async def samples(request: SampleRequest) -> list[PromptSample]:
        """Sample a prompt with one or two versions, from the same noise, as `digenrl generate`."""
        return await sampling.samples(request)

    return router

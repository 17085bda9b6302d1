"""Generation over a loaded policy: by a rollout worker, or by a trainer's device on loan (TAG).

A fragment is generated one denoising step at a time. Between two steps it may wait for any time
while the device trains, and continues unchanged: its noise, states and conditions are its own, and
no gradient, mode or random state of the network is touched. A finished fragment may be decoded
concurrently with the next one (`shared.diffusion.sampling.decoding`).
"""

import asyncio
from collections.abc import Awaitable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from shared.devices.protocols import GeneratedFragment
from shared.diffusion.loading.device import RowsAtOnce, fits, retry_after_release
from shared.diffusion.loading.models import Conditions, repeat_rows, taken
from shared.diffusion.policy import LoadedPolicy, sampling_plan
from shared.diffusion.sampling.decoding import SharedDevice, decoded
from shared.diffusion.sampling.encoding import encoded
from shared.diffusion.sampling.sampler import Denoising
from shared.diffusion.sampling.tensors import pack, unpack_conditions
from shared.diffusion.training.rows import row_kind
from shared.diffusion.weights.trained_weights import StagedTensors, Staging
from shared.errors import ContractError, FaultyConditions, IntegrityError
from shared.learning.seeds import group_seed, sample_seed
from shared.limits import MAX_DEVICE_PROMPTS
from shared.messages.contracts import GenerateFragment
from shared.messages.workers import MemoryShortage
from shared.recipe.recipe import Recipe
from shared.run.manifest import FetchedObject, StoredTensors, is_change

MEMORY_REMEDY = (
    "use a GPU with more memory, a smaller model.height, width or frames, or model.dtype "
    '= "bfloat16"'
)
DECODE_LESS = f"set model.vae_tiling = true, or {MEMORY_REMEDY}"


@dataclass(slots=True, kw_only=True)
class GenerationInProgress:
    """Holds a fragment while it is generated; only `Generator.advance` changes it."""

    task: GenerateFragment
    weights_digest: str
    """Digest of the weights that it began with, and has to be finished with."""
    denoising: Denoising
    conditions: Conditions
    """Conditioning, a row per sample."""
    given: bool = False
    """Whether an encoder has made the conditions, of which the network has seen nothing yet."""
    seconds: float = 0.0
    """Seconds that the device was busy with it."""
    shortage: MemoryShortage | None = None
    """The first memory shortage, if any."""
    queued: torch.cuda.Event | None = None
    """Occurs when a GPU has finished the last queued step."""

    def add_seconds(self, seconds: float) -> None:
        self.seconds += seconds

    @property
    def done(self) -> bool:
        """Whether every denoising step is taken, and only `Generator.finish` is left."""
        return self.denoising.done


class Generator:
    """Generates fragments. It is not thread-safe: only `stage`, `packed`, and `conditions` of a
    recently used prompt, may run concurrently with another call.

    ``loaded`` needs its transformer and decoder parts, and the text part unless every fragment is
    begun with conditions.
    """

    def __init__(self, recipe: Recipe, loaded: LoadedPolicy, *, runs_ahead: bool = False) -> None:
        """``runs_ahead``: a denoising step may be queued on a GPU while it takes the one before,
        so that it never waits for the host. Not where it has to be called back within a step."""
        self._recipe = recipe
        self._runs_ahead = runs_ahead
        self._model, self._device = loaded.model, loaded.device
        self._weights = loaded.in_use
        self._sets = loaded.sets
        size = recipe.model
        self._shape = self._model.latent_shape(
            height=size.height, width=size.width, frames=size.frames
        )
        self._shared = SharedDevice(self._device)
        self._at_once = RowsAtOnce(self._device, waited=self._shared.waited)
        """Samples per denoising step: all of a fragment, until one does not fit."""
        self._encoded = lru_cache(maxsize=MAX_DEVICE_PROMPTS)(self._encode)

    @property
    def device(self) -> torch.device:
        return self._device

    def stage(self, weights: bytes) -> StagedTensors:
        """Prepares weights that are one object for `adopt`, in any thread and at any time.

        Raises:
            ContractError: if it holds no tensors.
            IntegrityError: if they belong to another adapter.
            OutOfMemory: if there is no room for both.
        """
        with self._fits_second_weights():
            staging = Staging(self._model.transformer)
            staging.add(FetchedObject(weights, None))
            return staging.finish()

    async def fetch(self, weights: StoredTensors) -> StagedTensors:
        """Fetches weights and prepares them for `adopt`, one object after the other, in other
        threads; raises as `stage`, and IntegrityError if an object is not in the store."""
        with self._fits_second_weights():
            network, change = self._model.transformer, is_change(weights.ref)
            staging = await asyncio.to_thread(Staging, network, is_change=change)
            async for part in weights.parts():
                await asyncio.to_thread(staging.add, part)
            return await asyncio.to_thread(staging.finish, weights.weights_digest)

    def _fits_second_weights(self) -> AbstractContextManager[None]:
        return fits(self._device, "weights beside those in use", "use a GPU with more memory")

    def adopt(self, staged: StagedTensors) -> str:
        """Puts staged weights in use, once and in no time; returns their digest."""
        return self._weights.adopt(staged)

    def load(self, weights: bytes) -> str:
        """Stages and adopts weights; returns their digest."""
        return self.adopt(self.stage(weights))

    def weights_digest(self) -> str:
        with self._sets.sampling():
            return self._weights.digest()

    def conditions(
        self, prompt: str, source: bytes | None = None, negative: str | None = None
    ) -> bytes:
        """Returns the conditioning of ``prompt``, of the file of its source image and of its own
        negative prompt, encoded unless they were used recently."""
        return pack(self._encoded(prompt, source, negative))

    def begin(
        self, task: GenerateFragment, conditions: bytes | None = None, source: bytes | None = None
    ) -> GenerationInProgress:
        """Begins a fragment as noise, without a denoising step: from ``conditions``, which an
        encoder has made of its prompt, or with the prompt, and the file of its ``source`` image,
        encoded here.

        Raises:
            FaultyConditions: if they are invalid.
            ContractError: if the source is no image, or missing, or the model takes none.
            OutOfMemory: if there is no room to begin it.
        """
        with fits(self._device, "beginning a fragment", "use a GPU with more memory"):
            begun = partial(self._begun, task, conditions, source)
            return self._shared.begin(partial(retry_after_release, self._device, begun))

    def _begun(
        self, task: GenerateFragment, conditions: bytes | None, source: bytes | None
    ) -> GenerationInProgress:
        prompt = task.prompt
        given = (prompt.text, source, prompt.negative_prompt)
        return GenerationInProgress(
            task=task,
            weights_digest=self.weights_digest(),
            denoising=Denoising(
                sampling_plan(self._recipe, window_start=task.window_start),
                seeds=self._seeds(task),
                shape=self._shape,
                device=self._device,
                shared_seed=self._shared_seed(task),
            ),
            conditions=repeat_rows(
                self._encoded(*given) if conditions is None else self._read(conditions),
                task.fragment.num_samples,
            ),
            given=conditions is not None,
        )

    def advance(self, work: GenerationInProgress) -> None:
        """Takes one denoising step. The device has done it when this returns, or if it runs ahead,
        all steps before it.

        Raises:
            IntegrityError: if the weights in use are not those that the fragment began with.
            FaultyConditions: if the network does not take the conditions that it was begun with.
            OutOfMemory: if even one sample at a time does not fit.
        """
        self._check_weights(work)
        fits_here = self._fits("a denoising step of", work, MEMORY_REMEDY)
        counted, turn = self._shared.counted(work.add_seconds), self._shared.step()
        with counted, fits_here, _takes_conditions(work), turn, self._sets.sampling():
            work.denoising.advance(partial(self._velocity, work))
            self._keep_pace(work)

    def finish(self, work: GenerationInProgress) -> GeneratedFragment:
        """Decodes and packs a fragment whose steps are all taken.

        Raises:
            ValueError: if steps are left.
            ContractError: if its latents hold values that no working network gives.
            IntegrityError: as in `advance`.
            OutOfMemory: if one sample cannot be decoded at a time.
        """
        self.check_finished(work)
        return self.packed(work)

    def check_finished(self, work: GenerationInProgress) -> None:
        """Raises ValueError if steps are left, and IntegrityError as `advance` does."""
        if not work.done:
            raise ValueError("this fragment has denoising steps left")
        self._check_weights(work)

    @torch.no_grad()
    def packed(self, work: GenerationInProgress) -> GeneratedFragment:
        """Decode and pack a finished fragment, with any weights in use: may run concurrently with
        all other calls. Raises as `finish` does of what it makes."""
        table, rows = self._recipe.model, row_kind(self._recipe)
        remedy = DECODE_LESS if table.frames > 1 and not table.vae_tiling else MEMORY_REMEDY

        def made() -> tuple[Tensor, bytes]:
            with self._shared.counted(work.add_seconds):
                images = self.decoded(work.denoising.latents)
            return images, rows.pack(work.denoising, self._seeds(work.task))

        with self._fits("decoding", work, remedy):
            images, trajectory = self._shared.decode(made, work.queued)
        return GeneratedFragment(
            trajectory=trajectory,
            media=pack({"images": images}),
            weights_digest=work.weights_digest,
            seconds=work.seconds,
            shortage=work.shortage,
        )

    def generate(self, task: GenerateFragment, source: bytes | None = None) -> GeneratedFragment:
        """Generates a fragment from beginning to end; ``source`` is the file of the image that its
        prompt edits."""
        work = self.begin(task, source=source)
        while not work.done:
            self.advance(work)
        return self.finish(work)

    def decoded(self, latents: Tensor) -> Tensor:
        """Decodes latents (B, ...) to images or videos on the host."""
        return decoded(self._model, latents, self._device)

    def _velocity(self, work: GenerationInProgress, latents: Tensor, sigma: Tensor) -> Tensor:
        """Returns velocities of latents (B, ...), for as many samples at a time as fit. Every
        sample has its own noise, so it changes only by rounding. A row that samples share is one of
        them: their conditions are the same."""
        guidance, conditions = self._recipe.model.guidance, work.conditions
        before = self._at_once.most

        def velocity(rows: slice) -> Tensor:
            row_conditions = {name: tensor[rows] for name, tensor in conditions.items()}
            return self._model.velocity(
                latents[rows], sigma[rows], row_conditions, guidance=guidance
            )

        velocities = self._at_once.run(len(latents), velocity)
        if self._at_once.most != before:
            work.shortage = self._halved(len(latents) if before is None else before)
        return velocities

    def _halved(self, before: int) -> MemoryShortage:
        most = self._at_once.most
        return MemoryShortage(
            what=f"a denoising step of {before} samples of {self._sample}",
            since=f"{most} at a time, which takes longer",
            remedy=f"schedule.fragment_size of at most {most}",
        )

    @property
    def _sample(self) -> str:
        size = self._recipe.model
        return f"{size.height} x {size.width} x {size.frames}"

    def _fits(
        self, what: str, work: GenerationInProgress, remedy: str
    ) -> AbstractContextManager[None]:
        num_samples = work.task.fragment.num_samples
        return fits(
            self._device, f"{what} one sample of {self._sample} (fragment of {num_samples})", remedy
        )

    def _seeds(self, task: GenerateFragment) -> list[int]:
        fragment, seed = task.fragment, self._recipe.run.seed
        return [
            sample_seed(seed, fragment.batch, fragment.group, sample) for sample in fragment.samples
        ]

    def _shared_seed(self, task: GenerateFragment) -> int | None:
        """Returns the seed of the noise that the samples begin at, if their group shares one."""
        if not self._recipe.sampling.shared_noise:
            return None
        fragment = task.fragment
        return group_seed(self._recipe.run.seed, fragment.batch, fragment.group)

    def _encode(self, prompt: str, source: bytes | None, negative: str | None) -> Conditions:
        return encoded(self._model, self._recipe, prompt, source, negative)

    def _read(self, packed: bytes) -> Conditions:
        """Reads conditions into memory of their own, which starts where kernels like it to."""
        try:
            tensors = unpack_conditions(packed)
        except ContractError as error:
            raise FaultyConditions(str(error)) from error
        return {name: tensor.to(self._device, copy=True) for name, tensor in tensors.items()}

    def _check_weights(self, work: GenerationInProgress) -> None:
        if self.weights_digest() != work.weights_digest:
            raise IntegrityError(
                f"fragment {work.task.fragment.slot} began with weights that are no longer in use"
            )

    def _keep_pace(self, work: GenerationInProgress) -> None:
        """Wait until a GPU has no queued work, so that other calls do not wait behind this step; if
        it runs ahead, until only this step is queued."""
        if self._device.type != "cuda":
            return
        before, work.queued = work.queued, torch.cuda.Event(blocking=True)
        work.queued.record(torch.cuda.current_stream(self._device))
        awaited = before if self._runs_ahead else work.queued
        if awaited is not None:
            awaited.synchronize()


def _takes_conditions(work: GenerationInProgress) -> AbstractContextManager[None]:
    """Surrounds a fragment's denoising step: at the first one, the network may not take conditions
    that an encoder has made."""
    is_first = work.given and not work.denoising.num_steps_done
    return taken(FaultyConditions) if is_first else nullcontext()


@dataclass(frozen=True, slots=True)
class LocalGeneration:
    """Wraps a fragment that is generated on this process's device."""

    _generator: Generator
    _work: GenerationInProgress

    @property
    def task(self) -> GenerateFragment:
        return self._work.task

    @property
    def done(self) -> bool:
        return self._work.done

    @property
    def seconds(self) -> float:
        return self._work.seconds

    async def advance(self) -> None:
        await asyncio.to_thread(self._generator.advance, self._work)

    def finish(self) -> Awaitable[GeneratedFragment]:
        self._generator.check_finished(self._work)
        return asyncio.to_thread(self._generator.packed, self._work)


class LocalGenerator:
    """Implements `shared.devices.protocols.GeneratingDevice`; each call runs in a thread."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    def weights_digest(self) -> str:
        return self._generator.weights_digest()

    async def begin(
        self, task: GenerateFragment, conditions: bytes | None = None, source: bytes | None = None
    ) -> LocalGeneration:
        work = await asyncio.to_thread(self._generator.begin, task, conditions, source)
        return LocalGeneration(self._generator, work)

    async def conditions(
        self, prompt: str, source: bytes | None = None, negative: str | None = None
    ) -> bytes:
        return await asyncio.to_thread(self._generator.conditions, prompt, source, negative)

"""Fragments that a shard group generates: each rank takes a part of the samples.

A rank generates with the whole network, which all gather before; so no rank waits for another
within a denoising step, and each may lack memory for itself.
"""

import asyncio
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from services.trainer.engine.world import num_ranks, this_rank
from services.trainer.fluid.links import DONE, Message
from services.trainer.fluid.shard import Shard
from services.trainer.fluid.shard_group import ShardGroup
from shared import errors
from shared.devices.protocols import GeneratedFragment
from shared.diffusion.generation import GenerationInProgress, Generator
from shared.diffusion.sampling.tensors import joined, joined_trajectories
from shared.errors import DigenRLError, OutOfMemory
from shared.messages.contracts import GenerateFragment
from shared.messages.workers import MemoryShortage


def rank_fragment(task: GenerateFragment, rank: int, ranks: int) -> GenerateFragment | None:
    """Return a rank's part of a fragment; None if there are fewer samples than ranks."""
    each, rest = divmod(task.fragment.num_samples, ranks)
    number = each + (rank < rest)
    if not number:
        return None
    first = task.fragment.first_sample + rank * each + min(rank, rest)
    changes = {"first_sample": first, "num_samples": number}
    return task.model_copy(update={"fragment": task.fragment.model_copy(update=changes)})


class RankFragments:
    """This rank's parts of fragments, by the first rank's numbers."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self.generator = Generator(shard.recipe, shard.loaded)
        self.begun: dict[int, GenerationInProgress] = {}

    def answer(self, message: Message) -> Message:
        """Do this rank's part of a step of a fragment. If that fails, the answer has the error:
        other ranks have done theirs."""
        self._shard.hold_whole()
        self.generator.weights_digest()  # all ranks take it together, also those without samples
        try:
            return getattr(self, f"_{message.values['do']}")(message)  # type: ignore[no-any-return]
        except DigenRLError as error:
            about = {"error": type(error).__name__, "reason": str(error)}
            if isinstance(error, OutOfMemory):
                about |= {"what": error.what, "remedy": error.remedy}
            return Message("failed", about)

    def _begin(self, message: Message) -> Message:
        packed, conditions, source = message.blobs
        number, kept = message.values["number"], message.values["kept"]
        self.begun = {each: self.begun[each] for each in kept if each in self.begun}
        task = GenerateFragment.model_validate_json(packed)
        if (own := rank_fragment(task, this_rank(), num_ranks())) is not None:
            self.begun[number] = self.generator.begin(own, conditions or None, source or None)
        return DONE

    def _advance(self, message: Message) -> Message:
        if (work := self.begun.get(message.values["number"])) is not None:
            self.generator.advance(work)
        return DONE

    def _finish(self, message: Message) -> Message:
        work = self.begun.pop(message.values["number"], None)
        if work is None:
            return DONE
        result = self.generator.finish(work)
        shortage = None if result.shortage is None else result.shortage.model_dump()
        return Message("made", {"shortage": shortage}, (result.trajectory, result.media))


class GroupGenerator:
    """Implements `GeneratingDevice`, on the first rank."""

    def __init__(self, group: ShardGroup, fragments: RankFragments) -> None:
        self._group, self._fragments = group, fragments
        self._numbers = itertools.count()
        self._kept = weakref.WeakSet[GroupGeneration]()

    def weights_digest(self) -> str:
        return self._group.weights_digest()

    async def begin(
        self, task: GenerateFragment, conditions: bytes | None = None, source: bytes | None = None
    ) -> "GroupGeneration":
        number, packed = next(self._numbers), task.model_dump_json().encode()
        prompt = task.prompt
        encoded = conditions or await self.conditions(prompt.text, source, prompt.negative_prompt)
        await self.ask(
            "begin", number, (packed, encoded, b""), (packed, conditions or b"", source or b"")
        )
        begun = GroupGeneration(self, task, number, self._fragments.begun[number])
        self._kept.add(begun)
        return begun

    async def conditions(
        self, prompt: str, source: bytes | None = None, negative: str | None = None
    ) -> bytes:
        """Encode a prompt on this rank, which alone has the text encoders."""
        encode = self._fragments.generator.conditions
        return await asyncio.to_thread(encode, prompt, source, negative)

    async def ask(
        self, do: str, number: int, blobs: Sequence[bytes] = (), own: Sequence[bytes] | None = None
    ) -> list[Message]:
        """Have each rank do its part; return the answers by rank. ``own``: the first rank's blobs,
        if they are others. Raises the error of a rank whose part failed."""
        values = {"do": do, "number": number, "kept": sorted(each.number for each in self._kept)}
        message = Message("fragment", values, blobs)
        mine = message if own is None else Message("fragment", values, own)
        answers = await self._group.each(message, partial(self._fragments.answer, mine))
        for rank, answer in enumerate(answers):
            if answer.name == "failed":
                raise _rank_error(answer, rank)
        return answers


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class GroupGeneration:
    """Implements `Generation`."""

    _generator: GroupGenerator
    task: GenerateFragment
    number: int
    _own: GenerationInProgress
    """The first rank's part, which has as many steps as every other."""

    @property
    def done(self) -> bool:
        return self._own.done

    @property
    def seconds(self) -> float:
        return self._own.seconds

    async def advance(self) -> None:
        await self._generator.ask("advance", self.number)

    async def finish(self) -> GeneratedFragment:
        answers = await self._generator.ask("finish", self.number)
        results = [each for each in answers if each.name == "made"]
        lacks = [each.values["shortage"] for each in results if each.values["shortage"] is not None]
        return GeneratedFragment(
            trajectory=joined_trajectories([each.blobs[0] for each in results]),
            media=joined([each.blobs[1] for each in results]),
            weights_digest=self._own.weights_digest,
            seconds=self.seconds,
            shortage=MemoryShortage.model_validate(lacks[0]) if lacks else None,
        )


def _rank_error(answer: Message, rank: int) -> DigenRLError:
    values = dict(answer.values)
    kind, reason = getattr(errors, values.pop("error")), f"{values.pop('reason')} (on rank {rank})"
    error: DigenRLError = kind(reason, **values)
    return error

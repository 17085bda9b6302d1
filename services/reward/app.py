"""The reward worker: scores generated fragments, and reports numbers or the reason why not."""

import asyncio
import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from functools import partial

import structlog

from services.reward import limits
from services.reward.scorer import WeightedScorer, scorer_inputs
from services.reward.scoring import MediaSize, ScoringOutcome, load_source, read_media, score_each
from shared.bus.queue import Delivery
from shared.bus.traces import about, span
from shared.errors import ContractError, DigenRLError, Unavailable
from shared.learning.pictures import WHITE
from shared.limits import DEADLINE_FACTOR, FIRST_DEADLINE_S, MAX_SCORE, MIN_DEADLINE_S
from shared.messages import subjects
from shared.messages.contracts import FragmentFailed, FragmentGenerated, FragmentScored, Message
from shared.process.failpoints import reach
from shared.process.watchdog import WARNING_SHARE
from shared.process.worker import WorkerContext, patiently
from shared.run.sources import SourceImages
from shared.telemetry import FRAGMENTS, STAGE_SECONDS

MIN_SAMPLES_FOR_WARNING = 100
"""Samples from which equal scores of all of them are no accident."""

log = structlog.get_logger()


class RewardApp:
    def __init__(
        self,
        scorers: list[WeightedScorer],
        context: WorkerContext,
        *,
        deadline_s: float | None = None,
        longest_s: float = 0.0,
        size: MediaSize | None = None,
        background: str = WHITE,
    ) -> None:
        """``deadline_s`` is the time after which others may score this worker's fragment; None: it
        follows from what fragments took before. ``longest_s`` is how much longer one may take
        without a fault of this worker."""
        self._scorers = scorers
        self._bus = context.bus
        self._store = context.store
        self._worker = context.worker
        self._sources = SourceImages(context.store, context.bus)
        self._device = asyncio.Lock()
        self._deadline_s = deadline_s
        self._longest_s = longest_s
        self._size, self._background = size, background
        self._seconds: float | None = None
        """Longest time that a sample has taken so far."""
        self._spent: dict[str, float] = {}
        """Seconds by scorer."""
        self._num_scored = 0
        """Samples that took them."""
        self._seen: dict[str, tuple[float, float]] = {}
        """Lowest and highest score by scorer."""

    async def run(self) -> None:
        await self._bus.wait_for_streams()
        self._worker.rest()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._worker.report(self._bus))
            for _ in range(limits.MAX_FRAGMENTS):
                tasks.create_task(self._work(tasks))

    async def _work(self, tasks: asyncio.TaskGroup) -> None:
        queue = self._bus.queue(subjects.TRAJ, "reward", kind=FragmentGenerated)
        while True:
            async with contextlib.AsyncExitStack() as stack:
                if self._worker.progress.hangs(
                    WARNING_SHARE
                ):  # others do it, and this process ends
                    await asyncio.sleep(limits.HANG_CHECK_S)
                    continue
                delivery = await queue.next()
                if self._worker.progress.hangs(WARNING_SHARE):
                    await delivery.return_to_queue()
                    continue
                delivery.timeout_s = self._timeout(delivery.message)
                reported = await stack.enter_async_context(delivery)
                assert isinstance(reported, FragmentGenerated)
                event = await self._with_prompt_of_task(reported)
                if event is None:
                    await self._put_off(delivery, reported)
                    continue
                try:
                    with span("score", event, worker=self._worker.name):
                        scored = await self._score(event)
                except Unavailable:
                    raise
                except DigenRLError as error:
                    await self._fail(event, error)
                else:
                    tasks.create_task(self._tell(event, scored, stack.pop_all()))

    async def _with_prompt_of_task(self, event: FragmentGenerated) -> FragmentGenerated | None:
        """Return a result with the prompt of the scheduler's task, ignoring the worker's copy; None
        if the worker was given no such task."""
        slot = str(event.fragment.slot)
        task = await patiently(partial(self._bus.task_of, event), "task_unavailable", slot=slot)
        return None if task is None else event.model_copy(update={"prompt": task.prompt})

    async def _put_off(self, delivery: Delivery, event: FragmentGenerated) -> None:
        """Look again a little later for the task of a result: where NATS has lost both, the result
        may come again before the scheduler has given the same task once more. Then pass it over."""
        if delivery.number < limits.MAX_TASK_LOOKUPS:
            await delivery.return_to_queue(limits.TASK_LOOKUP_INTERVAL_S)
            return
        FRAGMENTS.labels(stage="reward", outcome="refused").inc()
        slot = str(event.fragment.slot)
        log.error("result_without_task", slot=slot, worker=event.worker)

    def _timeout(self, message: Message) -> float:
        """Returns the seconds until others may score a fragment, too: this worker may hang, and
        still report."""
        if self._deadline_s is not None:
            return self._deadline_s
        if self._seconds is None or not isinstance(message, FragmentGenerated):
            return FIRST_DEADLINE_S
        one = message.fragment.num_samples * self._seconds
        usual = max(MIN_DEADLINE_S, DEADLINE_FACTOR * limits.MAX_FRAGMENTS * one)
        return usual + limits.MAX_FRAGMENTS * self._longest_s

    async def _tell(
        self, event: FragmentGenerated, scored: FragmentScored, delivery: contextlib.AsyncExitStack
    ) -> None:
        """Publishes the result; then acknowledges the fragment, by leaving ``delivery``."""
        async with delivery:
            try:
                reach("reward.before-publish")
                first = await self._bus.publish(scored)
                reach("reward.before-acknowledgement")
            except Unavailable:
                raise
            except DigenRLError as error:
                await self._fail(event, error)
            else:
                self._worker.num_done += first
                FRAGMENTS.labels(stage="reward", outcome="done" if first else "duplicate").inc()

    async def _score(self, event: FragmentGenerated) -> FragmentScored:
        reading = partial(self._store.get, event.stored.media)
        media = await patiently(reading, "store_unavailable", slot=str(event.fragment.slot))
        looking = partial(self._sources.get, event.prompt.image)
        source = await patiently(looking, "store_unavailable", slot=str(event.fragment.slot))
        async with self._device:
            began = time.monotonic()
            with self._worker.doing("scoring"):
                outcomes = await asyncio.to_thread(self._outcomes, media, event, source)
            seconds = time.monotonic() - began
        await self._bury(event, outcomes)
        parts = {name: outcome.scores for name, outcome in outcomes.items()}
        self._seconds = max(self._seconds or 0.0, seconds / event.fragment.num_samples)
        STAGE_SECONDS.labels(stage="reward").observe(seconds)
        return FragmentScored(
            fragment=event.fragment,
            policy=event.policy,
            stored=event.stored,
            rewards=weighted_sum(parts, self._scorers),
            parts=parts,
            generated_by=event.worker,
            worker=self._worker.address,
            seconds=seconds,
        )

    def _outcomes(
        self, media: bytes, event: FragmentGenerated, source: bytes | None = None
    ) -> dict[str, ScoringOutcome]:
        images = read_media(media, event.fragment.num_samples, self._size)
        edited = None if source is None else load_source(source, images, self._background)
        metadata = [scorer_inputs(event.prompt, edited)] * len(images)
        is_last = event.fragment.attempt >= limits.LAST_ATTEMPT
        outcomes: dict[str, ScoringOutcome] = {}
        for scorer in self._scorers:
            began = time.monotonic()
            try:
                outcomes[scorer.name] = score_each(scorer, images, metadata, may_all_fail=is_last)
            finally:
                spent = self._spent.get(scorer.name, 0.0) + time.monotonic() - began
                self._spent[scorer.name] = spent
        self._num_scored += len(images)
        self._seen = {name: ranged(self._seen.get(name), each) for name, each in outcomes.items()}
        if len(self._scorers) > 1:
            same = always_same(self._seen) if self._num_scored >= MIN_SAMPLES_FOR_WARNING else ""
            self._worker.remark = spent_by(self._spent, self._num_scored) + same
        return outcomes

    async def _bury(self, event: FragmentGenerated, outcomes: Mapping[str, ScoringOutcome]) -> None:
        """Report why samples have no score."""
        first = event.fragment.first_sample
        for scorer, outcome in outcomes.items():
            if outcome.reasons:
                reasons = {first + number: why for number, why in outcome.reasons.items()}
                await self._bus.bury_samples(event, scorer, reasons)

    async def _fail(self, event: FragmentGenerated, error: DigenRLError) -> None:
        with about(event):
            log.error("fragment_failed", slot=str(event.fragment.slot), error=str(error))
        FRAGMENTS.labels(stage="reward", outcome="failed").inc()
        await self._bus.publish(
            FragmentFailed(
                slot=event.fragment.slot,
                stage="reward",
                reason=str(error)[:4000],
                worker=self._worker.address,
            )
        )


def ranged(bounds: tuple[float, float] | None, outcome: ScoringOutcome) -> tuple[float, float]:
    """Return the lowest and the highest score so far; infinities the wrong way round before one."""
    low, high = bounds or (math.inf, -math.inf)
    scores = [score for score in outcome.scores if score is not None]
    return min([low, *scores]), max([high, *scores])


def always_same(ranges: Mapping[str, tuple[float, float]]) -> str:
    """Return which scorers teach nothing, since all samples have the same score.

    >>> always_same({"proxy": (0.1, 0.9), "mine": (0.0, 0.0)})
    '; mine gives every sample 0, which teaches nothing'
    """
    return "".join(
        f"; {name} gives every sample {low:g}, which teaches nothing"
        for name, (low, high) in ranges.items() if low == high
    )  # fmt: skip


def spent_by(spent: Mapping[str, float], samples: int) -> str:
    """Return how long each scorer takes for a sample, the slowest first.

    >>> spent_by({"proxy": 0.01, "mine": 1.5}, 20)
    'of a sample, mine takes 75.0 ms, proxy 0.5 ms'
    """
    slowest = sorted(spent, key=lambda name: -spent[name])
    each = [f"{name} {1000 * spent[name] / max(1, samples):.1f} ms" for name in slowest]
    return f"of a sample, {each[0].replace(' ', ' takes ', 1)}" + "".join(
        f", {x}" for x in each[1:]
    )


def weighted_sum(
    parts: Mapping[str, Sequence[float | None]], scorers: list[WeightedScorer]
) -> tuple[float | None, ...]:
    """Returns one reward per sample: the sum of its scores, each times its scorer's weight; None if
    a score is missing."""
    columns = zip(*(parts[scorer.name] for scorer in scorers), strict=True)
    weights = [scorer.weight for scorer in scorers]
    return tuple(_weighted(scores, weights) for scores in columns)


def _weighted(scores: Sequence[float | None], weights: Sequence[float]) -> float | None:
    numbers = [score for score in scores if score is not None]
    if len(numbers) < len(scores):
        return None
    total = math.fsum(weight * score for weight, score in zip(weights, numbers, strict=True))
    if abs(total) > MAX_SCORE:
        raise ContractError(
            f"a weighted sum of scores of {total:g}; at most {MAX_SCORE:g}: make the weights of "
            "reward.scorers smaller"
        )
    return total

"""Follows the commits of a run and evaluates the versions that are due.

It gets no announcements and keeps no state: at each check, the recipe lists the due versions, and
the records the finished ones. So it may be killed at any time, start late, or run twice.
"""

import asyncio

import structlog

from digenrl.evaluation.progress import PENDING, Progress, show
from digenrl.evaluation.records import EvaluationRecord
from digenrl.evaluation.run import RunEvaluator
from digenrl.evaluation.settings import due_versions
from shared.errors import ContractError, IntegrityError, Unavailable, UserError
from shared.models.memory import Residence
from shared.recipe.recipe import Recipe
from shared.run.commits import newest_commit, read_commit
from shared.run.layout import set_evaluation_interval
from shared.run.run_recipe import read_recipe
from shared.store import ObjectStore

POLL_S = 1.0

log = structlog.get_logger()


class Follower:
    def __init__(
        self,
        store: ObjectStore,
        run: str,
        progress: Progress,
        *,
        worker: str,
        every: int | None = None,
        memory: Residence | None = None,
    ) -> None:
        """``every``: optimizer steps between evaluations, and ``memory``: location of the network's
        blocks; both override the recipe."""
        self._store = store
        self._run = run
        self._progress = progress
        self._worker = worker
        self._every, self._memory = every, memory
        self._evaluator: RunEvaluator | None = None
        self._gone: set[int] = set()
        """Due versions whose weights were deleted before their evaluation (run.keep_last)."""

    async def follow(self, *, stay: bool = True) -> None:
        """Evaluate versions as soon as they are due and committed: until all of the run's versions
        are evaluated, or with ``stay`` without end."""
        while True:
            try:
                has_evaluated = await self._evaluate_next()
            except Unavailable as error:
                log.warning("store_unavailable", error=str(error))
                has_evaluated = False
            if not has_evaluated:
                if not stay and self._progress.pending == []:
                    log.info("run_evaluated")
                    return
                await asyncio.sleep(POLL_S)

    async def catch_up(self) -> None:
        """Evaluate all versions that are due and committed now."""
        while await self._evaluate_next():
            pass

    async def _evaluate_next(self) -> bool:
        """Evaluate one version, unless its weights are deleted; returns False if none is due."""
        evaluator = await self._look()
        pending = self._progress.pending
        commit = await read_commit(self._store, self._run, pending[0]) if pending else None
        if commit is None:
            return False
        log.info("evaluating", version=commit.policy.version)
        try:
            self._tell(await evaluator.record_of(commit))
        except IntegrityError as error:
            newest = await newest_commit(self._store, self._run)
            if newest is None or newest.policy.version == commit.policy.version:
                raise
            log.warning("version_not_kept", version=commit.policy.version, reason=str(error))
            self._gone.add(commit.policy.version)
        return True

    async def _look(self) -> RunEvaluator:
        """Update what is due and what is done. The recipe is read again each time: a resumed run
        may have more steps, or other evaluation settings."""
        recipe = await read_recipe(self._store, self._run)
        if recipe is None:
            raise ContractError(f"the recipe of run {self._run} is gone")
        every = self._every or recipe.evaluation.every
        if every is None:
            raise UserError(
                f"--every: the recipe of {self._run!r} does not set evaluation.every; give the "
                "number of optimizer steps between evaluations"
            )
        await set_evaluation_interval(self._store, self._run, every)
        evaluator = await self._evaluator_of(recipe)
        done = await evaluator.evaluations.versions()
        due = due_versions(every, recipe.run.steps)
        pending = [version for version in due if version not in (*done, *self._gone)]
        self._progress.evaluated, self._progress.pending = done, pending
        PENDING.set(len(pending))
        return evaluator

    async def _evaluator_of(self, recipe: Recipe) -> RunEvaluator:
        if self._evaluator is None or self._evaluator.recipe != recipe:
            self._evaluator = RunEvaluator(
                self._store, recipe, worker=self._worker, memory=self._memory
            )
            await self._evaluator.announce()  # what an evaluator had added when it was killed
            for version in (await self._evaluator.evaluations.versions())[-1:]:
                newest = await self._evaluator.evaluations.read(version)
                if newest is not None:  # measured before this process started
                    show(newest)
        return self._evaluator

    def _tell(self, record: EvaluationRecord) -> None:
        show(record)
        log.info(
            "evaluated",
            version=record.version,
            reward=record.quality.reward,
            gold=record.quality.gold,
            seconds=record.seconds,
        )
        for alarm in record.alarms:
            log.warning("reward_hacking", version=record.version, alarm=alarm)
            self._progress.alarms.append(f"version {record.version}: {alarm}")

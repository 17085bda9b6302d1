"""Follows the commits of a run, and evaluates the versions that are due.

Nothing is announced to it and nothing is remembered: at each look, what is due follows from the
recipe, and what is done from the records. So it may be killed at any time, start late, or run
twice.
"""

import asyncio

import structlog

from digenrl.evaluation.progress import PENDING, Progress, show
from digenrl.evaluation.records import EvaluationRecord
from digenrl.evaluation.run import RunEvaluator
from digenrl.evaluation.settings import due_versions
from shared.errors import ContractError, IntegrityError, Unavailable, UserError
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
    ) -> None:
        """``every``: optimizer steps between evaluations, in place of the recipe's."""
        self._store = store
        self._run = run
        self._progress = progress
        self._worker = worker
        self._every = every
        self._evaluator: RunEvaluator | None = None
        self._gone: set[int] = set()
        """Versions that were due, and whose weights are not kept (run.keep_last)."""

    async def follow(self, *, stay: bool = True) -> None:
        """Evaluate what is due as soon as it is committed: for ever, or if it is not to ``stay``
        until every version of the run is evaluated."""
        while True:
            try:
                found = await self._evaluate_next()
            except Unavailable as error:
                log.warning("store_unavailable", error=str(error))
                found = False
            if not found:
                if not stay and self._progress.pending == []:
                    log.info("run_evaluated")
                    return
                await asyncio.sleep(POLL_S)

    async def catch_up(self) -> None:
        """Evaluate everything that is due and committed by now."""
        while await self._evaluate_next():
            pass

    async def _evaluate_next(self) -> bool:
        """Whether a version was due and committed. It has a record now, unless it is deleted."""
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
        """What is due and not done. The recipe is read anew each time: a run that is resumed may
        have more steps, or other settings of its evaluation."""
        recipe = await read_recipe(self._store, self._run)
        if recipe is None:
            raise ContractError(f"the recipe of run {self._run} is gone")
        every = self._every or recipe.evaluation.every
        if every is None:
            raise UserError(
                f"--every: the recipe of {self._run!r} sets no evaluation.every; say how many "
                "optimizer steps lie between evaluations"
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
            self._evaluator = RunEvaluator(self._store, recipe, worker=self._worker)
            for version in (await self._evaluator.evaluations.versions())[-1:]:
                newest = await self._evaluator.evaluations.read(version)
                if newest is not None:  # what was measured before this process began
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

"""The whole loop in one process, without a broker: read this first.

    python examples/one_process.py recipes/digits.toml --steps 5

Sample groups of images, score them, turn scores into advantages, take one optimizer step, repeat.
The services do the same with the same functions; what they add is that each part runs where and
when it can, and that any of them may die.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import safetensors.numpy
from rich import print

from services.reward.scorer import build_scorers, scorer_inputs
from services.reward.scoring import load_source
from services.trainer.engine.trainer_engine import TrainerEngine
from shared.devices.protocols import GroupData
from shared.diffusion.generation import Generator
from shared.diffusion.policy import load_policy
from shared.learning.advantages import SampleScores
from shared.learning.prompts import PromptOrder, SourceFiles, read_prompts
from shared.messages.contracts import Fragment, GenerateFragment, Policy, Prompt
from shared.recipe.recipe import Recipe, load_recipe

Advantages = Callable[[Sequence[float]], Sequence[float]]


class Loop:
    """Rollout, reward and trainer of one recipe, one after the other."""

    def __init__(self, recipe: Recipe, *, advantages: Advantages | None = None) -> None:
        """``advantages``: of a group's rewards, in place of the recipe's."""
        self.recipe = recipe
        self.trainer = TrainerEngine(recipe)
        self._rollout = Generator(recipe, load_policy(recipe, {"transformer", "text", "decoder"}))
        self._scorers = build_scorers(recipe.reward.scorers)
        self._advantages = advantages
        self._order = PromptOrder(read_prompts(recipe.data.prompts), recipe.run.seed)
        self._sources = SourceFiles(recipe.data.prompts)

    def steps(self, count: int) -> Iterator[dict[str, float]]:
        """Train ``count`` batches; gives the metrics of each."""
        for batch in range(count):
            made = self.trainer.weights()
            [weights] = made.weights
            policy = Policy(version=batch, weights_digest=self._rollout.load(bytes(weights.pack())))
            assert policy.weights_digest == made.digest
            held: list[GroupData] = []
            scored: list[SampleScores] = []
            for group in range(self.recipe.batch.groups):
                prompt = self._order.of_group(batch, group, self.recipe.batch.groups)
                data, rewards, parts = self._group(group, prompt, policy)
                held.append(data)
                scored.append((rewards, parts))
            metrics = self._train(batch, held, scored)
            known = [each or 0.0 for rewards, _ in scored for each in rewards]
            yield {"reward": sum(known) / len(known), **metrics}

    def _train(
        self, batch: int, groups: Sequence[GroupData], scored: Sequence[SampleScores]
    ) -> dict[str, float]:
        """Take the optimizer steps of a batch, each with its part of the groups."""
        if self.recipe.algorithm.advantage_std == "batch":
            final = self.recipe.advantages.for_batch(scored)
            groups = [replace(one, advantages=of) for one, of in zip(groups, final, strict=True)]
        self.trainer.begin()
        metrics: dict[str, float] = {}
        size = len(groups) // self.recipe.trainer.updates
        for first in range(0, len(groups), size):
            for data in groups[first : first + size]:
                self.trainer.train(self.trainer.read(data))
            metrics = self.trainer.step(batch)
        return metrics

    def _group(
        self, group: int, prompt: Prompt, policy: Policy
    ) -> tuple[GroupData, tuple[float, ...], Mapping[str, Sequence[float]]]:
        """Generate and score a group; returns it with its rewards and the scores behind them."""
        sampling, batch = self.recipe.sampling, self.recipe.batch
        task = GenerateFragment(
            fragment=Fragment(
                batch=policy.version,
                group=group,
                first_sample=0,
                num_samples=batch.group_size,
                attempt=0,
            ),
            policy=policy,
            prompt=prompt,
            window_start=sampling.moving_window.start(self.recipe.run.seed, policy.version, group),
            worker="one-process",
        )
        source = self._sources.read(prompt.image)
        conditions = self._rollout.conditions(prompt.text, source)
        made = self._rollout.generate(task, source)
        images = safetensors.numpy.load(made.media)["images"]
        edited = None if source is None else load_source(source, images)
        metadata = [scorer_inputs(prompt, edited)] * len(images)
        parts = {s.name: s.score(images, metadata) for s in self._scorers}
        columns = zip(*(parts[s.name] for s in self._scorers), strict=True)
        weights = [s.weight for s in self._scorers]
        rewards = tuple(
            math.fsum(w * score for w, score in zip(weights, scores, strict=True))
            for scores in columns
        )
        rule = self.recipe.advantages
        given = self._advantages
        advantages = rule.for_group(rewards, parts) if given is None else given(rewards)
        data = GroupData(
            trajectories=(made.trajectory,), conditions=conditions, advantages=tuple(advantages)
        )
        return data, rewards, parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    for number, metrics in enumerate(Loop(load_recipe(arguments.recipe)).steps(arguments.steps), 1):
        print(
            f"step {number}  reward {metrics['reward']:.3f}  "
            f"on-policy error {metrics['onpolicy_ratio_error']:.1e}"
        )


if __name__ == "__main__":
    main()

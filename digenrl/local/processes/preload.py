"""Chooses what is imported ahead for the processes of a run, and which of them are forked then."""

from collections import Counter
from collections.abc import Iterator

from digenrl.local.processes.starter import PreloadPlan
from services.reward.kinds import kind_named
from shared.models.catalogue import PartConfig, check_family
from shared.recipe.recipe import Recipe

LIGHT = (
    "digenrl.commands.cli",
    "digenrl.follow.steps",
    "services.scheduler.shell.service",
    "shared.process.worker_process",
)
# In the order in which they need each other, and one by one: between two of them somebody else is
# forked. No module of one service that registers metrics, which the others would show as theirs.
LIBRARIES = (
    "numpy",
    "torch",
    "torch._dynamo",
    "scipy.stats",
    "transformers.modeling_utils",
    "peft",
    "diffusers",
)
SERVICES = (
    "services.reward.app",
    "services.rollout.app",
    "services.rollout.rollout_engine",
    "services.rollout.service",
    "services.trainer.service",
)


def plan_preload(recipe: Recipe) -> PreloadPlan:
    """Return what the processes of a run import, and those that may be forked from it: a process
    whose numerical libraries are to have another number of threads than most is not."""
    threads = {
        ("digenrl", "serve", "rollout"): recipe.rollout.threads,
        ("digenrl", "serve", "encoder"): recipe.encoder.threads,
        ("digenrl", "serve", "reward"): recipe.reward.threads,
        ("digenrl", "serve", "trainer"): recipe.trainer.threads,
        ("digenrl.local.processes.ranks",): recipe.trainer.threads,
        ("digenrl", "evaluate"): recipe.evaluation.threads,
        ("digenrl", "report"): recipe.evaluation.threads,
    }
    [(most, _)] = Counter(threads.values()).most_common(1)
    stages = {("digenrl", "serve", "scheduler"): 1, ("digenrl", "follow"): 1}
    stages |= {words: 2 for words, number in threads.items() if number == most}
    return PreloadPlan(LIGHT, (*LIBRARIES, *SERVICES, *_recipe_modules(recipe)), most, stages)


def _recipe_modules(recipe: Recipe) -> Iterator[str]:
    """Yield what the model's folder and the scorers name."""
    if recipe.encoder.workers:
        yield "services.rollout.encoder_engine"
    yield "services.trainer.fluid.process"
    yield check_family(recipe.model.folder).adapter
    index = PartConfig(recipe.model.folder / "model_index.json")
    yield f"diffusers:{index['_class_name']}"
    for part in index.values():
        if isinstance(part, list) and all(part):
            library, name = part
            yield f"{library}:{name}"
    for scorer in recipe.reward.scorers:
        yield kind_named(scorer.type).scorer

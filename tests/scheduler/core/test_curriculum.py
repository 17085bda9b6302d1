"""Tasks have the prompts that the curriculum draws from the batches that are committed."""

from collections.abc import Iterator

from services.scheduler.core.inputs import BatchesSeen
from shared.learning.curriculum import Draws, Saturated
from shared.learning.prompts import PromptOrder
from shared.messages.contracts import Prompt
from tests import examples
from tests.scheduler.core.machine_driver import Machine

PROMPTS = tuple(Prompt(text=str(number)) for number in range(7))
GROUPS, BATCHES = 2, 40
SEEN: tuple[Saturated, ...] = ((True, False),) * BATCHES


def order() -> PromptOrder:
    return PromptOrder(PROMPTS, 0, curriculum=0.9)


def drawn(num_seen: int) -> Draws:
    draws = order().first_draws(GROUPS)
    assert draws is not None
    return draws.seeing(SEEN[:num_seen])


def prompts_of(batch: int, machine: Machine) -> Iterator[Prompt]:
    for event in (BatchesSeen(0, SEEN[: batch // 2]), BatchesSeen(0, SEEN[:batch])):
        machine.handle(event)  # what was seen before changes nothing
    for task in machine.tasks(examples.published(batch)):
        if task.fragment.batch == batch:
            wanted = order().of_group(batch, task.fragment.group, GROUPS, drawn(batch))
            assert task.prompt == wanted
            yield task.prompt


def test_a_scheduler_that_is_started_late_names_the_same_prompts() -> None:
    changed = False
    for batch in (0, 1, 17, BATCHES - 1):
        machine = Machine(prompts=order(), num_batches=BATCHES + 1)
        for prompt in prompts_of(batch, machine):
            changed |= prompt != PromptOrder(PROMPTS, 0).of_group(batch, 0, GROUPS)
    assert changed


def test_a_batch_that_is_begun_early_needs_no_rewards_of_the_one_before() -> None:
    for batch in (1, 12):
        known, later = drawn(batch - 1), drawn(batch)
        assert known.of_batch(batch) == later.of_batch(batch)

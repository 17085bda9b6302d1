"""What somebody sends and stores who has stolen the key of a role."""

from shared.messages.contracts import (
    FragmentFailed,
    FragmentGenerated,
    FragmentReleased,
    FragmentScored,
    GenerateFragment,
    GroupFailed,
    Message,
    ObjectRef,
    Prompt,
    Trajectories,
)
from shared.messages.rights import Role
from shared.run.rights import WRITES

NOWHERE = ObjectRef(key="small/batches/nowhere", sha256="0" * 64, size=1)
STORED = Trajectories(
    trajectory=NOWHERE, conditions=NOWHERE, media=NOWHERE, weights_digest="0" * 64
)


def results(role: Role, task: GenerateFragment, name: str, stored: Trajectories) -> list[Message]:
    """Return what a role may say of a task, as if ``name`` had done it."""
    fragment, batch, index = task.fragment, task.fragment.batch, task.fragment.group
    prompt, samples = Prompt(text="forged"), (1.0,) * fragment.num_samples
    made = FragmentGenerated(
        fragment=fragment,
        policy=task.policy,
        prompt=prompt,
        stored=stored,
        worker=name,
        seconds=0.1,
    )
    score = FragmentScored(
        fragment=fragment, policy=task.policy, stored=stored, rewards=samples,
        parts={"emulated": samples}, generated_by=name, worker=name, seconds=0.1,
    )  # fmt: skip
    of_both: list[Message] = [
        made,
        FragmentFailed(slot=fragment.slot, stage="rollout", reason="forged", worker=name),
        FragmentFailed(slot=fragment.slot, stage="rollout", reason="forged", worker=None),
        FragmentReleased(slot=fragment.slot, worker=name, reason="returned"),
    ]
    if role == "reward":
        return [score]
    if role == "trainer":
        return of_both
    return [
        *of_both,
        score,
        GroupFailed(batch=batch, group=index, attempt=0, reason="forged"),
    ]  # fmt: skip


def foreign_keys(run: str, role: Role) -> list[str]:
    """Return names that another role has, and its own folders at every place that another has."""
    places = {each for places in WRITES.values() for each in places}
    other = {each for each in places if not each.startswith(WRITES[role])}
    names = [f"{each}00000099.json" if each.endswith("/") else each for each in sorted(other)]
    positions = [
        f"{place}{own}00000099.json"
        for place in sorted(other)
        if place.endswith("/")
        for own in WRITES[role]
        if own.endswith("/")
    ]
    found = [each for each in (*names, *positions) if not each.startswith(WRITES[role])]
    return [f"{run}/{each}" for each in found]

"""Rights of each role in the object store and in Redis: the one description.

All of a run lies below its name in the store (`shared.run.layout`). Every role reads all of it; a
role writes, overwrites and deletes what begins with a name given here, and nothing else. Therefore
only a trainer makes commit records, generating roles change neither weights nor recipe, and only
the scheduler and trainers set a run's model and prompts.
"""

from shared.messages.rights import Role

WRITES: dict[Role, tuple[str, ...]] = {
    "scheduler": (
        "recipe.json", "staleness.json", "files/", "chain/", "copies/", "epochs/", "log/",
        "usage/", "timeline/", "weights/", "checkpoints/", "batches/",
        "conditions/", "sources/", "previews/",
    ),
    "trainer": (
        "commits/", "copies/", "chain/", "weights/", "checkpoints/", "batches/",
        "conditions/", "files/", "previews/",
    ),
    "rollout": (
        "batches/", "conditions/", "previews/", "files/libraries.rollout.", "files/doctor.json",
        "copies/files/libraries.rollout.",
    ),
    "encoder": (
        "conditions/", "files/libraries.encoder.", "files/doctor.json",
        "copies/files/libraries.encoder.",
    ),
    "reward": (
        "files/reward.", "files/libraries.reward.", "files/doctor.json", "copies/files/reward.",
        "copies/files/libraries.reward.",
    ),
    "client": ("evaluations/", "chain/", "files/doctor.json"),
}  # fmt: skip
"""Beginnings of the names of a run's objects that a role may write and delete. The scheduler
deletes unneeded weights, checkpoints and batches."""

_VERSIONS = "dg:wv:*"
_PEERS = "dg:peers:*"
_ANYBODY = "-@all +hello +auth +ping +client|setinfo +client|setname +quit"
_LISTS = "+rpush +lrange +zadd +zscore +zrevrange +expire +multi +exec +discard"

REDIS: dict[Role, str] = {
    "scheduler": f"~{_VERSIONS} {_ANYBODY} +get +set +del +scan +watch +unwatch +multi +exec "
    "+discard",
    "rollout": f"%R~{_VERSIONS} ~{_PEERS} {_ANYBODY} +get {_LISTS}",
    "trainer": f"~{_PEERS} {_ANYBODY} {_LISTS}",
    **dict.fromkeys(("encoder", "reward", "client"), _ANYBODY),
}
"""Keys and commands of a role, in Redis's ACL syntax: only the scheduler writes the index of
versions, and hosts of rollout workers and members publish the objects that they have."""

DISABLED_USER = "user default off resetpass ~* &* +@all"
"""The user that no client can use. It has all rights because Redis 7.0 reads its own log as this
user: without them, what was written in transactions would be lost at a restart."""

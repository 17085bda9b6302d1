"""The release of DigenRL, which its distribution, its services and its runs carry."""

RELEASE = "0.2.0"


def refusal(what: str, release: str | None) -> str | None:
    """Return why a run or worker of a release takes no part here; None if it does.

    >>> refusal("worker reward-0", "0.1.0")
    'worker reward-0 is of release 0.1.0, this process of 0.2.0: see docs/upgrade.md'
    """
    if release in (None, RELEASE):
        return None
    return f"{what} is of release {release}, this process of {RELEASE}: see docs/upgrade.md"

"""Lists the pages of a run in four groups, as the navigation shows them."""

from collections.abc import Mapping

OVERVIEW = "overview"
GROUPS: Mapping[str, Mapping[str, str]] = {
    "Pictures": {
        "samples": "gallery",
        "batches": "training samples",
        "try": "sample now",
    },
    "Learning": {
        "curves": "curves",
        "evaluations": "evaluations",
        "versions": "versions",
    },
    "Machines": {
        "workers": "workers",
        "timeline": "timeline",
        "schedule": "time of devices",
        "logs": "logs and alarms",
    },
    "Run": {
        OVERVIEW: "overview",
        "recipe": "recipe",
        "letters": "failed work",
        "plan": "other devices",
    },
}  # fmt: skip
"""Groups, and their pages: a page's name, which is its address, and its title."""
PARENTS = {"sample": "batches"}
"""Pages without a place in the navigation, and the pages that lead to them."""
PAGES = tuple(page for pages in GROUPS.values() for page in pages)


def group_of(page: str) -> str:
    """Return the group of a page; empty for a page that belongs to no group.

    >>> group_of("sample"), group_of("error")
    ('Pictures', '')
    """
    return next((group for group, pages in GROUPS.items() if PARENTS.get(page, page) in pages), "")


def address(page: str) -> str:
    """Return the address of a page below the address of its run.

    >>> address("overview"), address("samples")
    ('/', '/samples')
    """
    return "/" if page == OVERVIEW else f"/{page}"


def title(page: str) -> str:
    """Return the title of a page."""
    return next((pages[page] for pages in GROUPS.values() if page in pages), page)

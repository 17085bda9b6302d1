"""The pages that are photographed, and what is clicked before a picture is taken."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.pictures.runs import FAILED, FINISHED, LOW_RATE, RUNNING, VIDEO
from digenrl.view.navigation import PAGES, address

LIVE_PAGES = ("overview", "curves", "batches", "workers", "timeline", "schedule", "logs")
FAILED_PAGES = ("overview", "logs", "letters", "batches")
VIDEO_PAGES = ("overview", "samples", "batches", "curves")
OWN_PROMPT = "/try?prompt=a+handwritten+seven&version=24&against=0&num=2&seed=1"


@dataclass(frozen=True, slots=True)
class Shot:
    """A page in a state, and the name of its pictures."""

    name: str
    address: str
    clicks: Sequence[str] = ()
    """Selectors that are clicked, one after another."""
    waits_for: str = ""
    """Selector of what the last click makes."""
    is_whole: bool = True
    """Whether the picture shows the whole page, and not the window alone."""


def still_shots() -> list[Shot]:
    """Return the shots of runs that have ended, and of pages of several runs."""
    home = f"/runs/{FINISHED}"
    pages = [Shot(f"finished-{page}", f"{home}{address(page)}") for page in PAGES if page != "try"]
    pages += [Shot(f"failed-{page}", f"/runs/{FAILED}{address(page)}") for page in FAILED_PAGES]
    pages += [Shot(f"video-{page}", f"/runs/{VIDEO}{address(page)}") for page in VIDEO_PAGES]
    versions = f"side={FINISHED}@24&side={LOW_RATE}@12"
    return [
        *pages,
        Shot("runs", "/runs"),
        Shot("runs-copy", "/runs", ('[data-dialog="copy-dialog"]',), is_whole=False),
        Shot("finished-sample", f"{home}/sample?step=20&group=3&number=2"),
        Shot("finished-lightbox", f"{home}/samples?view=beside&sort=gained", (".tiles li > a",),
             "#lightbox[open]", is_whole=False),
        Shot("finished-slider", f"{home}/samples?view=slider&sort=gained&size=l"),
        Shot("finished-try", f"{home}{OWN_PROMPT}", ("#sample",), ".tries img"),
        Shot("video-lightbox", f"/runs/{VIDEO}/samples?view=beside", (".tiles li > a",),
             "#lightbox[open]", is_whole=False),
        Shot("compare-empty", "/compare"),
        Shot("compare-two-runs", f"/compare?{versions}"),
        Shot("compare-two-versions", f"/compare?side={FINISHED}@0&side={FINISHED}@24"),
        Shot("compare-blind", f"/compare/blind?{versions}"),
        Shot("error", f"{home}/nowhere"),
    ]  # fmt: skip


def live_shots() -> list[Shot]:
    """Return the shots of a run in progress."""
    pages = [Shot(f"running-{page}", f"/runs/{RUNNING}{address(page)}") for page in LIVE_PAGES]
    return [*pages, Shot("runs-with-one-running", "/runs")]

"""Makes HTML: the templates, and sentences whose commands are links where the page has a page."""

import re

from jinja2 import Environment, PackageLoader, StrictUndefined, pass_context, select_autoescape
from jinja2.runtime import Context
from markupsafe import Markup
from pydantic import TypeAdapter

from digenrl.reading.wording import (
    describe_line,
    describe_shortage,
    describe_work,
    drained_counts,
    figure,
    gpu_words,
    signed,
    time_left,
    visible,
    worker_counts,
)

LINKS = {
    "workers": ("/workers", "the page of workers"),
    "logs": ("/logs", "the page of logs"),
    "logs --level error": ("/logs?level=error#failure", "the log line"),
    "dlq": ("/letters", "the page of failed work"),
    "pause": ("/letters", "the page of failed work"),
}
"""Commands for which there is a page: its address, and what it is called in a sentence."""


def templates() -> Environment:
    """Return the templates of the page, with their filters for numbers and sentences."""
    environment = Environment(
        loader=PackageLoader("digenrl.view"), undefined=StrictUndefined,
        autoescape=select_autoescape(), trim_blocks=True, lstrip_blocks=True, finalize=_shown,
    )  # fmt: skip
    words = (
        describe_line, describe_shortage, describe_work, drained_counts, gpu_words, time_left,
        worker_counts,
    )  # fmt: skip
    environment.globals |= {each.__name__: each for each in words}
    environment.filters |= {
        "figure": figure, "linked": _linked, "as_json": _as_json, "signed": signed,
    }  # fmt: skip
    return environment


def _shown(value: object) -> object:
    """Spell out what would turn a page's text around: prompts and reasons come from elsewhere."""
    return visible(value, lines=True) if type(value) is str else value


def linked(sentence: str, here: str = "", base: str = "") -> Markup:
    """Return a sentence with a link, or else as code, in place of each command in backticks.

    Args:
        here: address of the page that it stands on, which gets no link to itself.
        base: address of the run.

    >>> print(linked("slow <1>: `digenrl workers demo`, `digenrl gc demo`"))
    slow &lt;1&gt;: <a href="/workers">the page of workers</a>, <code>digenrl gc demo</code>
    >>> print(linked("dead letters: `digenrl dlq retry demo`", "/letters"))
    dead letters: see below
    """
    parts = re.split(r"`(digenrl [^`]+)`", sentence)
    return Markup("").join(
        _command(each, here, base) if at % 2 else each for at, each in enumerate(parts)
    )


def _as_json(value: object) -> str:
    """Return a default of a recipe key as the store has it."""
    return TypeAdapter(object).dump_json(value).decode()


@pass_context
def _linked(context: Context, sentence: str, here: str = "") -> Markup:
    return linked(sentence, here, context["base"])


def _command(text: str, here: str, base: str) -> Markup:
    _, command, *words = text.split()
    known = LINKS.get(" ".join([command, *words[1:]])) or LINKS.get(command)
    address, title = known or ("", "")
    if not address:
        return Markup("<code>{}</code>").format(text)
    if address == here:
        return Markup("see below")
    return Markup('<a href="{}{}">{}</a>').format(base, address, title)

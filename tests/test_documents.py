"""Commands in the documents can be typed as they stand, and files that they name exist."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer

from digenrl.commands.cli import app
from digenrl.local.start import command_with
from tests.paths import ROOT

PAGES = [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "algorithms").glob("*.md")),
    *sorted((ROOT / "docs" / "deploy").glob("*.md")),
    ROOT / "services/scheduler/costs/profiles/README.md",
]  # fmt: skip
ACTIVATION = ". .venv/bin/activate"
COMMAND = re.compile(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*((?:\.venv/bin/)?digenrl(?: (?!=).*)?)$")
COMMAND_LINE: click.Command = typer.main.get_command(app)  # type: ignore[assignment]
STANDS_FOR_SOMETHING = ("...", "|", "RECIPE")


def code(text: str) -> Iterator[str]:
    """Lines of fenced blocks, and code within a line."""
    for number, part in enumerate(re.split(r"^```.*$", text, flags=re.MULTILINE)):
        if number % 2:
            yield from part.splitlines()
        else:
            for inline in re.findall(r"`([^`]+)`", part):
                yield " ".join(inline.split())


def commands(page: Path) -> list[str]:
    found = (COMMAND.match(line.strip()) for line in code(page.read_text()))
    return [match[1] for match in found if match]


WRITTEN = [
    (page.relative_to(ROOT), command)
    for page in PAGES
    for command in commands(page)
    if not any(word in command for word in STANDS_FOR_SOMETHING)
]


def parse(arguments: list[str]) -> None:
    """Parses as the command line does and runs nothing; raises UsageError for what is refused."""
    at = COMMAND_LINE
    try:
        context = at.make_context("digenrl", list(arguments), resilient_parsing=not arguments[1:])
        while hasattr(at, "resolve_command"):
            left = [*context._protected_args, *context.args]
            if not left:
                return
            name, at, rest = at.resolve_command(context, left)
            if not rest:  # it is only spoken of
                return
            context = at.make_context(name, list(rest), parent=context)
    except Exception as error:
        if type(error).__name__ not in ("Exit", "NoArgsIsHelpError"):
            raise


@pytest.mark.parametrize(("page", "command"), WRITTEN, ids=lambda given: str(given)[:60])
def test_a_command_is_one_that_digenrl_takes(page: Path, command: str) -> None:
    words = shlex.split(command, comments=True)
    parse(words[1:])


def test_a_command_with_an_option_that_is_none_is_found() -> None:
    assert len(WRITTEN) > 30
    with pytest.raises(Exception, match="No such option"):
        parse(["plan", "--devises", "h100=8"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_says_how_the_command_is_found_before_it_is_typed(page: Path) -> None:
    text = page.read_text()
    blocks = re.split(r"^```.*$", text, flags=re.MULTILINE)[1::2]
    typed = [line for block in blocks for line in block.splitlines() if COMMAND.match(line)]
    if any(not line.startswith((".venv/", "$ ")) for line in typed):
        first = min(text.index(line) for line in typed)
        assert ACTIVATION in text[:first]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_targets_of_make_are_there(page: Path) -> None:
    rules = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for line in code(page.read_text()):
        if match := re.match(r"^(?:[A-Z_]+=\S+ )*make ([a-z][a-z -]*)", line.strip()):
            assert set(match[1].split()) <= rules, line


def test_what_is_printed_to_go_on_with_a_run_can_be_typed() -> None:
    typed = ["/a b/digenrl", "up", "my recipe.toml", "--run", "one", "--steps", "3", "--resume"]
    program, *rest = shlex.split(command_with("--resume", typed))
    assert program == "/a b/digenrl"
    assert rest == typed[1:]
    parse(rest)
    assert command_with("--resume", ["/x/digenrl/__main__.py", "up", "r.toml"]).endswith(
        " -m digenrl up r.toml --resume"
    )


def test_an_installation_shows_its_progress() -> None:
    rule = (ROOT / "Makefile").read_text().split("%/.installed:")[1]
    assert "uv pip install" in rule and "uv pip install --quiet" not in rule


FILE = re.compile(
    r"(?:bench|deploy|digenrl|docs|examples|models|recipes|services|shared|tests)/[\w./-]+"
)


@pytest.mark.parametrize("page", [ROOT / "ARCHITECTURE.md", *PAGES], ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = {text for text in code(page.read_text()) if FILE.fullmatch(text)}
    assert [text for text in sorted(named) if not (ROOT / text).exists()] == []


def test_the_readme_and_each_decision_are_a_page() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 750
    decisions = sorted((ROOT / "docs" / "adr").glob("*.md"))
    lengths = {path.name: len(path.read_text().splitlines()) for path in decisions}
    assert [name for name, lines in lengths.items() if lines > 75] == []

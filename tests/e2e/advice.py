"""Finds the commands that the product advises, in the strings of its code and in what it prints."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from digenrl.commands.cli import TASKS, app
from tests.paths import ROOT

NAMES = {name for names in TASKS.values() for name in names}
IN_CODE = re.compile(r"`(digenrl [^`]+)`|(?:^|: )(digenrl [a-z][^`;]*)(?:;|$)", re.MULTILINE)
IN_OUTPUT = re.compile(r"`(digenrl [^`]+)`|: +(digenrl .+)$", re.MULTILINE)
DEMO = "demo"
"""Run of the examples in the help of commands."""
PLACES = {
    "revision": "", "host": "localhost", "run": "RUN", "recipe": "RECIPE", "path": "RECIPE",
    "name": "RUN", "folder": "RUN", "number": "1", "out": "RECIPE", "file": "RECIPE",
}  # fmt: skip
"""What stands for an expression that has this word."""


def advised_in_code() -> dict[str, str]:
    """Return every command in a string of the product, and the file that has it. Docstrings count
    where they are the help of commands."""
    found: dict[str, str] = {}
    for folder in ("digenrl", "services", "shared"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text())
            if path.parent.name != "commands":
                _remove_docstrings(tree)
            for text in _strings(tree):
                for command in advised_in(" ".join(text.split()), IN_CODE):
                    found.setdefault(command, str(path.relative_to(ROOT)))
    return found


def advised_in(text: str, pattern: re.Pattern[str] = IN_OUTPUT) -> list[str]:
    found = ["".join(groups).strip() for groups in pattern.findall(text)]
    return [each for each in found if each.split()[1] in NAMES]


def words_of(command: str, run: str, recipe: Path) -> list[str]:
    """Return the words of a command, with a run and a recipe in their places."""

    def place(match: re.Match[str]) -> str:
        known = [stands for word, stands in PLACES.items() if word in match.group(1).lower()]
        assert known, f"{command}: say in PLACES what {match.group(1)} is"
        return known[0]

    text = re.sub(r"\{([^{}]*)\}", place, command)
    stands = {"RUN": run, "RECIPE": str(recipe), "N": "1", "WORD": "trainer"}
    return [stands.get(word, word) for word in shlex.split(text)]


def check_parsed(words: list[str]) -> bool:
    """Return whether a command has these words, and more than its name; raises click's UsageError
    if there is no such command, or if it has no such options or arguments."""
    command: Any = typer.main.get_command(app)
    rest, context = words[1:], command.make_context("digenrl", words[1:], resilient_parsing=True)
    while rest and hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(context, rest)
        if rest:
            context = command.make_context(name, list(rest), parent=context)
    return bool(rest)


def _strings(tree: ast.AST) -> Iterator[str]:
    """Yield all strings of a module. In f-strings, constants of the module have their values, and
    other expressions are in braces."""
    constants: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            constants |= {each.id: str(node.value.value) for each in node.targets
                          if isinstance(each, ast.Name)}  # fmt: skip
    inner: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inner |= {id(part) for part in node.values}
            yield "".join(_part(part, constants) for part in node.values)
        elif isinstance(node, ast.Constant) and id(node) not in inner:
            yield str(node.value)


def _part(part: ast.expr, constants: dict[str, str]) -> str:
    if isinstance(part, ast.FormattedValue):
        name = ast.unparse(part.value)
        return constants.get(name, f"{{{name}}}")
    return str(part.value) if isinstance(part, ast.Constant) else ""


def _remove_docstrings(tree: ast.AST) -> None:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            body[:] = [
                each for each in body
                if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
            ]  # fmt: skip

"""Pages of the site that are made from the program itself, and links that leave the site.

mkdocs calls these functions; `make docs` builds the site, with an error for every broken link.
"""

import json
import re
from pathlib import Path
from typing import Any

import click
import typer
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
OUTSIDE = re.compile(r"\]\((\.\./)+(?P<path>[^)#]*)(#[^)]*)?\)")
"""A link to a file of the repository that is no document."""


def on_files(files: Files, config: Any) -> Files:
    made = {
        "index.md": index(),
        "reference/commands.md": commands(),
        "reference/api.md": api(),
        "reference/recipe.md": recipe(),
    }
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Name files outside the documents instead of linking them: they are not on the site."""

    def name(match: re.Match[str]) -> str:
        target = (ROOT / "docs" / page.file.src_uri).parent / match[0][2:-1].split("#")[0]
        inside = (ROOT / "docs") in target.resolve().parents
        return match[0] if inside else f"] (`{match['path']}`)"

    return OUTSIDE.sub(name, markdown)


def index() -> str:
    """Return the README's beginning, whose links are to documents."""
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"\]\(docs/", "](", text)
    there = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.*")]
    kept = "|".join(re.escape(str(path)) for path in there)
    return re.sub(rf"\]\((?!https?:|#|(?:{kept})[#)])([^)]*)\)", r"] (`\1`)", text)


def commands() -> str:
    """Return the help of every command."""
    from digenrl.cli import app

    top = typer.main.get_command(app)
    lines = ["# Command line", "", "What `--help` says of each command.", ""]
    lines += _help(top, "digenrl")
    return "\n".join(lines)


def _help(command: click.Command, name: str) -> list[str]:
    with click.Context(command, info_name=name) as context:
        lines = [f"## `{name}`", "", _text(command.help), ""]
        for option in command.params:
            record = option.get_help_record(context)
            if record is None and isinstance(option, click.Argument):
                record = option.make_metavar(context), getattr(option, "help", None) or ""
            if record is not None:
                lines.append(f"- `{record[0]}`: {_text(record[1])}")
        lines.append("")
        for each in getattr(command, "commands", {}).values():
            if not each.hidden:
                lines += _help(each, f"{name} {each.name}")
    return lines


def _text(given: str | None) -> str:
    return " ".join((given or "").split()).replace("<", "&lt;").replace("[", "\\[")


def api() -> str:
    """Return every operation of the HTTP API with its answer's example."""
    [path] = ROOT.glob("docs/**/openapi.json")
    description = json.loads(path.read_text())
    lines = ["# HTTP API", "", _text(description["info"].get("description")), ""]
    for route, methods in sorted(description["paths"].items()):
        for method, operation in methods.items():
            lines += [f"## {method.upper()} `{route}`", "", _text(operation.get("summary"))]
            lines += ["", _text(operation.get("description")), ""]
            for each in operation.get("parameters", ()):
                lines.append(f"- `{each['name']}`: {_text(each.get('description'))}")
            lines.append("")
    return "\n".join(lines)


def recipe() -> str:
    """Return every key of a recipe with its type, default and meaning."""
    from pydantic import BaseModel

    from shared.recipe.recipe import Recipe

    lines = ["# Keys of a recipe", "", "[Recipes](../recipes.md) says how to choose them.", ""]
    for name, table in Recipe.model_fields.items():
        lines += [f"## `{name}`", "", _text(table.description), ""]
        kinds = [each for each in _models(table.annotation) if issubclass(each, BaseModel)]
        for kind in kinds:
            for key, given in kind.model_fields.items():
                default = "" if given.is_required() else f" (default `{given.get_default()!r}`)"
                lines.append(f"- `{name}.{key}`{default}: {_text(given.description)}")
        lines.append("")
    return "\n".join(lines)


def _models(annotation: Any) -> list[type]:
    from typing import get_args

    found = [annotation] if isinstance(annotation, type) else []
    return found + [each for part in get_args(annotation) for each in _models(part)]

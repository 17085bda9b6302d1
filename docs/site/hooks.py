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
OUTSIDE = re.compile(r"\[(?P<text>[^\[\]]*)\]\((?:\.\./)+(?P<path>[^)#]*)(?:#[^)]*)?\)")
"""A link to a file of the repository that is no document."""


def on_files(files: Files, config: Any) -> Files:
    made = {"index.md": index(), "reference/commands.md": commands(), "reference/api.md": api()}
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Name files outside the documents instead of linking them: they are not on the site."""

    def name(match: re.Match[str]) -> str:
        link = match[0].partition("](")[2]
        target = (ROOT / "docs" / page.file.src_uri).parent / link[:-1].split("#")[0]
        inside = (ROOT / "docs") in target.resolve().parents
        return match[0] if inside else named(match["text"], match["path"])

    return OUTSIDE.sub(name, markdown)


def index() -> str:
    """Return the README's beginning, whose links are to documents."""
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"\]\(docs/", "](", text)
    there = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.*")]
    kept = "|".join(re.escape(str(path)) for path in there)
    outside = rf"\[([^\[\]]*)\]\((?!https?:|#|(?:{kept})[#)])([^)]*)\)"
    return re.sub(outside, lambda match: named(match[1], match[2]), text)


def named(text: str, path: str) -> str:
    """Return what stands in place of a link to a file that is not on the site."""
    return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"


def commands() -> str:
    """Return the help of every command."""
    from digenrl.commands.cli import app

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
    """Return every key of a recipe with its default and meaning: docs/recipe-keys.md."""
    from digenrl.commands.recipe import format_default
    from shared.recipe.keys import ANY, recipe_keys
    from shared.recipe.recipe import Recipe

    lines = [
        "# Keys of a recipe", "",
        "[Recipes](recipes.md) explains how to choose them. `digenrl recipe keys KEY` prints the",
        "same, and [recipe.schema.json](recipe.schema.json) is the JSON schema for editors.",
        "`python docs/site/hooks.py` makes both from the code.",
    ]  # fmt: skip
    table = ""
    for key in recipe_keys(Recipe).values():
        if key.name.startswith(("evaluation.scorers.", "evaluation.dataset.")):
            continue
        name = key.name.replace(ANY, "NAME")
        if table != (table := name.partition(".")[0]):
            lines += ["", f"## `{table}`", "", "| key | default | meaning |", "|---|---|---|"]
        meaning = " ".join((key.field.description or "").split())
        cells = f"`{name}`", format_default(key).replace("\n", " "), meaning
        lines.append("| " + " | ".join(each.replace("|", "\\|") for each in cells) + " |")
    return "\n".join(lines) + "\n"


def schema() -> str:
    """Return the JSON schema of a recipe file, in which `base` supplies defaults:
    docs/recipe.schema.json."""
    from shared.recipe.recipe import Recipe

    found = Recipe.model_json_schema()
    for table in (found, *found["$defs"].values()):
        table.pop("required", None)
    base = {"type": "string", "description": "Recipe whose values this one extends or replaces."}
    found["properties"] = {"base": base, **found["properties"]}
    return json.dumps(found, indent=1, default=str) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "recipe-keys.md").write_text(recipe())
    (ROOT / "docs" / "recipe.schema.json").write_text(schema())

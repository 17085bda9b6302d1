"""Rules of plain English, and the sentences of the product that they apply to."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

OPENING = re.compile(r"(of|what|that|whether|who|whoever|whatever|so (many|much|says))\b", re.I)
"""A sentence begins with its subject or its verb, not with a clause before the subject."""

WORDS = {
    r"(is|are|was|were) none|none of (its|their|theirs|them)|that of|those of|one of them|"
    r"so many|so much of|as much of|of (who|whom)|only who|is what is|"
    r"what is left|"
    r"whoever|nobody|somebody|anybody|whatever|other ones": "name the thing",
    r"says?|said|tells?|told|hears?|(is|are|was|were|be) asked": "reports, logs, shows, requests",
    r"beside": "with, next to, alongside",
    r"anew": "again, a new ..., rebuilt",
    r"goes on|go on|going on|went on": "continues, resumes",
    r"breaks? off": "is interrupted",
    r"mend(s|ed|ing)?": "fix, repair",
    r"(?<![(.])patience": "timeout",
    r"(hold|holds|held|holding) up": "delays, blocks",
    r"in vain": "wasted, without a result",
    r"for ever": "without a limit",
    r"(is|are) of": "belongs to, has, comes from",
    r"is otherwise|at the whole|is room|see to|to be had": "say it with a term of the field",
}
"""Words that have to be translated, with what to write instead."""

WORD = re.compile("|".join(rf"\b(?:{words})\b" for words in WORDS))
CODE = re.compile(
    r"```.*?```|`[^`]*`|>>> .*\n?.*|\n +[\w*]+: |<[^>]*>|\{[{%#].*?[}%#]\}|https?://\S+", re.S
)
"""Parts of a text that are no prose: code, markup and what a template inserts."""


class Text(NamedTuple):
    """Prose at a line of a file; a predicate's docstring may begin with "Whether"."""

    line: int
    text: str
    is_predicate: bool = False


def findings(text: Text) -> list[str]:
    """Return the sentences that break a rule, each after what is wrong with it."""
    found = []
    for paragraph in re.split(r"\n\s*\n|\n\s*(?=[-*|#>]\s|\d+\.\s)", CODE.sub("_", text.text)):
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z_])|\s\|\s", " ".join(paragraph.split())):
            opening = OPENING.match(sentence.lstrip("-*|#> ").removeprefix("[ ] "))
            if opening and not (text.is_predicate and opening[0] == "Whether"):
                found.append(f"begins with {opening[0]!r}: {sentence}")
            elif word := WORD.search(sentence[:1].lower() + sentence[1:]):
                found.append(f"{word[0]!r}: {sentence}")
    return found


def texts(path: Path) -> Iterator[Text]:
    """Yield the prose of a file: a page's or template's text, or the prose in a module."""
    source = path.read_text()
    if path.suffix == ".py":
        yield from texts_of_module(ast.parse(source))
    else:
        blanked = re.sub(r"<(script|style).*?</\1>", "", source, flags=re.S)
        yield from (Text(0, part) for part in CODE.sub("_", blanked).split("\n\n"))


LOGGED = {"debug", "info", "warning", "error", "exception", "critical"}


def texts_of_module(module: ast.Module) -> Iterator[Text]:
    """Yield docstrings, strings under constants, messages of errors and logs, and help."""
    for node in ast.walk(module):
        body = getattr(node, "body", None)
        for before, each in zip([node, *body], body, strict=False) if type(body) is list else ():
            match each:
                case ast.Expr(ast.Constant(str(text))):
                    yield Text(each.lineno, text, is_predicate(before))
        yield from (Text(each.lineno, text) for each in messages(node) for text in literals(each))


def messages(node: ast.AST) -> list[ast.expr]:
    """Return what an error, a log line or an option of the command line shows."""
    match node:
        case ast.Raise(exc=ast.Call(args=shown)):
            return shown
        case ast.Call(func=ast.Attribute(attr=attribute), args=shown) if attribute in LOGGED:
            return shown
        case ast.keyword(arg="help" | "short_help" | "epilog", value=value):
            return [value]
        case _:
            return []


def is_predicate(node: ast.AST) -> bool:
    """Whether a function returns a bool, or a field or constant is one."""
    match node:
        case ast.FunctionDef(returns=kind) | ast.AsyncFunctionDef(returns=kind):
            return kind is not None and "bool" in ast.unparse(kind).lower()
        case ast.AnnAssign(annotation=kind):
            return "bool" in ast.unparse(kind).lower()
        case ast.Assign(targets=[target], value=value):
            is_named_so = re.search(r"\b_?(is|has)_", ast.unparse(target)) is not None
            return is_named_so or "bool" in ast.unparse(value) or value.__class__ is ast.Constant
        case _:
            return False


def literals(node: ast.AST) -> Iterator[str]:
    """Yield the strings of an expression; "_" stands for what an f-string inserts."""
    match node:
        case ast.Constant(str(text)):
            yield text
        case ast.JoinedStr(values):
            yield "".join(str(v.value) if isinstance(v, ast.Constant) else "_" for v in values)
        case _:
            for child in ast.iter_child_nodes(node):
                yield from literals(child)

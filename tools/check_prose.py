"""Check how docstrings and comments begin: `python -m tools.check_prose [PATH ...]`; part of `make lint`.

A docstring and a comment have a subject: they do not begin with a relative pronoun ("what", "who", "how") or with "of".
The description of an argument or attribute is a noun phrase: it does not begin with a preposition either.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src/quire", "tools", "benchmarks")

PRONOUNS = frozenset({"how", "of", "what", "whatever", "which", "who", "whoever", "whom", "whose"})
PREPOSITIONS = PRONOUNS | {
    *("about", "above", "after", "among", "as", "at", "before", "behind", "below", "beside", "besides", "between"),
    *("beyond", "by", "during", "for", "from", "in", "into", "near", "on", "onto", "since", "than", "through", "to"),
    *("under", "until", "upon", "with", "within", "without"),
}
SECTIONS = frozenset(("Args:", "Attributes:"))
ENTRY = re.compile(r"(?P<indent> +)(?P<name>\*{0,2}\w+(?:, \*{0,2}\w+)*): (?P<text>\S.*)")


class ProseFinding(NamedTuple):
    """A text whose first word is not allowed, or a described argument that does not exist.

    Args:
        path: file, relative to the repository.
        line: number of the line.
        kind: "docstring", "comment", "argument", or "no such argument".
        text: beginning of the text.
    """

    path: str
    line: int
    kind: str
    text: str


def check_file(path: Path) -> Iterator[ProseFinding]:
    """Yield the findings in a Python file: docstrings with their arguments first, then comments."""
    source = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.as_posix()
    for node in ast.walk(ast.parse(source, filename=str(path))):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = ast.get_docstring(node, clean=False)
        if docstring is not None:
            yield from _check_docstring(name, node.body[0].lineno, docstring, _parameters(node))
    yield from _check_comments(name, source)


def _parameters(node: ast.AST) -> set[str]:
    """Return the names that "Args:" of a function or a class may describe; none for a module."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        given = node.args
        every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        return {argument.arg for argument in every if argument is not None}
    if not isinstance(node, ast.ClassDef):
        return set()
    fields = {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    inits = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name in ("__init__", "__new__")]
    return fields.union(*map(_parameters, inits))


def _check_docstring(name: str, line: int, docstring: str, parameters: set[str]) -> Iterator[ProseFinding]:
    if _first_word(docstring) in PRONOUNS:
        yield ProseFinding(name, line, "docstring", docstring.strip().splitlines()[0])
    section_indent, section = None, ""
    for number, text in enumerate(docstring.splitlines()):
        indent = len(text) - len(text.lstrip())
        if text.strip() in SECTIONS:
            section_indent, section = indent, text.strip()
        elif section_indent is not None and text.strip() and indent <= section_indent:
            section_indent = None
        elif section_indent is not None and indent == section_indent + 4:
            entry = ENTRY.match(text)
            described = set() if entry is None else {each.strip().lstrip("*") for each in entry["name"].split(",")}
            if section == "Args:" and parameters and described - parameters:
                yield ProseFinding(name, line + number, "no such argument", text.strip())
            if entry is not None and _first_word(entry["text"]) in PREPOSITIONS:
                yield ProseFinding(name, line + number, "argument", text.strip())


def _check_comments(name: str, source: str) -> Iterator[ProseFinding]:
    last_line = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        row = token.start[0]
        # Only the first line of a block of comments is checked; a comment after code continues the code.
        is_alone = not token.line[: token.start[1]].strip()
        if is_alone and row != last_line + 1 and _first_word(token.string.lstrip("#: ")) in PRONOUNS:
            yield ProseFinding(name, row, "comment", token.string)
        last_line = row if is_alone else last_line


def _first_word(text: str) -> str:
    match = re.match(r"\s*([A-Za-z]+)", text)
    return "" if match is None else match.group(1).lower()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the findings and their number; return 1 if there are any."""
    given = sys.argv[1:] if arguments is None else arguments
    folders = [Path(text).resolve() for text in given] or [ROOT / folder for folder in FOLDERS]
    paths = sorted(path for folder in folders for path in ([folder] if folder.is_file() else folder.rglob("*.py")))
    findings = [finding for path in paths for finding in check_file(path)]
    for finding in findings:
        print(f"{finding.path}:{finding.line}: {finding.kind}: {finding.text}")
    print(f"prose: {len(paths)} files, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())

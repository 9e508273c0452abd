"""Check the prose of docstrings and comments: `python -m tools.check_prose [PATH ...]`; part of `make lint`.

A docstring and a comment have a subject: they do not begin with a relative pronoun ("what", "who", "how") or with "of".
The description of an argument or attribute is a noun phrase: it does not begin with a preposition either.

Idioms that name nothing ("what it keeps", "those of the others"), and "where" for "if", are hard to read for most
readers. A package of `src/quire` may have 2 in 1,000 words; `--idioms` lists them.
"""

from __future__ import annotations

import argparse
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
IDIOM = re.compile(
    r"\b(?:what|whatever|whoever|whom|(?:those|that) of|behind|of which each|each of which|be had|anew)\b"
    r"|\bwhere (?=(?:it|they|there|this|that|an?|the|no|its|one|all|these|some|any|none|nothing|both|such)\b)",
    re.IGNORECASE,
)
MAX_IDIOMS = 2.0  # in 1,000 words
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


class Idioms(NamedTuple):
    """The idioms of some files.

    Args:
        num_words: number of words of their docstrings and comments.
        lines: each idiom, as "path:line: text around it".
    """

    num_words: int
    lines: list[str]

    @property
    def rate(self) -> float:
        """Number of idioms in 1,000 words."""
        return 1000 * len(self.lines) / max(1, self.num_words)


def find_idioms(paths: Sequence[Path]) -> Idioms:
    """Return the idioms in the docstrings and comments of Python files."""
    num_words, lines = 0, []
    for path in paths:
        source = path.read_text(encoding="utf-8")
        for line, text in _texts(source):
            num_words += len(re.findall(r"[A-Za-z']+", text))
            for match in IDIOM.finditer(text):
                around = " ".join(text[max(0, match.start() - 50) : match.end() + 40].split())
                lines.append(f"{path}:{line + text.count(chr(10), 0, match.start())}: {around}")
    return Idioms(num_words, lines)


def _texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the docstrings and comments of a file with the numbers of their first lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node, clean=False)
            if docstring is not None:
                yield node.body[0].lineno, docstring
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _first_word(text: str) -> str:
    match = re.match(r"\s*([A-Za-z]+)", text)
    return "" if match is None else match.group(1).lower()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the findings and their number; return 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="files and folders (default: all code that ships)")
    parser.add_argument("--idioms", action="store_true", help="list the idioms of the paths")
    options = parser.parse_args(arguments)
    folders = [path.resolve() for path in options.paths] or [ROOT / folder for folder in FOLDERS]
    paths = sorted(path for folder in folders for path in ([folder] if folder.is_file() else folder.rglob("*.py")))
    if options.idioms:
        idioms = find_idioms(paths)
        print(*idioms.lines, sep="\n")
        print(f"idioms: {len(idioms.lines)} in {idioms.num_words:,} words, {idioms.rate:.1f} in 1,000")
        return 0
    findings = [finding for path in paths for finding in check_file(path)]
    for finding in findings:
        print(f"{finding.path}:{finding.line}: {finding.kind}: {finding.text}")
    packages = [] if options.paths else sorted(path for path in (ROOT / "src/quire").iterdir() if path.is_dir())
    rates = {package.name: find_idioms(sorted(package.rglob("*.py"))).rate for package in packages}
    above = {name: rate for name, rate in rates.items() if rate > MAX_IDIOMS}
    for name, rate in above.items():
        print(f"src/quire/{name}: {rate:.1f} idioms in 1,000 words, at most {MAX_IDIOMS:g} are allowed; see --idioms")
    print(f"prose: {len(paths)} files, {len(findings) + len(above)} findings")
    return 1 if findings or above else 0


if __name__ == "__main__":
    sys.exit(main())

"""Jinja's sandbox for chat templates, with the names, filters and blocks that templates of models expect."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn

from quire.text.vocabulary.marks import Marks

if TYPE_CHECKING:  # the engine's process needs no Jinja
    import jinja2

# Names that are defined in every template: Jinja's own, and others that models' templates expect.
GLOBALS = frozenset({"range", "dict", "lipsum", "cycler", "joiner", "namespace", "raise_exception", "strftime_now"})
# Jinja's filters whose functions build a plain `str` from the characters of marked texts.
KEEPING = ("join", "replace", "truncate", "wordwrap", "title", "indent", "center", "format")


class TemplateState:
    """State that templates see while one of them is rendered."""

    def __init__(self) -> None:
        self.now = datetime.min
        self.marks: Marks | None = None

    def with_marks(self, text: str) -> str:
        """Return a text, wrapped during a marked rendering so that it compares equal to its unmarked text."""
        return text if self.marks is None else self.marks.with_marks(text)


def make_environment(state: TemplateState) -> jinja2.Environment:
    """Return the sandbox of templates."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from markupsafe import Markup

    def concat(pieces: Iterable[str]) -> str:
        """Join the output of a macro or a block, which a template may search."""
        return state.with_marks("".join(pieces))

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Return JSON without the escapes of HTML, which Jinja's filter would add."""
        text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        if state.marks is not None and ensure_ascii:
            text = state.marks.unescape(text)
        return state.with_marks(text)

    class Sandbox(ImmutableSandboxedEnvironment):
        """Templates whose functions and methods return marked texts that compare equal to the unmarked texts."""

        def call(self, *args: Any, **kwargs: Any) -> Any:
            made = super().call(*args, **kwargs)
            return state.with_marks(made) if isinstance(made, str) else made

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation_block()])
    environment.code_generator_class = _code_generator()
    environment.concat = concat  # type: ignore[method-assign]
    environment.filters["tojson"] = to_json
    for name in KEEPING:
        environment.filters[name] = _keeping_marks(environment.filters[name], state)
    # Jinja's own filter would escape a marked text for HTML.
    environment.filters["safe"] = lambda value: Markup(str.translate(value, {}) if isinstance(value, str) else value)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: state.now.strftime(form)
    return environment


def _keeping_marks(function: Callable[..., Any], state: TemplateState) -> Callable[..., Any]:
    """Return a filter whose marked results compare equal to the unmarked texts."""

    @wraps(function)
    def keeping(*args: Any, **kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        return state.with_marks(made) if isinstance(made, str) and not hasattr(type(made), "unescape") else made

    return keeping


def _generation_block() -> type[Any]:
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class GenerationBlock(Extension):
        """Accepts `{% generation %}`, which marks the assistant's text for training and renders its content only."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return GenerationBlock


def _code_generator() -> type[Any]:
    from jinja2 import nodes
    from jinja2.compiler import CodeGenerator, Frame

    class Generator(CodeGenerator):
        """Compiles the operator `~` to the environment's `concat`."""

        def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - Jinja's own name
            self.write("concat(map(str, (")
            for part in node.nodes:
                self.visit(part, frame)
                self.write(", ")
            self.write(")))")

    return Generator


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateRuntimeError

    raise TemplateRuntimeError(message)

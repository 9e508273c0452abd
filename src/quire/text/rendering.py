"""Renders chat templates within limits of time and memory, in processes that import nothing but Jinja.

A template comes with a model, and may be hostile. Jinja's sandbox confines its access, but not its time and memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from quire.bounded.process import BoundedProcess, LimitExceeded, ProcessPool
from quire.errors import RequestError

if TYPE_CHECKING:  # the engine's process needs no Jinja
    import jinja2

MAX_OUTPUT_CHARS = 1 << 24
TIMEOUT_S = 10.0
# A conversation of maximum length takes a third of it.
MEMORY_BYTES = 512 << 20
MAX_PROCESSES = 2
# Names that are defined in every template: Jinja's own, and those that models' templates expect.
GLOBALS = frozenset({"range", "dict", "lipsum", "cycler", "joiner", "namespace", "raise_exception", "strftime_now"})
# The first byte of an answer.
DONE, BROKEN, FAILED = b"D", b"B", b"F"


class Renderer:
    """Renders templates. Processes start when they are needed, and end with this object. Thread-safe.

    Args:
        timeout_s: time limit of one rendering.
        memory_bytes: memory limit of a process.
        max_chars: maximum length of the rendered text.
    """

    def __init__(
        self,
        *,
        timeout_s: float = TIMEOUT_S,
        memory_bytes: int = MEMORY_BYTES,
        max_chars: int = MAX_OUTPUT_CHARS,
    ) -> None:
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._max_chars = max_chars
        program = "quire.text.rendering:open_templates"
        self.processes = ProcessPool(lambda: BoundedProcess(program, b"", memory_bytes), MAX_PROCESSES)

    def render(self, source: str, variables: Mapping[str, Any], now: datetime) -> str:
        """Return the rendered text of a template.

        Args:
            source: the template.
            variables: variables of the template, as JSON values.
            now: current time, for templates that write it.

        Raises:
            RequestError: the template cannot be compiled, fails, refuses the variables, or exceeds a limit.
            WorkerError: the process does not start, or this object is closed.
        """
        return self._ask([source, self._max_chars, now.isoformat(), dict(variables)])

    def names(self, source: str) -> frozenset[str]:
        """Return the names of the variables that a template reads.

        Raises:
            RequestError: the template cannot be compiled within the limits.
            WorkerError: the process does not start, or this object is closed.
        """
        return frozenset(json.loads(self._ask([source])))

    def close(self) -> None:
        """End the processes; renderings in progress fail."""
        self.processes.close()

    def _ask(self, question: list[Any]) -> str:
        # Lone surrogates pass here; the tokenizer refuses them.
        raw = json.dumps(question, ensure_ascii=False).encode("utf-8", "surrogatepass")
        try:
            with self.processes.process() as process:
                answer = process.ask(raw, self._timeout_s)
        except LimitExceeded as error:
            most = f"{self._memory_bytes >> 20} MiB, or nests too deeply"
            if error.limit == "time":
                most = f"{self._timeout_s:g} s"
            raise RequestError(f"the chat template takes more than {most}", field="messages") from error
        kind, text = answer[:1], answer[1:].decode("utf-8", "surrogatepass")
        if kind == DONE:
            return text
        why = "cannot be compiled" if kind == BROKEN else "refuses this conversation"
        raise RequestError(f"the chat template {why}: {text}", field="messages")


# ---- within the process ----


def open_templates(_: bytes) -> Callable[[bytes], bytes]:
    """Return the function that answers the questions of a `Renderer`."""
    import jinja2
    import jinja2.meta

    clock = [datetime.min]
    environment = make_environment(clock)

    @lru_cache(maxsize=4)
    def compiled(source: str) -> jinja2.Template:
        return environment.from_string(source)

    def answer(question: bytes) -> bytes:
        source, *rest = json.loads(question.decode("utf-8", "surrogatepass"))
        try:
            template = compiled(source)
            if not rest:
                names = jinja2.meta.find_undeclared_variables(environment.parse(source))
                return DONE + json.dumps(sorted(names)).encode()
        except jinja2.TemplateError as error:
            return BROKEN + _reason(error)
        max_chars, now, variables = rest
        clock[0] = datetime.fromisoformat(now)
        try:
            return DONE + _write(template, _with_arguments(variables), max_chars).encode("utf-8", "surrogatepass")
        except (MemoryError, RecursionError):
            raise
        except Exception as error:  # a template can raise any exception
            return FAILED + _reason(error)

    return answer


class Arguments(dict[str, Any]):
    """The arguments of a call: an object, and JSON where a template takes them for a text, as DeepSeek's do."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, after: str) -> str:
        return str(self) + after

    def __radd__(self, before: str) -> str:
        return before + str(self)


def _with_arguments(variables: dict[str, Any]) -> dict[str, Any]:
    for message in variables.get("messages", ()):
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = Arguments(call["function"]["arguments"])
    return variables


def _reason(error: Exception) -> bytes:
    text = str(error) or type(error).__name__
    return text[:1000].encode("utf-8", "surrogatepass")


def _write(template: jinja2.Template, variables: Mapping[str, Any], max_chars: int) -> str:
    pieces: list[str] = []
    room = max_chars
    for piece in template.generate(variables):
        room -= len(piece)
        if room < 0:
            raise ValueError(f"what it writes is longer than {max_chars} characters")
        pieces.append(piece)
    return "".join(pieces)


def make_environment(clock: list[datetime]) -> jinja2.Environment:
    """Return the sandbox of templates, in which `clock[0]` is the time."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation_block()]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: clock[0].strftime(form)
    return environment


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


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the escapes of HTML, which Jinja's filter would add."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateRuntimeError

    raise TemplateRuntimeError(message)

"""Renders chat templates within limits of time and memory, in processes that import nothing but Jinja.

A template comes with a model, and may be hostile. Jinja's sandbox confines its access, but not its time and memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

from quire.errors import RequestError
from quire.platform.bounded.process import BoundedProcess, LimitExceeded, ProcessPool
from quire.text.chat.content_forms import find_forms
from quire.text.chat.template_environment import TemplateState, make_environment
from quire.text.chat.written_calls import writes_no_calls, written_calls
from quire.text.vocabulary.marks import LENIENT, STRICT, SURROGATE, MarkedTexts, Marks

MAX_OUTPUT_CHARS = 1 << 24
TIMEOUT_S = 10.0
# A conversation of maximum length takes a third of it.
MEMORY_BYTES = 512 << 20
MAX_PROCESSES = 2
# Maximum length of one rendered trial: conversations that show how a template writes are short.
MAX_TRIAL_CHARS = 1 << 18
# The first byte of an answer. MARKED: a text with marks; OTHER: a text with marks that, without them, differs from the
# text rendered from unmarked texts.
DONE, MARKED, OTHER, BROKEN, FAILED = b"D", b"M", b"O", b"B", b"F"


class TemplateVariables(NamedTuple):
    """The variables of a template.

    Args:
        messages: messages in the form of `normalise_messages`.
        request_variables: further variables, with texts of clients.
        fixed: variables without texts of clients.
        sanitized: flag of each message, True if its texts may not become control tokens.
        sanitizes_variables: True if the texts of `request_variables` may not become control tokens.
    """

    messages: list[dict[str, Any]]
    request_variables: Mapping[str, Any]
    fixed: Mapping[str, Any]
    sanitized: list[bool]
    sanitizes_variables: bool = True


class Rendered(NamedTuple):
    """A rendered text.

    Args:
        text: the text.
        has_marks: True if the text has marks in place of some characters.
        is_other: True if the template writes a different text when the texts of clients have no marks.
    """

    text: str
    has_marks: bool
    is_other: bool


class TemplateText(NamedTuple):
    """Names and texts in a template's source.

    Args:
        names: names of the variables that it reads.
        literals: its literal texts, both written and compared.
    """

    names: frozenset[str]
    literals: tuple[str, ...]


class Renderer:
    """Renders templates. Processes start when they are needed, and end with this object. Thread-safe."""

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
        program = "quire.text.chat.rendering:open_templates"
        self.processes = ProcessPool(lambda: BoundedProcess(program, b"", memory_bytes), MAX_PROCESSES)

    def render(self, source: str, variables: TemplateVariables, now: datetime, marked: MarkedTexts | None) -> Rendered:
        """Return the rendered text of a template."""
        kind, text = self._ask("render", source, [self._max_chars, now.isoformat(), variables, marked])
        return Rendered(text, kind in (MARKED, OTHER), kind == OTHER)

    def read(self, source: str) -> TemplateText:
        """Return the names and the texts in a template's source."""
        names, literals = json.loads(self._ask("read", source, None)[1])
        return TemplateText(frozenset(names), tuple(literals))

    def find_forms(self, source: str, fixed: Mapping[str, Any]) -> dict[str, str]:
        """Return the form in which a template reads the content of each role; see `content_forms`."""
        forms: dict[str, str] = json.loads(self._ask("find_forms", source, [self._max_chars, fixed])[1])
        return forms

    def try_all(self, source: str, trials: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """Return the texts that a template writes from sets of variables; None for each that it refuses."""
        texts: list[str | None] = json.loads(self._ask("try_all", source, [trials])[1])
        return texts

    def close(self) -> None:
        """End the processes; renderings in progress fail."""
        self.processes.close()

    def _ask(self, what: str, source: str, arguments: Any) -> tuple[bytes, str]:
        # Lone surrogates pass here; the tokenizer refuses them.
        raw = json.dumps([what, source, arguments], ensure_ascii=False).encode("utf-8", "surrogatepass")
        try:
            with self.processes.process() as process:
                answer = process.ask(raw, self._timeout_s)
        except LimitExceeded as error:
            most = f"{self._memory_bytes >> 20} MiB, or nests too deeply"
            if error.limit == "time":
                most = f"{self._timeout_s:g} s"
            raise RequestError(f"the chat template takes more than {most}", field="messages") from error
        kind, text = answer[:1], answer[1:].decode("utf-8", "surrogatepass")
        if kind in (DONE, MARKED, OTHER):
            return kind, text
        why = "cannot be compiled" if kind == BROKEN else "refuses this conversation"
        raise RequestError(f"the chat template {why}: {text}", field="messages")


# ---- inside the rendering process ----


def open_templates(_: bytes) -> Callable[[bytes], bytes]:
    """Return the function that answers the questions of a `Renderer`."""
    import jinja2

    templates = Templates()

    def answer(question: bytes) -> bytes:
        what, source, arguments = json.loads(question.decode("utf-8", "surrogatepass"))
        try:
            templates.compiled(source)
            if what == "read":
                return DONE + json.dumps(templates.read(source)).encode()
        except jinja2.TemplateError as error:
            return BROKEN + _reason(error)
        if what == "find_forms":
            return DONE + json.dumps(templates.find_forms(source, *arguments)).encode()
        if what == "try_all":
            return DONE + json.dumps(templates.try_all(source, *arguments)).encode()
        max_chars, now, variables, marked = arguments
        try:
            kind, text = templates.render(
                source,
                TemplateVariables(*variables),
                datetime.fromisoformat(now),
                None if marked is None else MarkedTexts(marked[0], tuple(marked[1])),
                max_chars,
            )
            return kind + text.encode("utf-8", "surrogatepass")
        except (MemoryError, RecursionError):
            raise
        except Exception as error:  # a template can raise any exception
            return FAILED + _reason(error)

    return answer


class Templates:
    """The templates of a process, compiled."""

    def __init__(self) -> None:
        self._state = TemplateState()
        self._environment = make_environment(self._state)
        self.compiled = lru_cache(maxsize=4)(self._environment.from_string)
        self._marks = lru_cache(maxsize=4)(Marks)

    def read(self, source: str) -> tuple[list[str], list[str]]:
        """Return the names of a template's variables, and its literals."""
        import jinja2.meta
        from jinja2.nodes import Const, TemplateData

        tree = self._environment.parse(source)
        names = jinja2.meta.find_undeclared_variables(tree)
        literals = {node.data for node in tree.find_all(TemplateData)}
        literals |= {node.value for node in tree.find_all(Const) if isinstance(node.value, str)}
        return sorted(names), sorted(literals)

    def find_forms(self, source: str, max_chars: int, fixed: Mapping[str, Any]) -> dict[str, str]:
        """Return the form in which a template reads the content of each role."""

        def write(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
            copy, begins = json.loads(json.dumps(messages)), messages[-1]["role"] != "assistant"
            return self._write(source, copy, {**fixed, "add_generation_prompt": begins, "tools": tools}, max_chars)

        return find_forms(write)

    def try_all(self, source: str, trials: Sequence[dict[str, Any]]) -> list[str | None]:
        """Return the texts that a template writes from sets of variables; None for each that it refuses."""
        texts: list[str | None] = []
        for variables in trials:
            try:
                texts.append(self._write(source, variables.pop("messages"), variables, MAX_TRIAL_CHARS))
            except MemoryError:
                raise
            except Exception:  # a template can raise any exception
                texts.append(None)
        return texts

    def render(
        self, source: str, variables: TemplateVariables, now: datetime, marked: MarkedTexts | None, max_chars: int
    ) -> tuple[bytes, str]:
        """Return the kind of the answer, and the rendered text, with marks if `marked` applies to any texts."""
        self._state.now = now
        messages, request_variables, fixed, *_ = variables
        marks = None if marked is None else self._marks(marked)
        copies = None if marks is None else _with_marks(variables, marks)
        text = self._write(source, messages, {**fixed, **request_variables}, max_chars)
        if marks is None or copies is None or SURROGATE.search(text):  # the tokenizer refuses surrogates
            return DONE, text
        self._state.marks = marks
        try:
            marked_text = self._write(source, copies[0], {**fixed, **copies[1]}, max_chars)
        finally:
            self._state.marks = None
        return MARKED if marks.remove(marked_text) == text else OTHER, marked_text

    def _write(self, source: str, messages: list[dict[str, Any]], others: Mapping[str, Any], max_chars: int) -> str:
        put_calls_in_form(messages, source)
        pieces: list[str] = []
        room = max_chars
        for piece in self.compiled(source).generate({**others, "messages": messages}):
            room -= len(piece)
            if room < 0:
                raise ValueError(f"what it writes is longer than {max_chars} characters")
            pieces.append(piece)
        return "".join(pieces)


def _with_marks(variables: TemplateVariables, marks: Marks) -> tuple[list[dict[str, Any]], dict[str, Any]] | None:
    """Return messages and given variables with marks; None if nothing has a mark.

    Content of the assistant and of the system has lenient marks, so that markers that the model itself wrote, and
    markers in instructions, stay tokens.
    """
    messages, request_variables, _, sanitized, sanitizes_variables = variables
    copies, changed = list[dict[str, Any]](), False
    for message, is_sanitized in zip(messages, sanitized, strict=True):
        copy = dict(message)
        for name in message.keys() - {"role"} if is_sanitized else ():
            is_lenient = name == "content" and message["role"] in ("assistant", "system")
            copy[name] = marks.put(message[name], first=LENIENT if is_lenient else STRICT)
            changed |= copy[name] is not message[name]
        copies.append(copy)
    others = (
        {name: marks.put(value) for name, value in request_variables.items()}
        if sanitizes_variables
        else dict(request_variables)
    )
    changed |= any(others[name] is not value for name, value in request_variables.items())
    return (copies, others) if changed else None


def _reason(error: Exception) -> bytes:
    text = str(error) or type(error).__name__
    return text[:1000].encode("utf-8", "surrogatepass")


class Arguments(dict[str, Any]):
    """The arguments of a call: an object, or its JSON if a template uses it as a text, as DeepSeek's templates do."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, after: str) -> str:
        return str(self) + after

    def __radd__(self, before: str) -> str:
        return before + str(self)


def put_calls_in_form(messages: list[dict[str, Any]], source: str) -> None:
    """Convert the calls of messages in place; for a template that writes no calls, move them into the content."""
    is_written = writes_no_calls(source)
    for message in messages:
        calls = message.get("tool_calls", [])
        if calls and is_written:
            text, content = written_calls(message.pop("tool_calls")), message["content"]
            message["content"] = text + content if isinstance(content, str) else [_part(text), *content]
        for call in calls:
            call["function"]["arguments"] = Arguments(call["function"]["arguments"])


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}

"""What the thread of an engine is told: to start a request, to end one, to do something between two steps."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire.engine.engine import Engine
from quire.engine.outputs import RequestOutput
from quire.execution.grammars import Grammar


@dataclass(slots=True, eq=False)
class Stream:
    """One request on its way through the engine's thread.

    Args:
        then: done once the request has ended, before the next step; its error ends the stream.
        items: outputs, or the error that ends the stream.
        grammar: what its request needs compiled, held until the request holds it.
    """

    request_id: str
    submit: Callable[[Engine], None]
    loop: asyncio.AbstractEventLoop
    then: Callable[[Engine], None] | None = None
    items: asyncio.Queue[RequestOutput | Exception] = field(default_factory=asyncio.Queue)
    grammar: Grammar | None = None

    def send(self, item: RequestOutput | Exception) -> None:
        """Hand an item to the task that follows, from the engine's thread."""
        # The loop may have closed under a task that is being torn down; there is nobody left to tell.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.items.put_nowait, item)


class Abort(NamedTuple):
    """Ends a stream's request; it names the stream, since another request may have taken its id."""

    stream: Stream


@dataclass(slots=True, eq=False)
class Call:
    """Something to do between two steps, and who waits for it.

    Args:
        run: what to do.
        answer: gets the result or the error; None where nobody waits.
    """

    run: Callable[[Engine], Any]
    answer: asyncio.Future[Any] | None = None

    def obey(self, engine: Engine) -> None:
        """Do it, from the engine's thread; what goes wrong goes back to who waits."""
        if self.answer is None:
            self.run(engine)
            return
        try:
            result = self.run(engine)
        except Exception as error:
            self.fail(error)
        else:
            self._tell(self.answer.set_result, result)

    def fail(self, error: Exception) -> None:
        """Tell who waits that it was not done."""
        if self.answer is not None:
            self._tell(self.answer.set_exception, error)

    def _tell(self, setter: Callable[[Any], None], value: Any) -> None:
        answer = self.answer
        assert answer is not None

        def tell() -> None:
            # Whoever waited may have been cancelled.
            if not answer.done():
                setter(value)

        with contextlib.suppress(RuntimeError):
            answer.get_loop().call_soon_threadsafe(tell)

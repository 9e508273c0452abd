"""The thread that an engine runs in: it obeys commands between two steps, and hands outputs to event loops."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterable

from quire.engine.async_commands import Abort, Call, Item, Stream, post_items
from quire.engine.engine import Engine
from quire.engine.exporters.prometheus import Metrics
from quire.engine.outputs.outputs import RequestOutput
from quire.engine.queue_slots import QueueSlots
from quire.errors import EngineClosed, RequestError, WorkerError

logger = logging.getLogger(__name__)


class EngineThread:
    """Runs an engine until it is told to end, or fails.

    Args:
        engine: which this thread owns from now on.
        metrics: are told of each step and output.
        slots: of the waiting queue; told of each request that starts and ends.

    Attributes:
        streams: of the requests that have not ended, by id.
        progress_s: when something was done last, or there was nothing to do; seconds, monotonic.
        has_ended: True once no command is obeyed any more.
        failure: what it died of, None while it lives and when it was told to end.
    """

    def __init__(self, engine: Engine, metrics: Metrics, slots: QueueSlots) -> None:
        self.streams: dict[str, Stream] = {}
        self.progress_s = time.monotonic()
        self.has_ended = False
        self.failure: BaseException | None = None
        self._engine = engine
        self._metrics = metrics
        self._slots = slots
        self._commands: queue.SimpleQueue[Stream | Abort | Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._thread.start()

    def put(self, command: Stream | Abort | Call) -> None:
        """Give a command.

        Who waits for what comes of it looks at `has_ended` behind this: put before the last look at the commands it is
        told, put later it must see that.
        """
        self._commands.put(command)

    @property
    def is_alive(self) -> bool:
        """True while the thread runs and the engine has not failed; what has failed may take a while to end."""
        return self.failure is None and self._thread.is_alive()

    def shutdown(self, timeout_s: float) -> None:
        """End every request and the thread, which gets some seconds to end its step; may be called twice."""
        self._commands.put(None)
        self._thread.join(timeout_s)

    def dead(self) -> WorkerError:
        """Return the error for what comes too late."""
        if self.failure is None:
            return EngineClosed("the engine was shut down; make another one")
        return WorkerError(f"the engine does not run: {self.failure}")

    def abort_request(self, request_id: str) -> bool:
        """End a request, from this thread, and send its last output to its stream, if it still has one.

        Returns:
            False for an unknown or finished request.
        """
        output = self._engine.abort_request(request_id)
        if output is None:
            return False
        self._metrics.on_step(self._engine.measure())
        self._metrics.on_output(output)
        self._send([(request_id, output)])
        return True

    def _run(self) -> None:
        """Obey commands and step while there is work; sleep while there is none."""
        error = WorkerError("the engine has shut down")
        try:
            while self._run_commands():
                self.progress_s = time.monotonic()
                if self._engine.has_unfinished:
                    self._publish(self._engine.step())
        except BaseException as failure:  # a panic of a library in Rust is no Exception
            logger.exception("the engine has died")
            error, self.failure = WorkerError(str(failure)), failure
        finally:
            self.has_ended = True
            self._send([(request_id, error) for request_id in self.streams])
            self._fail_commands()
            self._engine.close()

    def _run_commands(self) -> bool:
        """Start and abort requests; wait for a command when there is nothing else to do.

        Returns:
            False when it is time to end.
        """
        while True:
            is_idle = not self._engine.has_unfinished
            if is_idle:
                self.progress_s = time.monotonic()
            try:
                command = self._commands.get(block=is_idle)
            except queue.Empty:
                return True
            self.progress_s = time.monotonic()
            if command is None:
                return False
            if isinstance(command, Abort):
                self._abort(command.stream)
            elif isinstance(command, Call):
                command.execute(self._engine)
            else:
                self._start(command)

    def _start(self, stream: Stream) -> None:
        """Hand a request to the engine; whatever goes wrong goes back to its task alone."""
        try:
            stream.submit(self._engine)
        except Exception as error:
            if not isinstance(error, RequestError):
                logger.exception("request %r could not be started", stream.request_id)
            post_items([(stream, error)])
        except BaseException:  # a panic, which ends the engine; see `_run`
            post_items([(stream, WorkerError("the engine has died"))])
            raise
        else:
            self.streams[stream.request_id] = stream
        finally:
            self._slots.start()

    def _abort(self, stream: Stream) -> None:
        """End a stream's request, unless it has ended, or was refused because another has its id."""
        if self.streams.get(stream.request_id) is stream:
            del self.streams[stream.request_id]
            self.abort_request(stream.request_id)

    def _publish(self, outputs: list[RequestOutput]) -> None:
        """Count a step's outputs, then send them to their streams: who has an output finds it counted."""
        self._metrics.on_step(self._engine.measure())
        for output in outputs:
            self._metrics.on_output(output)
        self._send((output.request_id, output) for output in outputs)

    def _send(self, items: Iterable[tuple[str, Item]]) -> None:
        """Hand items to the streams of the requests with these ids; nobody follows a request that was aborted."""
        addressed: list[tuple[Stream, Item]] = []
        for request_id, item in items:
            is_last = isinstance(item, Exception) or item.finished
            if is_last:
                self._slots.end()
            stream = self.streams.pop(request_id, None) if is_last else self.streams.get(request_id)
            if stream is None:
                continue
            if stream.on_end is not None and not isinstance(item, Exception) and item.finished:
                try:
                    stream.on_end(self._engine)
                except RequestError as error:
                    item = error
            addressed.append((stream, item))
        post_items(addressed)

    def _fail_commands(self) -> None:
        """Tell the tasks whose requests never started."""
        while True:
            try:
                command = self._commands.get(block=False)
            except queue.Empty:
                return
            if isinstance(command, Stream):
                self._slots.start()
                post_items([(command, self.dead())])
            elif isinstance(command, Call):
                command.fail(self.dead())

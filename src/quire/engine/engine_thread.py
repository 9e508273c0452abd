"""The thread of an engine: it runs commands between two steps, and posts outputs to event loops."""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any

from quire.engine.async_commands import Abort, Call, DeltaPacer, Stream, post_items
from quire.engine.engine import Engine
from quire.engine.exporters.prometheus import Metrics
from quire.engine.outputs.mailbox import Item
from quire.engine.outputs.outputs import RequestOutput
from quire.engine.queue_slots import QueueSlots
from quire.errors import ConfigError, EngineClosed, RankFailed, RequestError, WorkerError

logger = logging.getLogger(__name__)

# Time for the last step when the interpreter exits without `shutdown`.
EXIT_S = 30.0
# Time between two outputs of a `final_only` request: operators see its progress, and its text is not detokenized all at
# once.
PROGRESS_S = 0.5


class EngineThread:
    """Runs an engine until `shutdown`, until the engine fails, or until the interpreter exits."""

    def __init__(self, engine: Engine, metrics: Metrics, slots: QueueSlots) -> None:
        self.streams: dict[str, Stream] = {}
        self.progress_s = time.monotonic()
        self.has_ended = False
        self.failure: BaseException | None = None
        self._engine = engine
        self._metrics = metrics
        self._slots = slots
        self._pacer = DeltaPacer()
        self._next_progress_s = 0.0
        self._commands: queue.SimpleQueue[Stream | Abort | Call | WorkerError | ConfigError | None] = (
            queue.SimpleQueue()
        )
        if engine.ranks is not None:
            engine.ranks.on_failure(lambda error: self._commands.put(error))
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._thread.start()
        # Called when the interpreter exits, while threads still run. Afterwards, a thread that takes the GIL again is
        # killed, which aborts the process if the thread is in a torch operator.
        weakref.finalize(self, _end, self._commands, self._thread, EXIT_S)

    def put(self, command: Stream | Abort | Call) -> None:
        """Queue a command.

        A caller that waits for a result checks `has_ended` afterwards: the thread sets it before it drains the queue
        for the last time, and later commands get no answer.
        """
        self._commands.put(command)

    @property
    def is_alive(self) -> bool:
        """True while the thread runs and the engine has not failed."""
        return self.failure is None and self._thread.is_alive()

    def shutdown(self, timeout_s: float) -> None:
        """End every request and the thread; wait at most `timeout_s` for its current step. May be called twice."""
        _end(self._commands, self._thread, timeout_s)

    def dead(self) -> WorkerError:
        """Return the error for calls after the end of the thread."""
        if self.failure is None:
            return EngineClosed("the engine was shut down; make another one")
        return _error_of(self.failure, "the engine does not run: ")

    def abort_request(self, request_id: str) -> bool:
        """End a request, in this thread, and send its last output to its stream, if it still has one."""
        output = self._engine.abort_request(request_id)
        if output is None:
            return False
        self._metrics.on_step(self._engine.measure())
        self._send_outputs([output])
        return True

    def _run(self) -> None:
        """Run commands and steps while there is work; sleep while there is none."""
        error = WorkerError("the engine has shut down")
        try:
            while self._run_commands():
                self.progress_s = time.monotonic()
                if self._engine.has_unfinished:
                    self._publish(self._engine.step(self._may_hold))
                    if time.monotonic() > self._next_progress_s:
                        self._send_held(with_progress=True)
                        self._next_progress_s = time.monotonic() + PROGRESS_S
        except BaseException as failure:  # a panic of a library in Rust is no Exception
            logger.exception("the engine has died")
            error, self.failure = _error_of(failure), failure
        finally:
            self.has_ended = True
            try:
                self._send_held()
            except Exception:
                logger.exception("the last tokens of streams are lost")
            self._send([(request_id, error) for request_id in self.streams])
            self._fail_commands()
            self._engine.close()

    def _run_commands(self) -> bool:
        """Run all queued commands; wait for one while the engine is idle."""
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
            if isinstance(command, WorkerError | ConfigError):
                raise command
            if isinstance(command, Abort):
                self._abort(command.stream)
            elif isinstance(command, Call):
                command.execute(self._engine)
            else:
                self._start(command)

    def _start(self, stream: Stream) -> None:
        """Add a request to the engine; an error goes to the request's stream only."""
        # The step with its prompt may take long, so held outputs are sent first.
        self._send_held()
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
        """End a stream's request, unless it has ended, or was refused because its id was in use."""
        if self.streams.get(stream.request_id) is stream:
            del self.streams[stream.request_id]
            self.abort_request(stream.request_id)

    def _may_hold(self) -> bool:
        """Return whether outputs may wait for the next step: not if it computes prompts, which may take long."""
        scheduler = self._engine.scheduler
        # The sequence that was admitted last is the last one with a prompt that is computed in chunks.
        has_prompt = bool(scheduler.waiting or (scheduler.running and scheduler.running[-1].num_pending > 1))
        return not has_prompt and self._pacer.may_hold()

    def _send_held(self, *, with_progress: bool = False) -> None:
        """Send the outputs that wait for the next step; see `OutputProcessor.take_outputs`."""
        self._send_outputs(self._engine.outputs.take_outputs(with_progress=with_progress))

    def _publish(self, outputs: list[RequestOutput]) -> None:
        """Count a step, and send its outputs."""
        self._metrics.on_step(self._engine.measure())
        self._send_outputs(outputs)

    def _send_outputs(self, outputs: list[RequestOutput]) -> None:
        """Count outputs, then send them to their streams, so that the metrics include each output sent."""
        self._metrics.on_outputs(outputs)
        self._send((output.request_id, output) for output in outputs)

    def _send(self, items: Iterable[tuple[str, Item]]) -> None:
        """Post items to the streams of their requests; an aborted request may have none."""
        sent: list[tuple[Stream, Item]] = []
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
            sent.append((stream, item))
        if sent:
            self._pacer.on_post()
            post_items(sent, self._pacer)

    def _fail_commands(self) -> None:
        """Fail the commands that were never run."""
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


def _end(commands: queue.SimpleQueue[Any], thread: threading.Thread, timeout_s: float) -> None:
    """End a thread after its current step, and wait for it, at most `timeout_s`."""
    commands.put(None)
    if thread is not threading.current_thread():
        thread.join(timeout_s)


def _error_of(failure: BaseException, where: str = "") -> WorkerError:
    """Return the error of requests for the failure of an engine; that of a rank keeps its type."""
    return (
        RankFailed(failure.rank, failure.why) if isinstance(failure, RankFailed) else WorkerError(f"{where}{failure}")
    )

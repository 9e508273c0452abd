"""Parsing of a server's answers: what is damaged or ambiguous is refused, so that no client waits for its end."""

from __future__ import annotations

from typing import Any, Final

import h11

from quire.server.http.strict import StrictParser

# The beginning of each answer; one with another beginning might never have the end of a head.
BEGIN: Final = b"HTTP/1."
# Headers of an answer: clients refuse more than 100 with those that the proxy adds.
MAX_HEADERS: Final = 90
# Interim responses (statuses 1xx) before one answer.
MAX_INTERIM: Final = 64
# Answers without a body, beside those to HEAD.
NO_BODY: Final = (204, 304)


class AnswerParser(StrictParser):
    """A parser of the answers on one connection.

    It refuses statuses outside 200 to 599, switches of the protocol, many interim responses or headers, and bodies
    without a length or chunks: their end would be that of the connection, so that a part could not be told from the
    whole.
    """

    def __init__(self) -> None:
        super().__init__(h11.CLIENT)
        self._num_interim = 0
        self._is_head = False

    def send(self, event: Any) -> Any:
        """Return the bytes of an event."""
        if isinstance(event, h11.Request):
            self._num_interim, self._is_head = 0, event.method == b"HEAD"
        return super().send(event)

    def next_event(self) -> Any:
        """Return the next event."""
        if self.their_state is h11.SEND_BODY:  # most events, and nothing is refused beyond h11's own rules
            return h11.Connection.next_event(self)
        if self.their_state is h11.SEND_RESPONSE:
            begin = self.trailing_data[0][: len(BEGIN)]
            if not BEGIN.startswith(begin):
                raise h11.RemoteProtocolError(f"it begins with {begin!r}")
        event = super().next_event()
        if event is h11.PAUSED:
            raise h11.RemoteProtocolError("it switches to another protocol")
        if isinstance(event, h11.InformationalResponse):
            self._num_interim += 1
            if self._num_interim > MAX_INTERIM:
                raise h11.RemoteProtocolError(f"there are more than {MAX_INTERIM} interim responses")
        elif isinstance(event, h11.Response):
            self._check(event)
        return event

    def _check(self, head: h11.Response) -> None:
        if head.status_code > 599:
            raise h11.RemoteProtocolError(f"the status {head.status_code} is not from 200 to 599")
        if head.http_version not in (b"1.0", b"1.1"):
            raise h11.RemoteProtocolError(f"its version is HTTP/{head.http_version.decode('ascii')}")
        names = {name for name, _ in head.headers}
        if len(head.headers) > MAX_HEADERS:
            raise h11.RemoteProtocolError(f"it has more than {MAX_HEADERS} headers")
        has_end = self._is_head or head.status_code in NO_BODY or names & {b"content-length", b"transfer-encoding"}
        if not has_end:
            raise h11.RemoteProtocolError("it has neither Content-Length nor chunks")

"""HTTP parsing that refuses what two implementations could split differently, for both ends of a connection."""

from __future__ import annotations

import re
from typing import Any, Final

import h11

# Bytes of a head: a request or status line with its headers. h11 applies this limit to an incomplete head only.
MAX_HEAD: Final = 16 << 10
END_OF_HEAD: Final = re.compile(rb"\n\r?\n")


class StrictParser(h11.Connection):
    """A parser of requests or answers that refuses ambiguous ones, and long heads.

    h11 refuses most ambiguities itself. Two equal `Content-Length` headers, a header folded over lines and a bare line
    feed at the end of a header have a single meaning by RFC 9112, and are accepted.

    Args:
        our_role: `h11.SERVER` to parse requests, `h11.CLIENT` to parse answers.
    """

    def __init__(self, our_role: type[h11.SERVER | h11.CLIENT]) -> None:
        super().__init__(our_role, MAX_HEAD)

    def next_event(self) -> Any:
        """Return the next event.

        Raises:
            h11.RemoteProtocolError: the other side has sent what is refused.
        """
        if self.their_state in (h11.IDLE, h11.SEND_RESPONSE) and self._has_long_head():
            raise h11.RemoteProtocolError(f"the first line and the headers have more than {MAX_HEAD} bytes")
        event = super().next_event()
        if isinstance(event, (h11.Request, h11.Response)):
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names and (b"content-length" in names or event.http_version != b"1.1"):
                raise h11.RemoteProtocolError("Transfer-Encoding with Content-Length, or in HTTP/1.0")
        return event

    def _has_long_head(self) -> bool:
        arrived, _ = self.trailing_data
        return len(arrived) > MAX_HEAD and not END_OF_HEAD.search(arrived, 0, MAX_HEAD)

"""The form of the log, in the server's process and in its fronts."""

from __future__ import annotations

import logging
from typing import cast


def set_up_log(level: int | str, *, is_json: bool) -> None:
    """Set the level and the form of the log.

    Args:
        level: least level of what is logged.
        is_json: True to write each record as a line of JSON.
    """
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s", force=True)
    if is_json:
        from quire.server.state.request_log import JsonLines  # the command line starts faster without it

        for handler in logging.getLogger().handlers:
            handler.setFormatter(cast(logging.Formatter, JsonLines()))  # only `format` of it is called
    for chatty in ("asyncio", "httpx"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    # uvicorn warns of each request that is not HTTP, and any client can send thousands.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)

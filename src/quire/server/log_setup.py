"""The log of a server: its level, and lines of text or of JSON."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from typing import Any, Final, cast

# Attribute of a log record with its fields.
FIELDS: Final = "quire_fields"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """Level and form of a process's log.

    Args:
        level: minimum level of messages, such as "info".
        is_json: True for lines of JSON.
    """

    level: str = "info"
    is_json: bool = False

    def apply(self, name: str = "") -> None:
        """Set up the log of this process.

        Args:
            name: name of the process, which precedes the messages of its lines of text.
        """
        prefix = f"{name}: " if name else ""
        logging.basicConfig(
            level=self.level.upper(), format=f"%(asctime)s %(levelname)s {prefix}%(message)s", force=True
        )
        if self.is_json:
            for handler in logging.getLogger().handlers:
                handler.setFormatter(cast("logging.Formatter", JsonLines(name)))  # only `format` of it is called
        for chatty in ("asyncio", "httpx"):
            logging.getLogger(chatty).setLevel(logging.WARNING)
        # uvicorn warns of each request that is not HTTP, and any client can send thousands.
        logging.getLogger("uvicorn").setLevel(logging.ERROR)


class JsonLines:
    """Formats log records as lines of JSON: `time`, `level`, `logger`, `message`, a record's own fields, `error`.

    `process` is the name of the process, if it has one.
    """

    def __init__(self, process: str = "") -> None:
        self._plain = logging.Formatter()
        self._process = {"process": process} if process else {}

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        line: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._process,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["error"] = self._plain.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)

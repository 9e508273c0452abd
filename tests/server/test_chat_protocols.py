"""Arguments of calls as objects, for protocols that have them so."""

from __future__ import annotations

from typing import Any

import pytest

from quire.server.protocols.chat_protocols import arguments_object


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{}", {}),
        ('{"a": [1, 2.5, null, "\u00e9\\ud83e\\udd84"]}', {"a": [1, 2.5, None, "\u00e9\U0001f984"]}),
        *((cut, None) for cut in ("", "{", '{"city": "Par', '{"a": 1}}')),
        *((other, None) for other in ("[]", "1", "null", '{"a": NaN}')),
        *(
            (unwritable, None)
            for unwritable in ('{"a": 1e999}', '{"a": "\\ud800"}', '{"a":' + "[" * 500 + "]" * 500 + "}")
        ),
    ],
)
def test_arguments_are_an_object_that_can_be_written_or_none(text: str, value: Any) -> None:
    assert arguments_object(text) == value

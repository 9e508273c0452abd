"""Traces: what is read, and how a wrong line is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.errors import TraceError
from quire.measurement.bench.trace import TracedRequest, read_trace

CHAT = [{"role": "user", "content": "Hello"}]


def write(folder: Path, *lines: str) -> str:
    path = folder / "trace.jsonl"
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def test_all_three_forms_are_read(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"prompt": "Once", "max_tokens": 4}',
        "",
        '{"prompt_token_ids": [1, 2], "max_tokens": 5, "arrival_s": null}',
        '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6}',
    )
    requests = read_trace(path)
    assert requests == [TracedRequest("Once", 4), TracedRequest([1, 2], 5), TracedRequest(CHAT, 6)]
    assert [request.is_chat for request in requests] == [False, False, True]


def test_arrivals_are_read(tmp_path: Path) -> None:
    path = write(tmp_path, *(f'{{"prompt": "a", "max_tokens": 1, "arrival_s": {at}}}' for at in (3, 0.5)))
    assert [request.arrival_s for request in read_trace(path)] == [3, 0.5]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "it is not JSON"),
        ("[1]", "it must be an object"),
        (
            '{"prompt": "a", "max_tokens": 1, "n": 2}',
            "'n' is not a field; there are prompt, prompt_token_ids",
        ),
        ('{"max_tokens": 1}', "there must be one of prompt, prompt_token_ids, messages, got none"),
        ('{"prompt": "a", "prompt_token_ids": [1], "max_tokens": 1}', "got prompt and prompt_token_ids"),
        ('{"prompt": "", "max_tokens": 1}', "prompt must be text that is not empty, got ''"),
        ('{"prompt_token_ids": [1, -1], "max_tokens": 1}', "prompt_token_ids must be a list of token ids"),
        ('{"prompt_token_ids": [true], "max_tokens": 1}', "prompt_token_ids must be a list of token ids"),
        ('{"messages": ["a"], "max_tokens": 1}', "messages must be a list of objects with a role"),
        ('{"prompt": "a"}', "there must be max_tokens, got none"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens must be a whole number of at least 1, got 0"),
        ('{"prompt": "a", "max_tokens": 1.5}', "max_tokens must be a whole number of at least 1, got 1.5"),
        ('{"prompt": "a", "max_tokens": 1, "arrival_s": -1}', "arrival_s must be a number of seconds of at least 0"),
        ('{"prompt": "a", "max_tokens": 1, "arrival_s": NaN}', "arrival_s must be a number of seconds of at least 0"),
        ('{"prompt": "a", "max_tokens": 1, "arrival_s": 1}', "arrival_s must be in all lines, or in none of them"),
    ],
)
def test_a_wrong_line_is_named_by_file_line_and_field(tmp_path: Path, line: str, words: str) -> None:
    path = write(tmp_path, '{"prompt": "a", "max_tokens": 1}', line)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert f"{path} line 2: " in str(caught.value)
    assert words in str(caught.value)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"missing\.jsonl cannot be read: No such file"):
        read_trace(str(tmp_path / "missing.jsonl"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(TraceError, match="it is not UTF-8"):
        read_trace(str(tmp_path / "binary"))
    with pytest.raises(TraceError, match="has no requests"):
        read_trace(write(tmp_path, "", " "))

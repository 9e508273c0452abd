"""`quire chat` keeps a conversation, stops at Ctrl-C, and reads a pipe."""

from __future__ import annotations

import io
import signal
from pathlib import Path

import pytest

from quire.cli.chat import Conversation, talk
from quire.cli.main import main
from quire.engine.llm import LLM
from quire.errors import PromptTooLong
from quire.sequences.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
SYSTEM = "Answer in short and simple words, and be kind to whoever asks."


def test_each_turn_stands_on_the_turns_before(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(llm, GREEDY, SYSTEM)
    conversation.take("Tell me a story about a fox.")
    before = llm.stats
    conversation.take("What colour is a lemon?")
    assert [message["role"] for message in conversation.messages] == [
        "system", "user", "assistant", "user", "assistant",
    ]  # fmt: skip
    said = capsys.readouterr().out
    assert said == "".join(
        message["content"] + "\n" for message in conversation.messages if message["role"] == "assistant"
    )
    assert llm.stats.prefix_hits - before.prefix_hits >= llm.resolved.block_size
    conversation.take("/new")
    assert conversation.messages == [{"role": "system", "content": SYSTEM}]


class InterruptingScreen(io.StringIO):
    """Sends Ctrl-C as soon as something is written."""

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.tell() == written:
            signal.raise_signal(signal.SIGINT)
        return written


def test_ctrl_c_stops_the_answer_and_frees_its_memory(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = Conversation(llm, SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True), None)
    before = llm.stats.generation_tokens
    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", InterruptingScreen())
        conversation.take("Tell me a story about a fox.")
    assert llm.stats.generation_tokens - before < 100
    assert conversation.messages[-1]["content"]
    assert llm.usage().used == 0
    assert not llm.engine.has_unfinished
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_question_that_is_refused_leaves_the_conversation_as_it_was(llm: LLM) -> None:
    conversation = Conversation(llm, GREEDY, None)
    with pytest.raises(PromptTooLong):
        conversation.take("word " * 600)
    assert conversation.messages == []


def test_a_pipe_has_a_question_on_each_line(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = ["Hello!", "What colour is a lemon?"]
    conversation = Conversation(llm, GREEDY, SYSTEM)
    for question in questions:
        conversation.take(question)
    expected = capsys.readouterr().out
    file = tmp_path / "questions.txt"
    file.write_text("\n\n".join(questions), encoding="utf-8")
    flags = ["--system", SYSTEM, "--temperature", "0", "--max-tokens", "16", "--num-threads", "1"]
    with file.open(encoding="utf-8") as pipe:
        monkeypatch.setattr("sys.stdin", pipe)
        assert main(["chat", *flags]) == 0
    assert capsys.readouterr().out == expected


def test_commands_are_answered_here_and_unknown_ones_are_not_sent(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = Conversation(llm, GREEDY, None)
    lines = iter(["/help", "/nwe x", "//etc is a folder", "/bye", "never read"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    talk(llm, conversation)
    said = capsys.readouterr().out
    assert said.count("/new starts a new conversation, /bye ends") == 2
    assert "unknown command /nwe" in said
    assert [message["content"] for message in conversation.messages[::2]] == ["/etc is a folder"]
    assert next(lines) == "never read"

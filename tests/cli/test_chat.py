"""`quire chat` keeps a conversation, stops at Ctrl-C, and reads a pipe."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
from pathlib import Path

import pytest

from quire.cli.main import main
from quire.cli.terminal.chat import handle, talk
from quire.cli.terminal.conversation import Conversation
from quire.cli.terminal.word_wrap import WordWrap
from quire.engine.llm import LLM
from quire.errors import PromptTooLong, RequestError
from quire.models.checkpoints.checkpoint import locate
from quire.sequences.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
SYSTEM = "Answer in short and simple words, and be kind to whoever asks."


def test_each_turn_stands_on_the_turns_before(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(llm, GREEDY, SYSTEM)
    conversation.ask("Tell me a story about a fox.")
    before = llm.stats
    conversation.ask("What colour is a lemon?")
    assert [message["role"] for message in conversation.messages] == [
        "system", "user", "assistant", "user", "assistant",
    ]  # fmt: skip
    said = capsys.readouterr().out
    assert said == "".join(
        message["content"] + "\n" for message in conversation.messages if message["role"] == "assistant"
    )
    assert llm.stats.prefix_hits - before.prefix_hits >= llm.resolved.block_size
    assert handle(conversation, "/new")
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
        conversation.ask("Tell me a story about a fox.")
    assert llm.stats.generation_tokens - before < 100
    assert conversation.messages[-1]["content"]
    assert llm.usage().used == 0
    assert not llm.engine.has_unfinished
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_question_that_is_refused_leaves_the_conversation_as_it_was(llm: LLM) -> None:
    conversation = Conversation(llm, GREEDY, None)
    with pytest.raises(PromptTooLong):
        conversation.ask("word " * 600)
    assert conversation.messages == []


def test_a_pipe_has_a_question_on_each_line(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = ["Hello!", "What colour is a lemon?"]
    conversation = Conversation(llm, GREEDY, SYSTEM)
    for question in questions:
        conversation.ask(question)
    expected = capsys.readouterr().out
    file = tmp_path / "questions.txt"
    file.write_text("\n\n".join(questions), encoding="utf-8")
    flags = ["--system", SYSTEM, "--temperature", "0", "--max-tokens", "16", "--num-threads", "1"]
    with file.open(encoding="utf-8") as pipe:
        monkeypatch.setattr("sys.stdin", pipe)
        assert main(["chat", *flags]) == 0
    assert capsys.readouterr().out == expected


def type_in(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Have `input` return lines, and then end."""
    left = iter(lines)

    def read(_: str) -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)


def test_commands_are_answered_here_and_unknown_ones_are_not_sent(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = Conversation(llm, GREEDY, None)
    type_in(monkeypatch, "/help", "/nwe x", "//etc is a folder", "/bye", "never read")
    talk(llm, conversation)
    said = capsys.readouterr()
    assert "/regen" in said.out
    error = " ".join(said.err.split())
    assert "unknown command /nwe: did you mean /new?" in error
    assert "/help, /system, /set" in error
    assert [message["content"] for message in conversation.messages[::2]] == ["/etc is a folder"]


def test_a_question_may_have_several_lines(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = Conversation(llm, GREEDY, None)
    type_in(monkeypatch, '"""What colour', "is a", 'lemon?"""', '"""Hello!"""')
    talk(llm, conversation)
    assert [message["content"] for message in conversation.messages[::2]] == ["What colour\nis a\nlemon?", "Hello!"]


def test_commands_change_the_conversation(llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(llm, GREEDY, None)

    def run(line: str) -> str:
        assert handle(conversation, line)
        return capsys.readouterr().out.strip()

    first = run("What colour is a lemon?")
    assert run("/regen") == first
    assert len(conversation.messages) == 2
    assert SYSTEM in run(f"/system {SYSTEM}")
    assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant"]
    assert run("/set max-tokens 2") == "max_tokens is 2 from now on."
    assert run("/set temperature=0.5") == "temperature is 0.5 from now on."
    assert "temperature=0.5" in run("/set")
    run("Where do penguins live?")
    file = tmp_path / "saved.json"
    assert run(f"/save {file}") == f"Saved 5 messages in {file}."
    assert json.loads(file.read_text(encoding="utf-8"))["messages"] == conversation.messages
    assert run("/undo") == "Forgotten: Where do penguins live?"
    assert len(conversation.messages) == 3
    run("/clear")
    assert conversation.messages == [{"role": "system", "content": SYSTEM}]
    run("/system")
    assert conversation.messages == []
    assert not handle(conversation, "/quit")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/regen", "there is no answer yet"),
        ("/undo", "there is no answer yet"),
        ("/save", "a file is needed"),
        ("/save /no/such/folder/file", "cannot be written: No such file"),
        ("/set temprature 1", "did you mean temperature?"),
        ("/set temperature hot", "temperature must be written as X"),
        ("/set temperature -1", "temperature must be a number from 0 to 100"),
        ("/set n 2", "n has no place in a chat"),
        ("/set ignore-eos perhaps", "must be true or false"),
    ],
)
def test_a_refused_command_says_why_and_changes_nothing(llm: LLM, line: str, words: str) -> None:
    conversation = Conversation(llm, GREEDY, SYSTEM)
    before = list(conversation.messages)
    with pytest.raises(RequestError, match=words):
        handle(conversation, line)
    assert (conversation.messages, conversation.params) == (before, GREEDY)


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_on_a_terminal_an_answer_ends_with_its_speed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", terminal)
        Conversation(llm, GREEDY, None).ask("What colour is a lemon?")
    assert re.search(r"\d+ tokens, [\d.]+ tokens/s, the first after [\d.]+ s; \d+ of \d+", terminal.getvalue())


@pytest.mark.parametrize("size", [1, 3, 100])
def test_words_are_not_broken_at_the_edge(size: int) -> None:
    text = "The opposite of hot is cold.\n\n  an indented line, and a-word-that-is-longer-than-a-line\nend"
    stream = io.StringIO()
    screen = WordWrap(stream, width=16)
    for start in range(0, len(text), size):
        screen.write(text[start : start + size])
    screen.end()
    assert stream.getvalue() == (
        "The opposite of\nhot is cold.\n\n  an indented\nline, and\na-word-that-is-l\nonger-than-a-lin\ne\nend\n"
    )


def test_texts_without_spaces_are_shown_as_they_come() -> None:
    stream = io.StringIO()
    screen = WordWrap(stream, width=6)
    shown = []
    for char in "狐は庭に":
        screen.write(char)
        shown.append(stream.getvalue())
    assert shown == ["狐", "狐は", "狐は庭", "狐は庭\nに"]


def test_a_model_without_a_chat_template_is_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "base"
    shutil.copytree(locate("bundled"), folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    assert main(["chat", str(folder), "--num-kv-blocks", "16", "--max-model-len", "64"]) == 2
    said = capsys.readouterr().err
    assert "has no chat template, which a conversation needs: give --chat-template FILE" in said
    assert "quire generate" in said

"""The conversations with tools and thinking that the bundled model learns, and its chat template."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from quire.text.chat.chat_template import ChatTemplate
from quire.text.reasoning import choose_reasoning_format
from quire.text.reasoning.formats import THINK
from quire.text.tool_calls import choose_format
from quire.text.tool_calls.calls import Function
from quire.text.tool_calls.parser import CallParser
from tests.text.tool_calls.markups import form_of
from tools.bundled_model.calibration import lines
from tools.bundled_model.card import CONTINUED, training_section
from tools.bundled_model.conversation import CHAT_TEMPLATE, MARKERS, document_of, prompt_of
from tools.bundled_model.corpus import BOS, documents
from tools.bundled_model.data import with_markers
from tools.bundled_model.skills import mixed_documents
from tools.bundled_model.thoughts import thoughtful_chat, thoughtful_tool_chat
from tools.bundled_model.tool_chats import exchange, new_tool, tool_chat
from tools.bundled_model.tool_kinds import KINDS, looked_up

BUNDLED = Path(__file__).resolve().parents[2] / "src" / "quire" / "models" / "bundled"


@pytest.fixture(scope="module")
def template() -> Iterator[ChatTemplate]:
    """The chat template."""
    template = ChatTemplate(CHAT_TEMPLATE, bos_token=BOS)
    yield template
    template.close()


def test_the_bundled_folder_has_the_template() -> None:
    stored = json.loads((BUNDLED / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert stored["chat_template"] == CHAT_TEMPLATE


def tidy(text: str) -> str:
    """Return a text as templates trim it: a question that lost its last mark may end with a space."""
    return text.replace(" <|end|>", "<|end|>")


def test_the_template_writes_what_was_learned(template: ChatTemplate) -> None:
    rng = random.Random(1)
    for _ in range(60):
        messages, tools, _ = tool_chat(rng)
        definitions = [tool.definition for tool in tools]
        text = "".join(text for text, _ in document_of(messages, definitions))
        assert template.render(messages, tools=definitions, add_generation_prompt=False) == tidy(text)
        messages, definitions = thoughtful_tool_chat(rng) if rng.random() < 0.5 else (thoughtful_chat(rng), [])
        (*before, (prompt, _), (said, is_learned)) = document_of(messages, definitions)
        prompt = "".join(text for text, _ in before) + prompt
        rendered = template.render(messages[:-1], tools=definitions, variables={"enable_thinking": True})
        assert rendered == tidy(prompt) == tidy(prompt_of(messages[:-1], definitions, is_thinking=True))
        assert is_learned
        assert said.startswith(messages[-1]["reasoning"] + THINK.end)


def test_chats_without_tools_and_thinking_are_rendered_as_before(template: ChatTemplate) -> None:
    conversations = [json.loads(line)["messages"] for line in lines(60) if "messages" in line]
    assert len(conversations) > 20
    for messages in conversations:
        turns = "".join(f"<|{message['role']}|>{message['content']}<|end|>" for message in messages)
        assert template.render(messages, add_generation_prompt=False) == BOS + turns
        assert template.render(messages, variables={"enable_thinking": False}) == f"{BOS}{turns}<|assistant|>"
        assert template.render(messages) == f"{BOS}{turns}<|assistant|>"


def test_a_tool_is_listed_as_a_signature(template: ChatTemplate) -> None:
    unit = {"enum": ["day", "week"]}
    tools: list[dict[str, Any]] = [
        {"function": {"name": "now"}},
        {"function": {"name": "search", "description": " Finds.\n", "parameters": {"type": "object"}}},
        {
            "function": {
                "name": "plan",
                "parameters": {
                    "properties": {"city": {"type": "string"}, "per": unit, "x": {"type": ["string", "null"]}, "y": {}},
                    "required": ["city"],
                },
            }
        },
    ]
    text = template.render([{"role": "user", "content": "Hi"}], tools=tools)
    listed = "now()\nsearch(): Finds.\nplan(city: string, per?: day | week, x?: any, y?: any)"
    assert text == f"{BOS}<|tools|>{listed}<|end|><|user|>Hi<|end|><|assistant|>"


def test_the_template_shows_its_formats() -> None:
    template = ChatTemplate(CHAT_TEMPLATE)
    form = choose_format("auto", template).form
    assert form.name == "hermes"
    assert choose_reasoning_format("auto", template).form is THINK
    template.close()


def test_the_parser_reads_the_calls_that_were_learned() -> None:
    rng = random.Random(2)
    form = form_of("hermes")
    for kind in [*KINDS, *(looked_up(rng) for _ in range(10))]:
        tool = new_tool(rng, kind)
        told = exchange(rng, tool)
        (_, (said, _)), *_ = [document_of(told.messages(), [tool.definition])[:2]]
        schema = tool.definition["function"]["parameters"]
        parser = CallParser(form, [Function(tool.name, schema)], is_forced=False)
        (call,) = [*parser.push(said.removesuffix("<|end|>")), *parser.finish()]
        assert not isinstance(call, str)
        expected = told.calls[0]["function"]
        assert (call.name, json.loads(call.arguments)) == (expected["name"], expected["arguments"])
        assert set(expected["arguments"]) <= set(schema["properties"])


def test_the_evaluation_asks_in_its_own_words() -> None:
    rng = random.Random(3)
    for kind in [*KINDS, looked_up(rng)]:
        assert len(kind.questions) >= 6
        assert len(kind.held_out) >= 2
        assert not {each.lower().rstrip("?.") for each in kind.questions} & {
            each.lower().rstrip("?.") for each in kind.held_out
        }


def test_the_old_corpus_is_the_mixture_without_skills() -> None:
    assert [*islice(mixed_documents(3, 0.0), 40)] == [*islice(documents(3), 40)]
    assert [*islice(mixed_documents(3, 0.5), 40)] == [*islice(mixed_documents(3, 0.5), 40)]
    texts = ["".join(text for text, _ in document) for document in islice(mixed_documents(3, 0.5), 200)]
    assert 60 < sum("<|tools|>" in text or "<think>" in text for text in texts) < 140


def test_the_markers_are_tokens_in_the_place_of_the_last_merges() -> None:
    bundled = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    vocab = bundled.get_vocab()
    assert [vocab[text] for text in MARKERS] == [*range(2048 - len(MARKERS), 2048)]
    assert [bundled.encode(text, add_special_tokens=False).ids for text in MARKERS] == [
        [vocab[each]] for each in MARKERS
    ]
    # Marks of calls and thinking are in the text of an output, those of roles are not.
    assert bundled.decode([vocab[text] for text in MARKERS]) == "".join(MARKERS[2:])


def test_other_tokens_keep_their_ids() -> None:
    stored = json.loads((BUNDLED / "tokenizer.json").read_text(encoding="utf-8"))
    small = {token: token_id for token, token_id in stored["model"]["vocab"].items() if token_id < 1000}
    num_merges = len(stored["model"]["merges"]) - (len(stored["model"]["vocab"]) - len(small))
    stored["model"] |= {"vocab": small, "merges": stored["model"]["merges"][:num_merges]}
    stored["added_tokens"] = [each for each in stored["added_tokens"] if each["content"] not in MARKERS]
    before = Tokenizer.from_str(json.dumps(stored))
    after = with_markers(before)
    assert after.get_vocab_size() == before.get_vocab_size() == len(small)
    assert {text: token_id for text, token_id in after.get_vocab().items() if text not in MARKERS} == {
        text: token_id for text, token_id in before.get_vocab().items() if token_id < len(small) - len(MARKERS)
    }


def test_the_card_has_both_trainings() -> None:
    section = training_section(BUNDLED)
    commands = re.findall(r"^python -m tools\.bundled_model\.train .*$", section, re.MULTILINE)
    assert len(commands) >= 2
    assert "--start" not in commands[0]
    assert all("--start" in command and "--skills" in command for command in commands[1:])
    assert CONTINUED in section


def test_a_model_without_a_card_has_no_earlier_training(tmp_path: Path) -> None:
    assert training_section(tmp_path) == ""

"""Published templates render conversations as transformers renders them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer as Library
from tokenizers.models import BPE
from transformers.utils import chat_template_utils

from quire.errors import QuireError
from quire.text.chat.chat_template import ChatTemplate
from quire.text.chat.content_forms import NOWHERE
from quire.text.chat.messages import normalise_messages
from quire.text.chat.rendering import Renderer
from quire.text.chat.written_calls import writes_no_calls, written_calls
from tests.published.conversations import CONVERSATIONS, TOOLS
from tests.published.folders import templates

NOW = datetime(2026, 2, 28, 9, 30)


class Clock(datetime):
    """The time of the templates of transformers."""

    @classmethod
    def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
        del tz
        return NOW


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    renderer = Renderer()
    yield renderer
    renderer.close()


@pytest.fixture(autouse=True)
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template_utils, "datetime", Clock)


def in_transformers(source: str, messages: list[dict[str, Any]], as_text: bool, **options: Any) -> str | None:
    """Return what transformers writes; None if the template refuses the messages.

    Args:
        source: the template.
        messages: the conversation.
        as_text: True to give the arguments of calls as JSON, which some templates need.
        options: further arguments of `apply_chat_template`.
    """
    peer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Library(BPE()), bos_token="<s>", eos_token="</s>", chat_template=source
    )
    given = copy.deepcopy(messages)
    for message in given:
        if message.get("tool_calls") and writes_no_calls(source):
            # A user of transformers has to write the calls of these models.
            message["content"] = written_calls(message.pop("tool_calls")) + message["content"]
        for call in message.get("tool_calls", ()) if as_text else ():
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    try:
        if any(message["content"] is None for message in given):
            # apply_chat_template takes out the null that DeepSeek's templates look for beside calls.
            template = chat_template_utils._compile_jinja_template(source)
            return str(template.render(messages=given, bos_token="<s>", eos_token="</s>", **options))
        return str(peer.apply_chat_template(given, tokenize=False, **options))
    except Exception:  # a template can raise any exception
        return None


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("source", templates().values(), ids=templates())
def test_prompts_are_those_of_transformers(source: str, conversation: str, renderer: Renderer) -> None:
    one = CONVERSATIONS[conversation]
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>", clock=lambda: NOW, renderer=renderer)
    if any(message["role"] == "tool" for message in one.messages) and template._forms["tool"] == NOWHERE:
        pytest.skip("the template writes no results of tools")
    tools: Any = TOOLS if one.has_tools and template.supports_tools else None
    variables = template.used_variables(one.variables)
    options = {"tools": tools, "add_generation_prompt": one.begins, **variables}
    # transformers leaves it to its users to give content in the form that a template reads.
    normal = normalise_messages(one.messages, template._forms)
    expected = [in_transformers(source, normal, as_text, **options) for as_text in (False, True)]
    try:
        found = template.render(one.messages, tools=tools, add_generation_prompt=one.begins, variables=variables)
    except QuireError:
        assert expected == [None, None]
        return
    assert found in expected
    # No text is lost that the template writes from content in another form.
    as_sent = in_transformers(source, one.messages, False, **options) or ""
    texts = [message["content"].strip() for message in one.messages]
    assert [text for text in texts if text in as_sent] == [text for text in texts if text in as_sent and text in found]

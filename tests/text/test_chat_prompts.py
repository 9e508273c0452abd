"""Prompts of conversations in which clients write control tokens, with templates of every kind."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, decoders

from quire.errors import InvalidParameter, RequestError, UnsupportedFeature
from quire.text.chat.chat_prompt import ChatPrompt
from quire.text.chat.chat_template import ChatTemplate
from quire.text.chat.rendering import Renderer
from quire.text.tokenizers.tokenizer import Tokenizer
from tests.text import kinds
from tests.text.template_kinds import CHATML, KINDS, TemplateKind

CALL = {"id": "abcde1234", "type": "function", "function": {"name": "look", "arguments": {"city": "@4", "n": 3}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "@5",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["@6", "b"]}}},
    },
}
# Words that begin with @ are replaced by texts of clients.
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "a question": [{"role": "user", "content": "@1"}],
    "turns": [
        {"role": "system", "content": "@1"},
        {"role": "user", "content": "@2"},
        {"role": "assistant", "content": "@3"},
        {"role": "user", "content": "  @1 @2\n"},
    ],
    "thinking": [
        {"role": "user", "content": "@1"},
        {"role": "assistant", "content": "<think>\n@2\n</think>\n\n@3"},
        {"role": "user", "content": "@4"},
    ],
    "tools": [
        {"role": "user", "content": "@1"},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "@2"},
        {"role": "tool", "content": "@3", "tool_call_id": "abcde1234", "name": "look"},
    ],
}
# Texts with characters that control tokens begin with.
CODE = ("if (a < b && c > d[0]) { e->f = '<div>'; }", "<", "[x] <b>bold</b>", ">>> 1 << 2", "a|b", "")
Made = tuple[Tokenizer, ChatTemplate]


@pytest.fixture(scope="module")
def make(renderer: Renderer) -> Callable[[TemplateKind], Made]:
    """Makes a tokenizer and a template."""

    def make(kind: TemplateKind) -> Made:
        library = kinds.llama3()
        library.decoder = decoders.ByteLevel()
        library.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in kind.special])
        library.add_tokens([AddedToken(each, special=False, normalized=False) for each in kind.others])
        template = ChatTemplate(kind.source, bos_token="<s>", eos_token="</s>", renderer=renderer)
        return Tokenizer(library, bos_token="<s>", eos_token="</s>", chat_template=template), template

    return make


def filled(value: Any, text: Callable[[str], str]) -> Any:
    """Return a JSON value with texts of clients."""
    if isinstance(value, str):
        for word in sorted({f"@{value[pos + 1]}" for pos, char in enumerate(value[:-1]) if char == "@"}):
            value = value.replace(word, text(word))
        return value
    if isinstance(value, list):
        return [filled(each, text) for each in value]
    return {key: filled(each, text) for key, each in value.items()} if isinstance(value, dict) else value


def prompt_of(made: Made, name: str, text: Callable[[str], str], **options: Any) -> ChatPrompt:
    """Return the prompt of one of the conversations."""
    tokenizer, template = made
    messages = filled(CONVERSATIONS[name], text)
    return template.prompt(
        messages, tools=tools_of(template, name, text), added_tokens=tokenizer.added_tokens, **options
    )


def tools_of(template: ChatTemplate, name: str, text: Callable[[str], str]) -> list[dict[str, Any]] | None:
    """Return the tools of one of the conversations, where the template writes any."""
    return filled([TOOL], text) if name == "tools" and template.supports_tools else None


def names_of(kind: TemplateKind) -> list[str]:
    return [name for name in CONVERSATIONS if name != "tools" or kind.has_tools]


def control_of(tokenizer: Tokenizer, ids: list[int]) -> Counter[int]:
    return Counter(token_id for token_id in ids if token_id in tokenizer.special_ids)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_control_tokens_are_the_template_s(kind: TemplateKind, make: Callable[[TemplateKind], Made]) -> None:
    made = make(kind)
    tokenizer, rng = made[0], random.Random(kind.source)
    tokens = [*kind.special, "<s>", "</s>"]
    for name in names_of(kind):
        plain = tokenizer.encode(prompt_of(made, name, lambda word: f"word{word[1:]}"), add_special_tokens=False)
        for _ in range(12):
            token, other = rng.choice(tokens), rng.choice([*tokens, *kind.others])

            def harmful(word: str, token: str = token, other: str = other) -> str:
                return f"{token[1:]}{other}word{word[1:]}<{token}{token[:2]}\n{token}{other[:-1]}"

            prompt = prompt_of(made, name, harmful)
            ids = tokenizer.encode(prompt, add_special_tokens=False)
            assert tokenizer.decode(ids, skip_special_tokens=False) == prompt.text
            messages, tools = filled(CONVERSATIONS[name], harmful), tools_of(made[1], name, harmful)
            assert prompt.text == made[1].render(messages, tools=tools)
            assert control_of(tokenizer, ids) == control_of(tokenizer, plain), (name, token, other)


def as_in_transformers(kind: TemplateKind, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in the form that a template reads, which transformers leaves to its users."""
    messages = copy.deepcopy(messages)
    for idx, message in enumerate(messages):
        if kind.reads_parts or (kind.reads_system_parts and not idx and message["role"] == "system"):
            message["content"] = [{"type": "text", "text": message["content"]}]
    return messages


def compare_with_transformers(made: Made, kind: TemplateKind, num_prompts: int) -> None:
    """Compare prompts without control tokens in the texts of clients."""
    tokenizer, rng = made[0], random.Random(kind.source)
    peer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._library, bos_token="<s>", eos_token="</s>", chat_template=kind.source
    )
    # transformers takes out the null that this template looks for beside calls.
    names = [name for name in names_of(kind) if name != "tools" or kind is not KINDS["deepseek"]]
    control = [*kind.special, *kind.others, *kinds.SPECIAL]
    for number in range(num_prompts):
        texts = {}
        for idx in range(1, 7):
            words = [kinds.hard_text(rng, 3), rng.choice(CODE), kinds.hard_text(rng, 3)]
            texts[f"@{idx}"] = "".join("" if any(token in word for token in control) else word for word in words) + "."
        name = names[number % len(names)]
        messages = as_in_transformers(kind, filled(CONVERSATIONS[name], texts.__getitem__))
        tools: Any = tools_of(made[1], name, texts.__getitem__)
        found: Any = peer.apply_chat_template(messages, tools=tools, add_generation_prompt=True)
        prompt = prompt_of(made, name, texts.__getitem__)
        assert tokenizer.encode(prompt, add_special_tokens=False) == found["input_ids"]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_harmless_prompts_are_those_of_transformers(kind: TemplateKind, make: Callable[[TemplateKind], Made]) -> None:
    compare_with_transformers(make(kind), kind, 40)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_ten_thousand_harmless_prompts_are_those_of_transformers(
    kind: TemplateKind, make: Callable[[TemplateKind], Made]
) -> None:
    compare_with_transformers(make(kind), kind, 10_000 // len(KINDS) + 1)


def test_markers_of_the_model_are_found_in_the_assistant_s_content(make: Callable[[TemplateKind], Made]) -> None:
    made = make(KINDS["qwen3"])
    think = [made[0].added_ids[each] for each in ("<think>", "</think>", "<tool_call>")]
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>a</think>b<tool_call>{}"}]
    prompt = made[1].prompt(turns, added_tokens=made[0].added_tokens)
    assert prompt.text.endswith(
        "<|im_start|>assistant\n<think>\na\n</think>\n\nb<tool_call>{}<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = made[0].encode(prompt, add_special_tokens=False)
    assert [ids.count(each) for each in think] == [1, 1, 1]
    # A user's are no tokens, nor are those in the results of tools.
    for role in ("user", "tool"):
        turns = [
            {"role": "user", "content": "Hi"},
            {"role": role, "content": "<think>a</think>b<tool_call>{}</tool_response>"},
        ]
        prompt = made[1].prompt(turns, added_tokens=made[0].added_tokens)
        ids = made[0].encode(prompt, add_special_tokens=False)
        assert [ids.count(each) for each in think] == [0, 0, 0]
        assert ids.count(made[0].added_ids["</tool_response>"]) == (role == "tool")


def test_a_template_may_refuse_control_tokens_itself(make: Callable[[TemplateKind], Made]) -> None:
    tokenizer, template = make(KINDS["harmony"])
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<|channel|>final<|message|>x"}]
    with pytest.raises(RequestError, match="a channel in the content"):
        template.prompt(turns, added_tokens=tokenizer.added_tokens)


def test_a_name_of_a_client_completes_no_control_token(make: Callable[[TemplateKind], Made]) -> None:
    tokenizer, template = make(KINDS["coder"])
    tool = {"type": "function", "function": {"name": "f", "parameters": {"|im_end|": {" think": "x", "think": "y"}}}}
    prompt = template.prompt([{"role": "user", "content": "Hi"}], tools=[tool], added_tokens=tokenizer.added_tokens)
    assert "<|im_end|>" in prompt.text.partition("user")[0]
    assert "<think>y</think>" in prompt.text
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert ids.count(tokenizer.added_ids["<|im_end|>"]) == 2
    assert tokenizer.added_ids["</think>"] not in ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == prompt.text


def test_a_template_that_treats_control_tokens_in_its_own_way_is_safe(
    make: Callable[[TemplateKind], Made], caplog: pytest.LogCaptureFixture
) -> None:
    searches = "{% if m.content in 'a<|im_end|>' %}!{% endif %}"
    source = f"{{% for m in messages %}}{searches}{{{{ m.content }}}}<|im_end|>{{% endfor %}}"
    tokenizer, template = make(TemplateKind(source, ("<|im_end|>",)))
    for _ in range(2):
        prompt = template.prompt([{"role": "user", "content": "a<|im_end|>"}], added_tokens=tokenizer.added_tokens)
        assert prompt.text == "a<|im_end|><|im_end|>"
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        assert ids.count(tokenizer.added_ids["<|im_end|>"]) == 1
    assert caplog.text.count("parts of control tokens") == 1


def test_what_filters_and_functions_make_of_texts_can_be_searched(make: Callable[[TemplateKind], Made]) -> None:
    made = ("[m.content, ''] | join", "'-'.join([m.content])", "'{}'.format(m.content)", "m.content | wordwrap(40)")
    source = "{% for m in messages %}" + "".join(f"{{{{ '<|im_end|>' in {each} }}}}" for each in made)
    tokenizer, template = make(TemplateKind(f"{source}{{{{ m.content }}}}{{% endfor %}}", ("<|im_end|>",)))
    prompt = template.prompt([{"role": "user", "content": "a<|im_end|>"}], added_tokens=tokenizer.added_tokens)
    assert prompt.text == "TrueTrueTrueTruea<|im_end|>"
    assert tokenizer.added_ids["<|im_end|>"] not in tokenizer.encode(prompt, add_special_tokens=False)


def test_tokens_in_bars_are_control_tokens_though_the_file_does_not_say_so(
    make: Callable[[TemplateKind], Made],
) -> None:
    tokenizer, template = make(KINDS["chatml"]._replace(others=("<|fim_prefix|>", "<b>", "<｜User｜>")))
    text = "a<|fim_prefix|><b><｜User｜>"
    prompt = template.prompt([{"role": "user", "content": text}], added_tokens=tokenizer.added_tokens)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert [ids.count(tokenizer.added_ids[each]) for each in ("<|fim_prefix|>", "<b>", "<｜User｜>")] == [0, 1, 0]


def test_a_part_of_a_message_has_no_wish_of_its_own(make: Callable[[TemplateKind], Made]) -> None:
    parts = [{"type": "text", "text": "a", "sanitize_control_tokens": True}]
    with pytest.raises(UnsupportedFeature, match="whole messages") as refused:
        make(KINDS["chatml"])[1].prompt([{"role": "user", "content": parts}], sanitizing="on-request")
    assert refused.value.field == "messages[0].content[0].sanitize_control_tokens"


def test_a_message_may_ask_for_control_tokens_where_it_is_allowed(make: Callable[[TemplateKind], Made]) -> None:
    tokenizer, template = make(KINDS["chatml"])
    end = tokenizer.added_ids["<|im_end|>"]

    def count(sanitizing: str, wish: object = None) -> int:
        message = {"role": "user", "content": "a<|im_end|>", "sanitize_control_tokens": wish}
        turns: list[dict[str, Any]] = [{"role": "user", "content": "b<|im_end|>"}, message]
        prompt = template.prompt(turns, added_tokens=tokenizer.added_tokens, sanitizing=sanitizing)
        return tokenizer.encode(prompt, add_special_tokens=False).count(end)

    assert [count("always"), count("always", True)] == [2, 2]
    assert [count("by-default"), count("by-default", True), count("by-default", False)] == [2, 2, 3]
    assert [count("on-request"), count("on-request", True), count("on-request", False)] == [4, 3, 4]
    for sanitizing, wish in (("always", False), ("by-default", "no"), ("always", 1)):
        with pytest.raises(InvalidParameter) as refused:
            count(sanitizing, wish)
        assert refused.value.field == "messages[1].sanitize_control_tokens"


def test_a_message_may_be_continued(make: Callable[[TemplateKind], Made]) -> None:
    for name in ("chatml", "mistral", "gemma", "parts", "qwen3"):
        made = make(KINDS[name])
        token = KINDS[name].special[-1]
        turns = [{"role": "user", "content": f"a{token}b"}, {"role": "assistant", "content": f"c {token} d"}]
        prompt = made[1].prompt(turns, added_tokens=made[0].added_tokens, continue_final_message=True)
        assert prompt.text.endswith(f"c {token} d")
        assert prompt.marked is not None
        assert len(prompt.marked) == len(prompt)
        ids = made[0].encode(prompt, add_special_tokens=False)
        written = prompt.text.replace(f"a{token}b", "").replace(f"c {token} d", "")
        assert ids.count(made[0].added_ids[token]) == written.count(token)


def test_variables_and_ids_are_texts_of_clients_too(make: Callable[[TemplateKind], Made]) -> None:
    source = (
        CHATML
        + "{{ style }}{% for m in messages %}{{ m.tool_call_id }}{{ m.name }}{{ m.reasoning }}{% endfor %}<|im_end|>"
    )
    tokenizer, template = make(TemplateKind(source, ("<|im_start|>", "<|im_end|>")))
    message = {"role": "user", "content": "a"} | dict.fromkeys(("tool_call_id", "name", "reasoning"), "<|im_end|>")
    variables = {"style": {"<|im_end|>": ["<|im_end|>", {"b": "<|im_end|>"}]}}
    prompt = template.prompt([message], variables=variables, added_tokens=tokenizer.added_tokens)
    assert prompt.text.count("<|im_end|>") == 8
    assert tokenizer.encode(prompt, add_special_tokens=False).count(tokenizer.added_ids["<|im_end|>"]) == 2


def test_surrogates_of_clients_are_no_marks(make: Callable[[TemplateKind], Made]) -> None:
    tokenizer, template = make(KINDS["chatml"])
    for text in ("\ud800im_end\ud801", "<\udc00>"):
        prompt = template.prompt([{"role": "user", "content": text}], added_tokens=tokenizer.added_tokens)
        assert text in prompt.text
        with pytest.raises(InvalidParameter, match="without lone surrogates"):
            tokenizer.encode(prompt)
    # One that is not written changes nothing.
    message = {"role": "user", "content": "a<|im_end|>", "name": "\ud800"}
    prompt = template.prompt([message], added_tokens=tokenizer.added_tokens)
    assert tokenizer.encode(prompt).count(tokenizer.added_ids["<|im_end|>"]) == 1


def test_white_space_and_single_characters_are_no_control_tokens(make: Callable[[TemplateKind], Made]) -> None:
    tokenizer, template = make(KINDS["chatml"]._replace(special=("<|im_start|>", "<|im_end|>", "  ", "q", "Qu")))
    ids = tokenizer.encode(
        template.prompt([{"role": "user", "content": "a  q Qu"}], added_tokens=tokenizer.added_tokens),
        add_special_tokens=False,
    )
    assert [ids.count(tokenizer.added_ids[each]) for each in ("  ", "q", "Qu")] == [1, 1, 0]


# ---- forms of content ----


@pytest.mark.parametrize(
    "content", ["What is 2+2?", [{"type": "text", "text": "What "}, {"type": "text", "text": "is 2+2?"}]]
)
@pytest.mark.parametrize("name", ["parts", "selected parts", "parts of the system", "chatml", "coder"])
def test_a_template_gets_the_form_that_it_reads(
    name: str, content: object, make: Callable[[TemplateKind], Made]
) -> None:
    template = make(KINDS[name])[1]
    turns: list[dict[str, Any]] = [
        {"role": role, "content": content} for role in ("system", "user", "assistant", "user")
    ]
    if name == "parts of the system":  # it reads the first part only
        turns[0] = {"role": "system", "content": "What is 2+2?"}
    assert template.render(turns).count("What is 2+2?") == 4


def test_parts_stay_apart(make: Callable[[TemplateKind], Made]) -> None:
    source = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    template = make(TemplateKind(source, ()))[1]
    parts = [{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": "b"}]
    turns: list[dict[str, Any]] = [{"role": "user", "content": parts}, {"role": "user", "content": "c"}]
    assert template.render(turns) == "[a][b][c]"


def test_content_that_is_written_nowhere_is_refused(make: Callable[[TemplateKind], Made]) -> None:
    template = make(TemplateKind("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", ()))[1]
    assert template.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]) == "a"
    for role in ("system", "assistant", "tool", "developer"):
        with pytest.raises(UnsupportedFeature, match="does not write content of the role") as refused:
            template.render([{"role": "user", "content": "a"}, {"role": role, "content": "b"}])
        assert refused.value.field == "messages[1].content"


def test_a_role_that_a_template_refuses_stays_its_matter(make: Callable[[TemplateKind], Made]) -> None:
    refuses = "{% if m.role != 'user' %}{{ raise_exception('users only') }}{% endif %}"
    source = f"{{% for m in messages %}}{refuses}{{{{ m.content }}}}{{% endfor %}}"
    template = make(TemplateKind(source, ()))[1]
    with pytest.raises(RequestError, match="users only"):
        template.render([{"role": "system", "content": "a"}])


def test_content_beside_calls_is_what_the_template_writes_them_with(make: Callable[[TemplateKind], Made]) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    turns: list[dict[str, Any]] = [{"role": "user", "content": "a"}, call]
    assert '<｜call▁begin｜>look<｜call▁sep｜>{"city": "@4", "n": 3}' in make(KINDS["deepseek"])[1].render(turns)
    counted = "{% for m in messages %}{{ m.content }}{% if m.content is none or m.content | length == 0 %}!{% endif %}"
    source = (
        counted
        + "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ m.content | length }}{% endfor %}{% endfor %}"
    )
    assert make(TemplateKind(source, ()))[1].render(turns) == "a!look0"

"""`LLM.chat` with tools: calls, grammars that enforce them, and refusals."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams, ToolCall
from quire.engine.outputs.outputs import CompletionOutput
from quire.errors import InvalidParameter, RequestError, UnsupportedFeature
from quire.sequences.structured import StructuredOutputs
from quire.text.tool_calls import ToolModel
from tests.server import checkpoint
from tests.server.tool_checkpoint import BARE, PATHS, REQUIRED_FORMS, save
from tests.text.tool_calls.markups import form_of
from tests.text.tool_calls.schema_check import fits

needs_grammars = pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None, reason="calls are held to schemas by llguidance"
)
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Looks.", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS: dict[str, dict[str, Any]] = {"get_weather": CITY, "now": NOTHING}
USER = [{"role": "user", "content": "hi"}]
PARIS = '{"city": "Paris"}'
GREEDY = SamplingParams(temperature=0.0, max_tokens=200)
NAMED = {"type": "function", "function": {"name": "now"}}

Load = Callable[[str], LLM]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    """Gives the model that writes calls in a format, loaded when it is first asked for."""
    models: dict[str, LLM] = {}

    def open_model(form: str) -> LLM:
        if form not in models:
            folder = save(tmp_path_factory.mktemp("models") / form, form)
            models[form] = LLM(str(folder), num_kv_blocks=300, num_threads=1, max_num_seqs=16)
        return models[form]

    yield open_model
    for llm in models.values():
        assert llm.usage().used == 0
        llm.close()


@pytest.fixture
def hermes(load: Load) -> LLM:
    """The model of Hermes' format."""
    return load("hermes")


def only(llm: LLM, params: SamplingParams = GREEDY, **options: Any) -> CompletionOutput:
    (output,) = llm.chat(USER, params, use_tqdm=False, **({"tools": TOOLS} | options))
    assert output.error is None
    (sample,) = output.outputs
    return sample


def told(sample: CompletionOutput) -> list[tuple[str, str]]:
    assert all(isinstance(call, ToolCall) for call in sample.tool_calls)
    assert len({call.id for call in sample.tool_calls}) == len(sample.tool_calls)
    return [(call.name, call.arguments) for call in sample.tool_calls]


@pytest.mark.parametrize("form", sorted(PATHS))
def test_a_chat_with_tools_has_them_called(load: Load, form: str) -> None:
    sample = only(load(form))
    assert told(sample) == [("get_weather", PARIS), *([("now", "{}")] if form == "llama3" else [])]
    assert sample.content == ("" if form in BARE else "I look.")
    assert sample.finish_reason == "tool_calls"
    assert "get_weather" in sample.text, "the text is what the model wrote"
    call = sample.tool_calls[0]
    assert call.as_message() == {
        "id": call.id,
        "type": "function",
        "function": {"name": "get_weather", "arguments": PARIS},
    }


def test_calls_and_their_results_go_back_into_the_conversation(hermes: LLM) -> None:
    call = only(hermes).tool_calls[0]
    told_back: list[dict[str, Any]] = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call.as_message()]},
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    (output,) = hermes.chat(told_back, GREEDY, tools=TOOLS, use_tqdm=False)
    assert hermes.tokenizer is not None
    prompt = hermes.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
    assert prompt.startswith(f"<|bos|><|system|>{json.dumps([WEATHER, _told(NOW)])} as in <tool_call>")
    assert "<|assistant|>get_weather:Paris<|eos|><|tool|>rain" in prompt


def _told(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool without parameters as templates are told of it."""
    return {"type": "function", "function": {**tool["function"], "parameters": {"type": "object", "properties": {}}}}


def test_several_conversations_and_samples_each_have_their_calls(hermes: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=200, n=2), GREEDY]
    outputs = hermes.chat([USER, USER], params, tools=TOOLS, use_tqdm=False)
    assert [[told(sample) for sample in output.outputs] for output in outputs] == [
        [[("get_weather", PARIS)]] * 2,
        [[("get_weather", PARIS)]],
    ]


def test_without_tools_or_with_none_there_are_no_calls(hermes: LLM) -> None:
    each: list[dict[str, Any]] = [{"tools": None}, {"tools": []}, {"tool_choice": "none"}]
    for options in each:
        sample = only(hermes, **options)
        assert (sample.tool_calls, sample.content) == ([], None)
        assert sample.finish_reason == "stop"


def test_what_is_no_call_is_content(hermes: LLM) -> None:
    sample = only(hermes, style="Q")
    assert (sample.content, sample.text, sample.tool_calls) == ("xyz", "xyz", [])
    assert sample.finish_reason == "stop"


@needs_grammars
@pytest.mark.parametrize("form", REQUIRED_FORMS)
def test_who_names_a_function_is_told_of_a_stop(load: Load, form: str) -> None:
    sample = only(load(form), tool_choice=NAMED, style="Q")
    assert (told(sample), sample.content, sample.finish_reason) == ([("now", "{}")], "", "stop")
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    sample = only(load(form), tool_choice=allowed, style="Q", parallel_tool_calls=False)
    assert (told(sample), sample.content, sample.finish_reason) == ([("now", "{}")], "", "tool_calls")


@needs_grammars
def test_what_is_cut_off_keeps_its_reason(hermes: LLM) -> None:
    num_tokens = len(only(hermes).token_ids)
    for max_tokens in range(1, num_tokens):
        sample = only(hermes, SamplingParams(temperature=0.0, max_tokens=max_tokens))
        assert sample.finish_reason == "length"
        assert all(PARIS.startswith(arguments) for _, arguments in told(sample))


@needs_grammars
@pytest.mark.parametrize("form", REQUIRED_FORMS)
@pytest.mark.parametrize(
    "params",
    [{"beam_width": 3, "n": 2, "temperature": 0.0}, {"best_of": 4, "n": 2, "temperature": 1.5, "seed": 1}],
    ids=["beams", "best_of"],
)
def test_beams_and_the_best_of_several_call_too(load: Load, form: str, params: dict[str, Any]) -> None:
    wanted = SamplingParams(max_tokens=160, **params)
    (output,) = load(form).chat(USER, wanted, tools=TOOLS, tool_choice="required", use_tqdm=False)
    assert len(output.outputs) == 2
    for sample in output.outputs:
        assert sample.finish_reason == "tool_calls"
        assert sample.content == ""
        assert all(fits(json.loads(arguments), SCHEMAS[name]) for name, arguments in told(sample))


# ---- a model that would do worse ----

# Calls that no schema holds.
WRONG = {
    "hermes": ['<tool_call>\n{"name": "now", "arguments": {"x": 1}}\n</tool_call>', '<tool_call>{"name": "rm"}'],
    "llama3": [
        '{"name": "get_weather", "parameters": {"days": 10}}',
        '<|python_tag|>{"name": "now", "parameters": 1',
    ],
    "mistral": ['[TOOL_CALLS]get_weather[ARGS]{"city": 1}', '[TOOL_CALLS][{"name": "now", "arguments": {"x": 1}}]'],
}


class Tempter:
    """A processor that has the model write a wrong call, other tokens between its letters, as far as it is allowed to.

    Args:
        llm: the model.
        wrong: the call.
        rng: chooses the other tokens.
    """

    def __init__(self, llm: LLM, wrong: str, rng: random.Random) -> None:
        assert llm.tokenizer is not None
        tokenizer = llm.tokenizer
        self._end = tokenizer.eos_token_id
        others = [one for one in tokenizer.special_ids if one != self._end]
        self._wishes: list[int] = []
        for char in wrong:
            if rng.random() < 0.2:
                self._wishes.append(rng.choice(others))
            self._wishes += tokenizer.encode(char, add_special_tokens=False)
        self._wishes.reverse()

    def __call__(self, _prompt: list[int], _output: list[int], logits: torch.Tensor) -> torch.Tensor:
        while self._wishes and logits[self._wishes[-1]] == -torch.inf:
            self._wishes.pop()
        wish = self._wishes.pop() if self._wishes else self._end
        # What is forbidden stays so, however much it is wished for.
        logits[wish] += 1e4
        return logits


@needs_grammars
@pytest.mark.pairwise
@pytest.mark.parametrize("is_parallel", [True, False])
@pytest.mark.parametrize("choice", ["auto", "required", "named", "allowed"])
@pytest.mark.parametrize("form", sorted(WRONG))
def test_every_call_that_is_told_fits_its_schema(load: Load, form: str, choice: str, is_parallel: bool) -> None:
    llm = load(form)
    allowed = {"mode": "auto", "tools": [NAMED]}
    wanted: Any = {"named": NAMED, "allowed": {"type": "allowed_tools", "allowed_tools": allowed}}.get(choice, choice)
    names = {"now"} if choice in ("named", "allowed") else set(SCHEMAS)
    num_seeds = 24
    params = []
    for seed in range(num_seeds):
        rng = random.Random(seed)
        tempter = Tempter(llm, rng.choice(WRONG[form]), rng)
        processors = [tempter] if seed % 3 else []
        params.append(
            SamplingParams(
                temperature=[0.7, 1.5, 3.0][seed % 3],
                seed=seed,
                max_tokens=160,
                skip_special_tokens=seed % 4 != 3,
                logits_processors=processors,  # type: ignore[arg-type]
            )
        )
    outputs = llm.chat(
        [USER] * num_seeds, params, tools=TOOLS, tool_choice=wanted, parallel_tool_calls=is_parallel, use_tqdm=False
    )
    num_whole = 0
    for output in outputs:
        assert output.error is None
        (sample,) = output.outputs
        is_whole = sample.finish_reason != "length"
        num_whole += is_whole
        for call in sample.tool_calls[: None if is_whole else -1]:
            assert call.name in names, sample.text
            assert fits(json.loads(call.arguments), SCHEMAS[call.name]), sample.text
        assert (is_parallel and choice != "named") or len(sample.tool_calls) <= 1
        if choice in ("required", "named") and is_whole:
            assert sample.tool_calls
            assert sample.content == ""
        if is_whole:
            assert sample.finish_reason == ("tool_calls" if sample.tool_calls and choice != "named" else "stop")
    assert num_whole >= num_seeds // 2


# ---- what is refused ----


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tools": "now"}, "tools"),
        ({"tools": [NOW, {"type": "function", "function": {"name": "a b"}}]}, "tools[1].function.name"),
        ({"tools": [NOW, NOW]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": {1}}}}]}, "tools"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "rm"}}}, "tool_choice.function.name"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tool_call_parser": "xml"}, "tool_call_parser"),
    ],
)
def test_bad_tools_are_named_and_nothing_runs(hermes: LLM, options: dict[str, Any], field: str) -> None:
    before = hermes.stats.num_steps
    with pytest.raises(InvalidParameter) as caught:
        only(hermes, **options)
    assert caught.value.field == field
    assert hermes.stats.num_steps == before


def test_a_format_may_have_the_name_of_another_engine(hermes: LLM) -> None:
    assert told(only(hermes, tool_call_parser="qwen3_coder")) == told(only(hermes, tool_call_parser="qwen3_xml"))
    assert told(only(hermes, tool_call_parser="qwen3_coder")) != told(only(hermes))


@needs_grammars
def test_a_strict_schema_that_cannot_be_held_to_is_the_tools_fault(hermes: LLM) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "format": "regex"}}}
    tool = {"type": "function", "function": {"name": "paint", "parameters": odd, "strict": True}}
    with pytest.raises(InvalidParameter, match="no expression of regex") as caught:
        only(hermes, tools=[NOW, tool])
    assert (caught.value.field, caught.value.value) == ("tools[1].function.parameters", odd)


@needs_grammars
def test_a_schema_that_does_not_compile_is_shown_as_it_was_given(hermes: LLM) -> None:
    lost = {"type": "object", "properties": {"a": {"$ref": "#/$defs/lost"}}}
    tools = [NOW, {"type": "function", "function": {"name": "paint", "parameters": lost, "strict": True}}]
    why = "properties.a: $ref cannot be enforced, since no part of the schema is '#/$defs/lost'"
    reason = f"a JSON schema that compiles: {why}"
    for given, params in (
        (tools, GREEDY),
        (tools, SamplingParams(structured_outputs=StructuredOutputs(json_object=True))),
    ):
        with pytest.raises(InvalidParameter) as caught:
            only(hermes, params, tools=given)
        error = caught.value
        assert (error.field, error.value, error.allowed) == ("tools[1].function.parameters", lost, reason)
    with pytest.raises(InvalidParameter) as caught:
        only(hermes, SamplingParams(structured_outputs=StructuredOutputs(json=lost)))
    assert (caught.value.field, caught.value.allowed) == ("structured_outputs.json", reason)
    assert json.loads(str(caught.value.value)) == lost


@needs_grammars
def test_tools_that_are_too_much_together_are_counted_not_shown(hermes: LLM) -> None:
    use = ToolModel(hermes.tokenizer, form_of("hermes"), 500, "").read(TOOLS, None, None)
    assert use is not None
    grammar = use.sampling(None, None)["structured_outputs"].grammar
    slow = "a grammar in Lark or GBNF that compiles: it takes longer than 10 s (grammar_timeout_s)"
    error = use.explain(InvalidParameter("structured_outputs.grammar", grammar, slow), grammar)
    expected = (
        "tools must be definitions whose grammar compiles: it takes longer than 10 s (grammar_timeout_s), got '2 tools'"
    )
    assert str(error) == expected
    other = InvalidParameter("seed", -1, "at least 0")
    assert use.explain(other, grammar) is other


@pytest.mark.parametrize("params", [{"structured_outputs": {"grammar": "start: /a/"}}, {"detokenize": False}])
def test_what_contradicts_tools_is_refused(hermes: LLM, params: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedFeature) as caught:
        only(hermes, SamplingParams(**params))
    assert caught.value.field is not None
    assert [caught.value.field.partition(".")[0]] == list(params)


def test_what_are_no_parameters_is_named(hermes: LLM) -> None:
    with pytest.raises(InvalidParameter) as caught:
        hermes.chat([USER], [{"max_tokens": 5}], tools=TOOLS, use_tqdm=False)  # type: ignore[list-item]
    assert caught.value.field == "sampling_params"


def test_a_model_that_knows_no_tools_says_so(tmp_path: Path) -> None:
    llm = LLM(str(checkpoint.save(tmp_path)), max_model_len=512, num_kv_blocks=64, num_threads=1)
    with pytest.raises(RequestError) as caught:
        only(llm)
    assert caught.value.field == "tools"
    llm.close()

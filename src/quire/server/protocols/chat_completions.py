"""`POST /v1/chat/completions`: answer a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request
from starlette.types import ASGIApp

from quire.engine.outputs.logprobs import FlatLogprobs
from quire.engine.outputs.outputs import CompletionOutput, RequestOutput
from quire.errors import InvalidParameter, UnsupportedFeature, renamed
from quire.sequences.params import MAX_LOGPROBS, SamplingParams
from quire.server.generation import llama_cpp_fields, sampling, structured_fields
from quire.server.generation.generation import GenerationRequest, answer, response_header
from quire.server.generation.logprob_fields import TokenNames, chat_logprobs, prompt_logprobs_json
from quire.server.generation.reasoning import (
    REASONING_FIELDS,
    ReasoningFields,
    ReasoningSplitter,
    read_effort,
    read_thinking,
)
from quire.server.generation.tool_calls import call_deltas, call_message
from quire.server.generation.tool_use import TOOL_FIELDS, read_tool_use
from quire.server.http.json_stream import JsonArray
from quire.server.protocols.models import read_fields
from quire.server.requests.field_names import renaming
from quire.server.requests.fields import Fields, RouteFields
from quire.server.state.state import ServerState
from quire.text.chat.chat_prompt import ChatPrompt
from quire.text.reasoning import ReasoningSplit
from quire.text.tool_calls import SampleCalls, ToolUse

if TYPE_CHECKING:  # the server starts before the engine is imported
    from quire.engine.inputs.request_builder import PreparedRequest

USE_TOOLS = "it is the older form of tools; send tools and tool_choice"
OWN_FIELDS = (
    "messages",
    "max_completion_tokens",
    "top_logprobs",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    *TOOL_FIELDS,
    *REASONING_FIELDS,
)
FIELDS: Final = RouteFields(
    honoured=(
        *sampling.SAMPLING_FIELDS,
        *llama_cpp_fields.ALIASES,
        llama_cpp_fields.WINDOW,
        *structured_fields.STRUCTURED_FIELDS,
        *sampling.OPTION_FIELDS,
        *OWN_FIELDS,
    ),
    refused={
        **sampling.UNSUPPORTED,
        **llama_cpp_fields.UNSUPPORTED,
        "functions": (([],), USE_TOOLS),
        "function_call": (("none",), USE_TOOLS),
        "audio": ((), "the model writes text only"),
        "modalities": ((["text"],), "the model writes text only"),
        "web_search_options": ((), "the server connects to no other one"),
        "chat_template": ((), "templates come with the model, never from requests"),
        "documents": (([],), "put them into a message"),
        "echo": ((False,), "use /v1/completions"),
        "mm_processor_kwargs": (({},), "it is an option of the server; a part with an image may have a detail"),
    },
    neutral=sampling.NEUTRAL,
    objects=("stream_options",),
)


@dataclass(frozen=True, slots=True)
class ChatExtras:
    """Contents of a chat answer in addition to its text.

    Args:
        top_logprobs: number of most likely tokens at each position; None gives no log probabilities.
        prompt_logprobs: the same for vLLM's `prompt_logprobs`.
        token_ids: True if the answer has token ids.
        tool_use: the request's use of tools; None parses no calls.
        reasoning: fields of the reasoning; None if the format of the model's thinking is unknown.
    """

    top_logprobs: int | None
    prompt_logprobs: int | None
    token_ids: bool
    tool_use: ToolUse | None = None
    reasoning: ReasoningFields | None = None


async def chat_completions(state: ServerState, request: Request) -> ASGIApp:
    """Answer `POST /v1/chat/completions`."""
    fields = await read_fields(state, request, FIELDS)
    body, name_of = llama_cpp_fields.translate(fields, state.llm.resolved.max_model_len)
    with renaming(name_of):
        job, extras = read_chat(state, body)
    head = response_header(state, request, "chatcmpl", "chat.completion")
    names = TokenNames(state.llm.tokenizer, by_id=job.options.name_tokens_by_id)
    return await answer(state, request, job, ChatReply(head, extras, names), head["id"])


def read_chat(state: ServerState, fields: Fields) -> tuple[GenerationRequest, ChatExtras]:
    """Read a chat request."""
    tool_use = read_tool_use(state, fields)
    options = sampling.read_options(fields, state.llm.resolved)
    length = "max_tokens" if fields.get("max_completion_tokens") is None else "max_completion_tokens"
    top_logprobs = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    has_logprobs = fields.flag("logprobs")
    if top_logprobs and not has_logprobs:  # 0 is vLLM's default
        raise InvalidParameter("top_logprobs", top_logprobs, "0 or absent unless logprobs is true")
    extras = ChatExtras(
        top_logprobs=(top_logprobs or 0) if has_logprobs else None,
        prompt_logprobs=fields.integer("prompt_logprobs", 0, MAX_LOGPROBS),
        token_ids=options.return_token_ids,
        tool_use=tool_use,
        reasoning=ReasoningFields.of(state, fields),
    )
    field_aliases = {"max_tokens": length, "logprobs": "top_logprobs", "prompt": "messages"}
    field_aliases |= sampling.beam_width_alias(fields)
    wanted, names = structured_fields.read_structured(fields)
    field_aliases |= names
    overrides: dict[str, Any] = {
        "max_tokens": fields.get(length),
        "logprobs": extras.top_logprobs,
        "structured_outputs": wanted,
        **read_thinking(state, fields),
    }
    if tool_use is not None:
        try:
            calls = tool_use.sampling(wanted, overrides.get("thinking_token_budget"))
        except InvalidParameter as error:
            raise renamed(error, names.get(error.field or "", error.field)) from error
        calls["kept_special_ids"] += overrides.get("kept_special_ids", ())
        overrides |= calls
        field_aliases["structured_outputs.grammar"] = "tools"
    params = sampling.read_sampling(fields, state.llm.default_sampling_params(), overrides, field_aliases)
    definitions = () if tool_use is None else tool_use.definitions
    prompts = partial(_prompts, state, fields, definitions, params)
    explain = None
    if tool_use is not None and params.structured_outputs is not None:
        explain = partial(tool_use.explain, grammar=params.structured_outputs.source.text, answer=wanted)
    return GenerationRequest(1, prompts, params, options, field_aliases, explain=explain), extras


async def render_chat(
    state: ServerState, fields: Fields, tools: Sequence[Mapping[str, Any]] = (), *, add_generation_prompt: bool = True
) -> ChatPrompt:
    """Render a conversation with the model's template.

    Args:
        state: state of the server.
        fields: body of the request.
        tools: tool definitions.
        add_generation_prompt: default of the field with this name.

    Raises:
        RequestError: a malformed conversation, or one that the template refuses.
    """
    if state.llm.tokenizer is None:
        raise UnsupportedFeature("messages", "this server runs without a tokenizer")
    kwargs = fields.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise InvalidParameter("chat_template_kwargs", kwargs, "an object")
    continues = fields.flag("continue_final_message")
    return await state.llm.texts.render(
        fields.get("messages"),
        add_generation_prompt=fields.flag("add_generation_prompt", add_generation_prompt and not continues),
        continue_final_message=continues,
        tools=tools,
        variables={**state.config.default_chat_template_kwargs, **(kwargs or {})},
        hints=read_effort(fields),
    )


async def _prompts(
    state: ServerState, fields: Fields, tools: Sequence[Mapping[str, Any]], params: SamplingParams
) -> list[PreparedRequest]:
    prompt = await render_chat(state, fields, tools)
    special = fields.flag("add_special_tokens", False)
    return await state.llm.texts.prepare([prompt], params, add_special_tokens=special)


class ChatReply:
    """Turns outputs into the JSON of chat completions, with reasoning, and with tool calls if they are requested."""

    def __init__(self, head: Mapping[str, Any], extras: ChatExtras, names: TokenNames) -> None:
        self._head = dict(head)
        self._chunk_head = {**head, "object": "chat.completion.chunk"}
        self._extras = extras
        self._names = names
        self._begun: set[int] = set()
        self._calls: dict[int, SampleCalls] = {}
        self._splitter = ReasoningSplitter(extras.reasoning)

    def chunks(self, prompt_idx: int, delta: RequestOutput) -> Iterator[dict[str, Any]]:  # noqa: ARG002 - one prompt
        """Yield the chunks of a delta: the role once, then the text, then the finish reason."""
        for output in delta.outputs:
            if output.index not in self._begun:
                ids = {"prompt_token_ids": delta.prompt_token_ids} if self._extras.token_ids and not self._begun else {}
                self._begun.add(output.index)
                yield self._chunk(output.index, {"role": "assistant", "content": ""}) | ids
            logprobs = self._logprobs(output) if output.token_ids else None
            ids = {"token_ids": output.token_ids} if self._extras.token_ids and output.token_ids else {}
            calls, fields = self._calls_of(output.index), self._extras.reasoning
            reasoning, text = self._split(output, delta.prompt_token_ids, is_finished=output.finished)
            deltas = [] if fields is None else fields.deltas(reasoning)
            if calls is not None:
                deltas += call_deltas(calls, text, is_finished=output.finished)
            elif text:
                deltas.append({"content": text})
            if not deltas and (logprobs or ids):
                deltas = [{"content": ""}]
            for idx, part in enumerate(deltas):
                # The log probabilities and ids belong to all parts together, so only the first part has them.
                yield self._chunk(output.index, part, None if idx else logprobs, None if idx else ids)
            if output.finished:
                yield self._chunk(output.index, {}, None, _ending(output, calls))

    def text_chunk(self, prompt_idx: int, sample_idx: int, text: str) -> dict[str, Any] | None:  # noqa: ARG002
        """Return the chunk of further text of a sample; see `ResponseBuilder`."""
        extras = self._extras
        shows_more = extras.top_logprobs is not None or extras.token_ids
        if sample_idx not in self._begun or shows_more or extras.tool_use or extras.reasoning:
            return None
        return self._chunk(sample_idx, {"content": text})

    def last_chunk(self) -> dict[str, Any]:
        """Return the chunk without choices that carries a stream's usage."""
        return {**self._chunk_head, "choices": []}

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the answer in one piece."""
        (output,) = outputs
        choices = JsonArray(self._choice(sample, output.prompt_token_ids) for sample in output.outputs)
        body: dict[str, Any] = {**self._head, "choices": choices}
        if self._extras.token_ids:
            body["prompt_token_ids"] = output.prompt_token_ids
        if self._extras.prompt_logprobs is not None:
            wanted = self._extras.prompt_logprobs
            body["prompt_logprobs"] = prompt_logprobs_json(output.prompt_logprobs, wanted, self._names)
        return body

    def _choice(self, sample: CompletionOutput, prompt_ids: Sequence[int]) -> dict[str, Any]:
        calls, fields = self._calls_of(sample.index), self._extras.reasoning
        reasoning, text = self._split(sample, prompt_ids, is_finished=True)
        message = {"content": text} if calls is None else call_message(calls, text)
        if fields is not None:
            message = fields.add_to(message, reasoning)
        choice = {
            "index": sample.index,
            "message": {"role": "assistant", "refusal": None, **message},
            "logprobs": self._logprobs(sample),
            **_ending(sample, calls),
        }
        return choice | ({"token_ids": sample.token_ids} if self._extras.token_ids else {})

    def _split(self, output: CompletionOutput, prompt_ids: Sequence[int], *, is_finished: bool) -> ReasoningSplit:
        return self._splitter.add(output.index, prompt_ids, output.text, is_finished=is_finished)

    def _calls_of(self, index: int) -> SampleCalls | None:
        """Return the parser of a sample's calls; None if calls are not requested."""
        if self._extras.tool_use is not None and index not in self._calls:
            self._calls[index] = SampleCalls(self._extras.tool_use)
        return self._calls.get(index)

    def _logprobs(self, output: CompletionOutput) -> dict[str, Any] | None:
        if self._extras.top_logprobs is None:
            return None
        return chat_logprobs(output.logprobs or FlatLogprobs(), self._extras.top_logprobs, self._names)

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None, **(more or {})}
        return {**self._chunk_head, "choices": [choice]}


def _ending(output: CompletionOutput, calls: SampleCalls | None) -> dict[str, Any]:
    reason = output.finish_reason if calls is None else calls.finish_reason(output.finish_reason)
    score = {} if output.beam_score is None else {"beam_score": output.beam_score}
    return {"finish_reason": reason, "stop_reason": output.stop_reason, **score}

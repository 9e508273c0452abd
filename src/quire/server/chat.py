"""`POST /v1/chat/completions`: answer a conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.errors import InvalidParameter, UnsupportedFeature
from quire.sequences.params import MAX_LOGPROBS
from quire.server import sampling
from quire.server.body import read_object
from quire.server.fields import Fields, Refusal
from quire.server.generation import Job, answer, new_head
from quire.server.logprobs import TokenNames, chat_logprobs, prompt_logprobs_json
from quire.server.models import check_model
from quire.server.state import ServerState
from quire.text.chat import RESERVED, require_chat_template

NO_TOOLS = "calls of tools cannot be read from the output yet"
OWN_FIELDS = (
    "messages",
    "max_completion_tokens",
    "top_logprobs",
    "add_generation_prompt",
    "chat_template_kwargs",
    # These say how to use tools; without tools there is nothing to honour.
    "tools",
    "tool_choice",
    "parallel_tool_calls",
)
UNSUPPORTED: Mapping[str, Refusal] = {
    **sampling.UNSUPPORTED,
    "functions": (([],), NO_TOOLS),
    "function_call": (("none",), NO_TOOLS),
    "audio": ((), "the model writes text only"),
    "modalities": ((["text"],), "the model writes text only"),
    "prediction": ((), "predicted outputs are not used"),
    "reasoning_effort": (("none",), "use chat_template_kwargs, where the model's template has such a switch"),
    "verbosity": (("medium",), "say it in a message"),
    "web_search_options": ((), "the server reaches no other one"),
    "store": ((False,), "nothing is stored"),
    "metadata": (({},), "nothing is stored"),
    "prompt_cache_retention": ((), "cached blocks stay until their memory is needed; retain_cache has them go last"),
    "chat_template": ((), "templates come with the model, never from requests"),
    "continue_final_message": ((False,), "use /v1/completions to continue a text"),
    "documents": (([],), "put them into a message"),
    "echo": ((False,), "use /v1/completions"),
    "mm_processor_kwargs": (({},), "the model reads text only"),
    "include_reasoning": ((True,), "all that the model writes is content"),
}
KNOWN_FIELDS = (*sampling.SAMPLING_FIELDS, *sampling.LABEL_FIELDS, *sampling.OPTION_FIELDS, *UNSUPPORTED, *OWN_FIELDS)


@dataclass(frozen=True, slots=True)
class Extras:
    """What a chat answer says beside its text.

    Args:
        top_logprobs: how many of the likeliest tokens at each position; None gives no log probabilities.
        prompt_logprobs: the same for vLLM's `prompt_logprobs`.
        token_ids: put token ids beside the text.
    """

    top_logprobs: int | None
    prompt_logprobs: int | None
    token_ids: bool


async def chat_completions(state: ServerState, request: Request) -> ASGIApp:
    """Answer `POST /v1/chat/completions`."""
    body = await read_object(request, state.config.max_body_bytes)
    fields = Fields(body)
    fields.refuse(UNSUPPORTED)
    fields.note_unknown(KNOWN_FIELDS)
    check_model(state, fields)
    job, extras = read_chat(state, fields)
    head = new_head(state, request, "chatcmpl", "chat.completion")
    names = TokenNames(state.llm.tokenizer, by_id=job.options.name_tokens_by_id)
    return await answer(state, request, job, ChatReply(head, extras, names), head["id"])


def read_chat(state: ServerState, fields: Fields) -> tuple[Job, Extras]:
    """Read a chat request.

    Raises:
        RequestError: naming the field.
    """
    _refuse_tools(fields)
    options = sampling.read_options(fields, state.llm.resolved.scheduling_policy)
    length = "max_tokens" if fields.get("max_completion_tokens") is None else "max_completion_tokens"
    top_logprobs = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    has_logprobs = fields.flag("logprobs")
    if top_logprobs is not None and not has_logprobs:
        raise InvalidParameter("top_logprobs", top_logprobs, "absent unless logprobs is true")
    extras = Extras(
        top_logprobs=(top_logprobs or 0) if has_logprobs else None,
        prompt_logprobs=fields.integer("prompt_logprobs", 0, MAX_LOGPROBS),
        token_ids=options.return_token_ids,
    )
    spelled = {"max_tokens": length, "logprobs": "top_logprobs", "prompt": "messages"}
    own = {"max_tokens": fields.get(length), "logprobs": extras.top_logprobs}
    params = sampling.read_sampling(fields, state.llm.default_sampling_params(), own, spelled)
    return Job(1, partial(_prompts, state, fields), params, options, spelled), extras


def encode_chat(state: ServerState, fields: Fields, *, add_generation_prompt: bool = True) -> list[int]:
    """Write a conversation as the model's template has it, in token ids.

    Args:
        state: of the server.
        fields: the body.
        add_generation_prompt: unless the body says otherwise.

    Raises:
        RequestError: a malformed conversation, or one that the template refuses.
    """
    if state.llm.tokenizer is None:
        raise UnsupportedFeature("messages", "this server runs without a tokenizer")
    template = require_chat_template(state.llm.tokenizer.chat_template)
    kwargs = fields.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise InvalidParameter("chat_template_kwargs", kwargs, "an object")
    for name in RESERVED.intersection(kwargs or ()):
        raise InvalidParameter("chat_template_kwargs", name, "names that are not reserved")
    add_generation_prompt = fields.flag("add_generation_prompt", add_generation_prompt)
    text = template.render(fields.get("messages"), add_generation_prompt=add_generation_prompt, **(kwargs or {}))
    # The template has written the special tokens already.
    return state.llm.tokenizer.encode(text, add_special_tokens=fields.flag("add_special_tokens", False))


async def _prompts(state: ServerState, fields: Fields) -> list[list[int]]:
    # A long conversation takes a while; neither the event loop nor the engine waits for it.
    return [await asyncio.to_thread(encode_chat, state, fields)]


def _refuse_tools(fields: Fields) -> None:
    tools, choice = fields.get("tools"), fields.get("tool_choice")
    fields.flag("parallel_tool_calls")
    if tools is not None and not isinstance(tools, list):
        raise InvalidParameter("tools", tools, "a list of tools")
    if tools and choice != "none":
        raise UnsupportedFeature("tools", f'{NO_TOOLS}; leave them out, or set tool_choice to "none"')
    if choice is not None and choice not in ("none", "auto"):
        raise UnsupportedFeature("tool_choice", NO_TOOLS)


class ChatReply:
    """Turns outputs into the JSON of chat completions.

    Args:
        head: the fields that are the same in every chunk.
        extras: what to say beside the text.
        names: how tokens are written.
    """

    def __init__(self, head: Mapping[str, Any], extras: Extras, names: TokenNames) -> None:
        self._head = dict(head)
        self._chunk_head = {**head, "object": "chat.completion.chunk"}
        self._extras = extras
        self._names = names
        self._begun: set[int] = set()

    def chunks(self, prompt_idx: int, delta: RequestOutput) -> Iterator[dict[str, Any]]:  # noqa: ARG002 - one prompt
        """Yield the chunks of a stream that a delta gives: the role once, then text, then the reason of the end."""
        for output in delta.outputs:
            if output.index not in self._begun:
                ids = {"prompt_token_ids": delta.prompt_token_ids} if self._extras.token_ids and not self._begun else {}
                self._begun.add(output.index)
                yield self._chunk(output.index, {"role": "assistant", "content": ""}) | ids
            logprobs = self._logprobs(output) if output.token_ids else None
            ids = {"token_ids": output.token_ids} if self._extras.token_ids and output.token_ids else {}
            if output.text or logprobs or ids:
                yield self._chunk(output.index, {"content": output.text}, logprobs, ids)
            if output.is_finished:
                yield self._chunk(output.index, {}, None, _ending(output))

    def last_chunk(self) -> dict[str, Any]:
        """Return the chunk without choices that carries a stream's usage."""
        return {**self._chunk_head, "choices": []}

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the answer in one piece."""
        (output,) = outputs
        body: dict[str, Any] = {**self._head, "choices": [self._choice(sample) for sample in output.outputs]}
        if self._extras.token_ids:
            body["prompt_token_ids"] = output.prompt_token_ids
        if self._extras.prompt_logprobs is not None:
            rows = output.prompt_logprobs or []
            body["prompt_logprobs"] = prompt_logprobs_json(rows, self._extras.prompt_logprobs, self._names)
        return body

    def _choice(self, sample: CompletionOutput) -> dict[str, Any]:
        choice = {
            "index": sample.index,
            "message": {"role": "assistant", "content": sample.text, "refusal": None},
            "logprobs": self._logprobs(sample),
            **_ending(sample),
        }
        return choice | ({"token_ids": sample.token_ids} if self._extras.token_ids else {})

    def _logprobs(self, output: CompletionOutput) -> dict[str, Any] | None:
        if self._extras.top_logprobs is None:
            return None
        return chat_logprobs(output.token_ids, output.logprobs or [], self._extras.top_logprobs, self._names)

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None, **(more or {})}
        return {**self._chunk_head, "choices": [choice]}


def _ending(output: CompletionOutput) -> dict[str, Any]:
    return {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}

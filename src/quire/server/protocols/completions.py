"""`POST /v1/completions`: continue one or more prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple

from starlette.requests import Request
from starlette.types import ASGIApp

from quire.engine.outputs.logprobs import FlatLogprobs, PromptLogprobs
from quire.engine.outputs.outputs import CompletionOutput, RequestOutput
from quire.errors import InvalidParameter, UnsupportedFeature
from quire.sequences.params import MAX_LOGPROBS
from quire.server.generation import llama_cpp_fields, sampling, structured_fields
from quire.server.generation.generation import GenerationRequest, answer, response_header
from quire.server.generation.logprob_fields import (
    CompletionLogprobs,
    TextOffsets,
    TokenNames,
    completion_logprobs,
    prompt_logprobs_json,
)
from quire.server.http.json_stream import JsonArray
from quire.server.protocols.models import read_fields
from quire.server.requests.field_names import renaming
from quire.server.requests.fields import Fields, Refusal, RouteFields
from quire.server.requests.media import refuse_media
from quire.server.state.state import ServerState
from quire.text.tokenizers.detokenizer import IncrementalDetokenizer
from quire.text.tokenizers.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16
MAX_SEQUENCES = 1024

Prompt = str | list[int]
# The client's names of fields, by the engine's.
FIELD_ALIASES: Mapping[str, str] = {"prompt_token_ids": "prompt"}
# The names of llama.cpp, and the one that only chats have in OpenAI's protocol.
BODY_ALIASES: Mapping[str, str] = {
    "max_completion_tokens": "max_tokens",
    **{name: ours for name, ours in llama_cpp_fields.ALIASES.items() if ours != "thinking_token_budget"},
}
_NO_LIMIT: Final = (llama_cpp_fields.NO_LIMIT,)
_OF_CHATS: Refusal = ((), "it is a field of chats; use /v1/chat/completions")
FIELDS: Final = RouteFields(
    honoured=(
        *sampling.SAMPLING_FIELDS,
        *BODY_ALIASES,
        llama_cpp_fields.WINDOW,
        *structured_fields.STRUCTURED_FIELDS,
        *sampling.OPTION_FIELDS,
        *("prompt", "echo"),
    ),
    refused={
        **sampling.UNSUPPORTED,
        **llama_cpp_fields.UNSUPPORTED,
        "suffix": (("",), "the models served here continue a text, they do not fill one in"),
        **dict.fromkeys(("messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"), _OF_CHATS),
        **dict.fromkeys(("reasoning_effort", "include_reasoning", "thinking_token_budget"), _OF_CHATS),
        **dict.fromkeys(("reasoning_budget_tokens", "thinking_budget_tokens"), (_NO_LIMIT, _OF_CHATS[1])),
    },
    neutral=sampling.NEUTRAL,
    objects=("stream_options",),
)


@dataclass(frozen=True, slots=True)
class CompletionExtras:
    """Contents of a completion in addition to its output.

    Args:
        echo: True if the prompt precedes the output.
        logprobs: number of most likely tokens at each position; None gives no log probabilities.
        prompt_logprobs: the same for vLLM's `prompt_logprobs`.
        is_prompt_only: True if the output is left out (`max_tokens` 0).
        token_ids: True if the answer has token ids.
        skip_special_tokens: True if the text has no special tokens.
    """

    echo: bool
    logprobs: int | None
    prompt_logprobs: int | None
    is_prompt_only: bool
    token_ids: bool
    skip_special_tokens: bool


async def completions(state: ServerState, request: Request) -> ASGIApp:
    """Answer `POST /v1/completions`."""
    fields = await read_fields(state, request, FIELDS)
    body, name_of = llama_cpp_fields.translate(fields, state.llm.resolved.max_model_len, BODY_ALIASES)
    with renaming(name_of):
        job, extras, prompts = read_completion(state, body)
    head = response_header(state, request, "cmpl", "text_completion")
    names = TokenNames(state.llm.tokenizer, by_id=job.options.name_tokens_by_id, bytes_prefix="bytes:")
    reply = CompletionReply(head, prompts, job.params.n, extras, names, state.llm.tokenizer)
    return await answer(state, request, job, reply, head["id"])


def read_completion(state: ServerState, fields: Fields) -> tuple[GenerationRequest, CompletionExtras, list[Prompt]]:
    """Read a completion request."""
    prompts = read_prompts(fields.get("prompt"), max_prompts(state))
    options = sampling.read_options(fields, state.llm.resolved)
    max_tokens = fields.integer("max_tokens", 0, 2**31 - 1)
    max_tokens = DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
    has_echo = fields.flag("echo")
    if max_tokens == 0 and not has_echo:
        raise InvalidParameter("max_tokens", 0, "at least 1, or 0 together with echo")
    if has_echo and state.llm.tokenizer is None:
        raise UnsupportedFeature("echo", "this server runs without a tokenizer")
    extras = CompletionExtras(
        echo=has_echo,
        logprobs=fields.integer("logprobs", 0, MAX_LOGPROBS),
        prompt_logprobs=fields.integer("prompt_logprobs", 0, MAX_LOGPROBS),
        is_prompt_only=max_tokens == 0,
        token_ids=options.return_token_ids,
        skip_special_tokens=fields.flag("skip_special_tokens", True),
    )
    # The engine must sample at least one token; an answer without output drops it.
    wanted, names = structured_fields.read_structured(fields)
    field_aliases = {**FIELD_ALIASES, **sampling.beam_width_alias(fields), **names}
    overrides: dict[str, Any] = {
        "max_tokens": max(max_tokens, 1),
        "logprobs": extras.logprobs,
        "structured_outputs": wanted,
    }
    if has_echo and extras.logprobs is not None:
        overrides["prompt_logprobs"] = max(extras.logprobs, extras.prompt_logprobs or 0)
        if extras.prompt_logprobs is None:
            field_aliases["prompt_logprobs"] = "logprobs"
    params = sampling.read_sampling(fields, state.llm.default_sampling_params(), overrides, field_aliases)
    if len(prompts) * params.num_sequences > MAX_SEQUENCES:
        name = "beam_width" if params.beam_width else "best_of" if params.best_of else "n"
        allowed = f"at most {MAX_SEQUENCES} divided by the number of prompts"
        raise InvalidParameter(field_aliases.get(name, name), params.num_sequences, allowed)
    if params.kv_transfer is not None and len(prompts) > 1:
        raise InvalidParameter("prompt", f"{len(prompts)} prompts", "one prompt with kv_transfer_params")

    special = fields.flag("add_special_tokens", True)
    prepare = partial(state.llm.texts.prepare, prompts, params, add_special_tokens=special)
    # Each choice repeats the log probabilities of its prompt: for `echo`, and as vLLM's `prompt_logprobs`.
    num_copies = params.n * (has_echo + (extras.prompt_logprobs is not None)) or 1
    job = GenerationRequest(len(prompts), prepare, params, options, field_aliases, extras.is_prompt_only, num_copies)
    return job, extras, prompts


def _are_token_ids(values: list[Any]) -> bool:
    return {*map(type, values)} <= {int}


# The forms of a list's items; all items of a list have the same form.
FORMS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (lambda item: isinstance(item, str), "a string"),
    (
        lambda item: isinstance(item, list) and bool(item) and _are_token_ids(item),
        "a list of token ids that is not empty",
    ),
    (lambda item: type(item) is int, "a token id"),
)


def read_prompts(value: object, limit: int, field: str = "prompt") -> list[Prompt]:
    """Return the prompts of a request in their four forms: text, texts, token ids, lists of token ids."""
    allowed = "a string, a list of strings, a list of token ids or a list of lists of token ids, none of them empty"
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise InvalidParameter(field, value, allowed)
    if _are_token_ids(value):
        return [value]
    if len(value) > limit:
        raise InvalidParameter(field, f"{len(value)} prompts", f"at most {limit} prompts")
    refuse_media(value, field)
    for has_form, form in FORMS:
        if has_form(value[0]):
            wrong = next((idx for idx, item in enumerate(value) if not has_form(item)), None)
            if wrong is None:
                return value
            raise InvalidParameter(f"{field}[{wrong}]", value[wrong], f"{form}, as {field}[0] is")
    raise InvalidParameter(field, value, allowed)


class _Part(NamedTuple):
    """A prompt, an output, or the new part of an output.

    Args:
        text: text in the answer.
        token_ids: its tokens.
        logprobs: log probabilities of the tokens; empty if they are not requested.
        offsets: start of each token in the answer's text; read once, after the offsets of the previous part.
    """

    text: str
    token_ids: list[int]
    logprobs: FlatLogprobs | PromptLogprobs
    offsets: Iterator[int]


class CompletionReply:
    """Turns outputs into the JSON of completions."""

    def __init__(
        self,
        head: Mapping[str, Any],
        prompts: Sequence[Prompt],
        n: int,
        extras: CompletionExtras,
        names: TokenNames,
        tokenizer: Tokenizer | None,
    ) -> None:
        self._head = dict(head)
        self._prompts = prompts
        self._n = n
        self._extras = extras
        self._names = names
        self._tokenizer = tokenizer
        self._offsets: dict[int, TextOffsets] = {}
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}

    def chunks(self, prompt_idx: int, delta: RequestOutput) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a delta: first the prompt if it is requested, then the output."""
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[prompt_idx] = delta.prompt_logprobs
        for output in delta.outputs:
            index = prompt_idx * self._n + output.index
            is_first = index not in self._offsets
            offsets = self._offsets.setdefault(index, TextOffsets(self._tokenizer))
            ids = {"prompt_token_ids": delta.prompt_token_ids} if is_first and self._extras.token_ids else {}
            if is_first and self._extras.echo:
                before = self._prompt_part(prompt_idx, delta, offsets)
                yield self._chunk(_choice(index, before.text, self._logprobs([before])) | self._ids([]) | ids)
                ids = {}
            new = self._output_part(output, offsets)
            if not (new.text or (new.token_ids and self._shows_tokens) or output.finished or ids):
                continue
            choice = _choice(index, new.text, self._logprobs([new]), self._ending(output))
            yield self._chunk(choice | self._ids(new.token_ids) | ids)

    def text_chunk(self, prompt_idx: int, sample_idx: int, text: str) -> dict[str, Any] | None:
        """Return the chunk of further text of a sample; see `ResponseBuilder`."""
        index = prompt_idx * self._n + sample_idx
        if index not in self._offsets or self._shows_tokens or self._extras.is_prompt_only:
            return None
        return self._chunk(_choice(index, text, None))

    def last_chunk(self) -> dict[str, Any]:
        """Return the chunk without choices that carries a stream's usage."""
        return {**self._head, "choices": []}

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the answer in one piece."""
        choices = (
            self._whole_choice(prompt_idx, output, sample)
            for prompt_idx, output in enumerate(outputs)
            for sample in output.outputs
        )
        return {**self._head, "choices": JsonArray(choices)}

    def _whole_choice(self, prompt_idx: int, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        offsets = TextOffsets(self._tokenizer)
        parts = [self._prompt_part(prompt_idx, output, offsets)] if self._extras.echo else []
        parts.append(self._output_part(sample, offsets))
        text, token_ids = "".join(part.text for part in parts), parts[-1].token_ids
        index = prompt_idx * self._n + sample.index
        choice = _choice(index, text, self._logprobs(parts), self._ending(sample)) | self._ids(token_ids)
        if self._extras.token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
        if self._extras.prompt_logprobs is not None:
            wanted = self._extras.prompt_logprobs
            choice["prompt_logprobs"] = prompt_logprobs_json(output.prompt_logprobs, wanted, self._names)
        return choice

    def _prompt_part(self, prompt_idx: int, output: RequestOutput, offsets: TextOffsets) -> _Part:
        prompt, ids = self._prompts[prompt_idx], output.prompt_token_ids
        if not isinstance(prompt, str):
            assert self._tokenizer is not None  # echo was refused otherwise
            # A character that begins in the prompt and ends in the output belongs to the output's text.
            skip = self._extras.skip_special_tokens
            prompt = IncrementalDetokenizer(self._tokenizer, (), skip_special_tokens=skip).push(ids)
        rows = self._prompt_logprobs.get(prompt_idx, output.prompt_logprobs)
        return _Part(prompt, ids, rows or PromptLogprobs(FlatLogprobs()), offsets.over_prompt(ids, prompt))

    def _output_part(self, output: CompletionOutput, offsets: TextOffsets) -> _Part:
        text, ids, rows = output.text, output.token_ids, output.logprobs
        if self._extras.is_prompt_only:
            text, ids, rows = "", [], None
        starts = offsets.over_output(ids, skip_special_tokens=self._extras.skip_special_tokens)
        return _Part(text, ids, rows or FlatLogprobs(), starts)

    def _logprobs(self, parts: Sequence[_Part]) -> CompletionLogprobs | None:
        num_top = self._extras.logprobs
        if num_top is None:
            return None
        ids = list(chain.from_iterable(part.token_ids for part in parts))
        starts = chain.from_iterable(part.offsets for part in parts)
        return completion_logprobs(ids, [part.logprobs for part in parts], starts, num_top, self._names)

    @property
    def _shows_tokens(self) -> bool:
        return self._extras.token_ids or self._extras.logprobs is not None

    def _ending(self, output: CompletionOutput) -> dict[str, Any]:
        if not output.finished:
            return {"finish_reason": None, "stop_reason": None}
        if self._extras.is_prompt_only:
            return {"finish_reason": "length", "stop_reason": None}
        score = {} if output.beam_score is None else {"beam_score": output.beam_score}
        return {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason, **score}

    def _ids(self, token_ids: list[int]) -> dict[str, Any]:
        return {"token_ids": token_ids} if self._extras.token_ids else {}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "choices": [choice]}


def _choice(
    index: int, text: str, logprobs: CompletionLogprobs | None, ending: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        **(ending or {"finish_reason": None, "stop_reason": None}),
    }


def max_prompts(state: ServerState) -> int:
    """Return the limit on prompts; a request with more prompts than queue slots could never be admitted."""
    return min(state.config.max_prompts, state.llm.resolved.max_queue_len or state.config.max_prompts)

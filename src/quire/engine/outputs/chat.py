"""Tool calls and reasoning of a chat: the sampling parameters that they need, and their parts of outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from quire.engine.outputs.outputs import RequestOutput
from quire.errors import InvalidParameter, UnsupportedFeature
from quire.sequences.params import SamplingParams
from quire.text.chat.messages import Message
from quire.text.reasoning import ReasoningModel
from quire.text.tool_calls import SampleCalls, ToolUse


def with_calls(params: SamplingParams, use: ToolUse) -> SamplingParams:
    """Return sampling parameters under which an output is text, calls, or both."""
    if not isinstance(params, SamplingParams):
        raise InvalidParameter("sampling_params", params, "SamplingParams")
    if not params.detokenize:
        raise UnsupportedFeature("detokenize", "calls are read from text; leave it true with tools")
    needed = use.sampling(params.structured_outputs, params.thinking_token_budget)
    kept = (*params.kept_special_ids, *needed.pop("kept_special_ids"))
    return replace(params, kept_special_ids=kept, **needed)


def explained(
    error: InvalidParameter, use: ToolUse, all_params: Sequence[SamplingParams], asked: Sequence[SamplingParams]
) -> InvalidParameter:
    """Return an error with the field and the value that the client sent."""
    for params, with_grammar in zip(all_params, asked, strict=True):
        wanted = with_grammar.structured_outputs
        if wanted is not None and wanted.source.text == error.value:
            return use.explain(error, wanted.source.text, params.structured_outputs)
    return error


def add_calls(outputs: Iterable[RequestOutput], use: ToolUse, conversations: Iterable[Sequence[Message]]) -> None:
    """Write content, calls and finish reasons into whole outputs of conversations."""
    for output, conversation in zip(outputs, conversations, strict=True):
        for sample in output.outputs:
            calls = SampleCalls(use.after(conversation))
            answer = sample.text if sample.content is None else sample.content
            sample.content, sample.tool_calls = calls.whole(answer)
            sample.finish_reason = calls.finish_reason(sample.finish_reason)


def with_reasoning(all_params: Sequence[SamplingParams], model: ReasoningModel | None) -> Sequence[SamplingParams]:
    """Return sampling parameters under which reasoning can be told from the answer."""
    if model is None:
        return all_params
    read: dict[int, SamplingParams] = {}
    for params in all_params:
        if not isinstance(params, SamplingParams):
            raise InvalidParameter("sampling_params", params, "SamplingParams")
        if id(params) not in read:
            needed = model.sampling()
            kept = (*params.kept_special_ids, *needed.pop("kept_special_ids"))
            read[id(params)] = replace(params, kept_special_ids=kept, **needed)
    # Conversations with the same parameters share them: their strings are tokenized once.
    return [read[id(params)] for params in all_params]


def add_reasoning(outputs: Iterable[RequestOutput], model: ReasoningModel | None) -> None:
    """Write reasoning and content into whole outputs; do nothing where `model` is None."""
    if model is not None:
        for output in outputs:
            for sample in output.outputs:
                sample.reasoning, sample.content = model.split(output.prompt_token_ids, sample.text)

"""Offline programs in the form that vLLM's users write them: only the import differs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from quire import (
    LLM,
    AsyncEngineArgs,
    AsyncLLMEngine,
    BeamSearchParams,
    InvalidParameter,
    RequestError,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    UnsupportedFeature,
)

PROMPTS = ["Once upon a time", "Tom found a red kite", "The old sailor", "A small fox"]
# What those programs pass although it asks for nothing.
NEUTRAL: dict[str, Any] = {"tensor_parallel_size": 1, "trust_remote_code": False, "enforce_eager": True}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(model="bundled", num_kv_blocks=256, num_threads=1, max_model_len=512, seed=0, **NEUTRAL) as llm:
        yield llm


def test_basic(llm: LLM) -> None:
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, seed=1)
    outputs = llm.generate(PROMPTS, sampling_params)
    assert [output.prompt for output in outputs] == PROMPTS
    assert all(len(output.outputs[0].token_ids) <= 16 and output.outputs[0].text for output in outputs)


def test_chat_with_the_default_parameters_changed(llm: LLM) -> None:
    sampling_params = llm.get_default_sampling_params()
    sampling_params.max_tokens = 7
    sampling_params.temperature = 0
    sampling_params.top_k = 50
    sampling_params.ignore_eos = True
    conversation = [{"role": "user", "content": "Who are you?"}]
    (output,) = llm.chat(conversation, sampling_params, use_tqdm=False)
    first = output.outputs[0].text
    assert len(output.outputs[0].token_ids) == 7
    assert output.prompt is not None
    assert "Who are you?" in output.prompt
    assert llm.get_tokenizer().encode(output.prompt, add_special_tokens=False) == output.prompt_token_ids

    sampling_params.max_tokens = 9
    outputs = llm.chat([conversation] * 3, sampling_params, use_tqdm=False)
    assert {output.outputs[0].text for output in outputs} == {outputs[0].outputs[0].text}
    assert outputs[0].outputs[0].text.startswith(first)
    assert len(outputs[0].outputs[0].token_ids) == 9


def test_chat_with_a_template_of_the_caller_and_its_variables(llm: LLM) -> None:
    template = "{{ style }}{% for message in messages %}[{{ message.role }}] {{ message.content | trim }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}[assistant]{% endif %}"
    messages = [{"role": "user", "content": "Hello"}]
    options: dict[str, Any] = {"chat_template": template, "chat_template_kwargs": {"style": "!"}, "use_tqdm": False}
    (output,) = llm.chat(messages, SamplingParams(max_tokens=2), **options)
    assert output.prompt == "![user] Hello\n[assistant]"
    (output,) = llm.chat(messages, SamplingParams(max_tokens=2), add_generation_prompt=False, **options)
    assert output.prompt == "![user] Hello\n"
    for name in ("chat_template", "chat_template_kwargs"):
        with pytest.raises(InvalidParameter, match=f"{name} must be"):
            llm.chat(messages, **{name: ["x"]})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="the chat template cannot be compiled: ") as refused:
        llm.chat(messages, chat_template="{% for %}")
    assert refused.value.field == "chat_template"

    messages.append({"role": "assistant", "content": "Once upon a "})
    (output,) = llm.chat(messages, SamplingParams(max_tokens=2), continue_final_message=True, **options)
    assert output.prompt == "![user] Hello\n[assistant] Once upon a "


def test_variables_that_a_template_does_not_use_are_ignored_with_one_warning(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}{{ style }}"
    messages = [{"role": "user", "content": "Hello"}]
    given = {"enable_thinking": False, "style": "!"}
    for _ in range(2):
        options: dict[str, Any] = {"chat_template": template, "chat_template_kwargs": given}
        (output,) = llm.chat(messages, SamplingParams(max_tokens=2), use_tqdm=False, **options)
        assert output.prompt == "Hello!"
    assert [record.getMessage() for record in caplog.records if "enable_thinking" in record.getMessage()] == [
        "the model's chat template does not use 'enable_thinking'; it is ignored"
    ]
    # A reserved name is refused as over HTTP, and a keyword of `chat` itself may be a misspelt argument.
    with pytest.raises(InvalidParameter, match="chat_template_kwargs must be names that are not reserved"):
        llm.chat(messages, chat_template=template, chat_template_kwargs={"messages": []})
    with pytest.raises(UnsupportedFeature, match="enable_thinking is not supported"):
        llm.chat(messages, chat_template=template, enable_thinking=False)


def test_the_final_message_is_continued_as_a_completion_of_the_same_text_is(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12)
    messages = [{"role": "user", "content": "Tell me a story."}, {"role": "assistant", "content": "Once upon a"}]
    (output,) = llm.chat(messages, greedy, continue_final_message=True, use_tqdm=False)
    ids = llm.render_chat(messages[:1])
    assert output.prompt is not None
    assert output.prompt.endswith("Once upon a")
    assert output.prompt.startswith(llm.get_tokenizer().decode(ids, skip_special_tokens=False))
    (expected,) = llm.generate([output.prompt_token_ids], greedy, use_tqdm=False)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    with pytest.raises(InvalidParameter, match="continue_final_message must be false with add_generation_prompt"):
        llm.chat(messages, greedy, continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(InvalidParameter, match="unless the final message is the assistant's"):
        llm.chat(messages[:1], greedy, continue_final_message=True)
    cut = "{% for message in messages %}{{ message.content[:12] }}{% endfor %}"
    with pytest.raises(UnsupportedFeature, match="does not write the final message"):
        llm.chat(messages, greedy, continue_final_message=True, chat_template=cut)


def test_structured_outputs(llm: LLM) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"kind": {"enum": ["fox", "owl"]}}, "required": ["kind"]}
    texts = []
    for wanted in (
        StructuredOutputsParams(choice=["Positive", "Negative"]),  # type: ignore[arg-type]
        StructuredOutputsParams(regex=r"\w+@\w+\.com\n"),
        StructuredOutputsParams(json={**schema, "additionalProperties": False}),
        StructuredOutputsParams(grammar='root ::= "SELECT " column " from table_1"\ncolumn ::= "col_1" | "col_2"\n'),
    ):
        params = SamplingParams(structured_outputs=wanted, stop=["\n"], max_tokens=50, seed=2)  # type: ignore[arg-type]
        texts.append(llm.generate(prompts="An answer:", sampling_params=params)[0].outputs[0].text)
    assert texts[0] in ("Positive", "Negative")
    assert set(json.loads(texts[2])) == {"kind"}
    assert texts[3] in ("SELECT col_1 from table_1", "SELECT col_2 from table_1")


def test_automatic_prefix_caching(llm: LLM) -> None:
    prefix = "The captain of the old ship knew every star and every rock along the long coast of the north. "
    sampling_params = SamplingParams(temperature=0.0, max_tokens=6)
    with LLM(model="bundled", num_kv_blocks=128, num_threads=1, enable_prefix_caching=False) as regular:
        expected = regular.generate([prefix + prompt for prompt in PROMPTS], sampling_params)
    llm.generate(prefix + PROMPTS[0], sampling_params)
    outputs = llm.generate([prefix + prompt for prompt in PROMPTS], sampling_params)
    assert [output.outputs[0].text for output in outputs] == [output.outputs[0].text for output in expected]
    assert all(output.num_cached_tokens >= 16 for output in outputs)
    assert all(output.num_cached_tokens == 0 for output in expected)
    assert llm.reset_prefix_cache() is None  # type: ignore[func-returns-value]


def test_ngram_speculation(llm: LLM) -> None:
    speculative_config = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
    sampling_params = SamplingParams(temperature=0.0, max_tokens=40)
    expected = llm.generate(PROMPTS, sampling_params)
    with LLM(model="bundled", speculative_config=speculative_config, num_kv_blocks=128, num_threads=1) as guessing:
        outputs = guessing.generate(PROMPTS, sampling_params)
    assert [output.outputs[0].token_ids for output in outputs] == [output.outputs[0].token_ids for output in expected]


def test_beam_search(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=10, length_penalty=0.0)
    found = llm.beam_search([{"prompt": prompt} for prompt in PROMPTS[:2]], params)
    wanted = SamplingParams(n=3, beam_width=3, max_tokens=10, length_penalty=0.0, temperature=0.0)
    for output, expected in zip(found, llm.generate(PROMPTS[:2], wanted), strict=True):
        assert [beam.tokens for beam in output.sequences] == [
            expected.prompt_token_ids + beam.token_ids for beam in expected.outputs
        ]
        for beam, same in zip(output.sequences, expected.outputs, strict=True):
            assert beam.text == f"{expected.prompt}{same.text}"
            # Without a length penalty the score is the sum.
            assert beam.cum_logprob == pytest.approx(same.beam_score, abs=1e-4)
    for width in (0, 1, 129):
        with pytest.raises(InvalidParameter, match=f"beam_width must be an integer from 2 to 128, got {width}"):
            llm.beam_search(PROMPTS[:1], BeamSearchParams(beam_width=width, max_tokens=10))


def test_an_asynchronous_engine(llm: LLM) -> None:
    async def main() -> None:
        args = AsyncEngineArgs(model="bundled", num_kv_blocks=128, num_threads=1, **NEUTRAL)
        engine = AsyncLLMEngine.from_engine_args(args)
        params = SamplingParams(max_tokens=8, temperature=0, output_kind=RequestOutputKind.DELTA)
        text = ""
        async for output in engine.generate(PROMPTS[0], params, "request-1"):
            assert output.request_id == "request-1"
            text += output.outputs[0].text
            # The engine has a copy of the parameters.
            params.max_tokens = 3
        engine.shutdown()
        (expected,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=8, temperature=0))
        assert text == expected.outputs[0].text

    asyncio.run(main())


def test_parameters_that_change_between_two_calls_count_anew(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (first,) = llm.generate(PROMPTS[0], params)
    word = first.outputs[0].text.split()[0]
    params.bad_words = [word]  # type: ignore[assignment]
    (second,) = llm.generate(PROMPTS[0], params)
    assert word not in second.outputs[0].text.split()

"""Every possible answer of a public function-calling set, written by each published template, is read back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.text.chat.chat_template import ChatTemplate
from quire.text.chat.rendering import Renderer
from quire.text.chat.trials import ASK, TemplateTrial, answer_in, header_of
from quire.text.tool_calls import ToolFormat
from quire.text.tool_calls.detection import (
    TRIALS,
    CallTrial,
    accepts,
    choose_format,
    definitions_of,
    endings,
    message_of,
    parsed,
    unread_length,
)
from tests.published.folders import templates
from tests.published.leaderboard import answers

# Conversations in one question to the process that renders.
BATCH = 32
# One of so many answers is cut everywhere.
CUT = 400
# All answers by all templates take most of an hour.
STEPS = [pytest.param(20, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]
# Templates that close a list of calls behind the second one only.
CLOSE_LATE = {"deepseek-ai-DeepSeek-R1-Distill-Llama-8B"}
# Grammars that have another spelling than the template, with the reason.
OTHER_SPELLING = {
    "ByteDance-Seed-OSS": "the template writes lists and objects in Python's syntax, grammars in JSON's; both are read",
    "CohereForAI-c4ai-command-r-plus-tool_use": "the template indents JSON, grammars have one line; both are read",
    "Reka-Edge": "the template escapes characters of enumerated values, grammars have them as they are; both are read",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "the template does not close the list behind one call",
    "openai-gpt-oss-120b": "the template writes the recipient before the channel; models write it behind, too",
}


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    renderer = Renderer()
    yield renderer
    renderer.close()


def written(template: ChatTemplate, chosen: list[CallTrial]) -> Iterator[tuple[CallTrial, str | None]]:
    """Yield what a template writes for calls; None where it refuses them."""
    (prompt,) = template.try_all([TemplateTrial([ASK], definitions_of(chosen[0].functions), begins=True)])
    for start in range(0, len(chosen), BATCH):
        some = chosen[start : start + BATCH]
        trials = [TemplateTrial([ASK, message_of(one.calls)], definitions_of(one.functions)) for one in some]
        for one, text in zip(some, template.try_all(trials), strict=True):
            yield one, answer_in(text, header_of(prompt))


def known(source: str, renderer: Renderer) -> tuple[ChatTemplate, ToolFormat]:
    """Return a template and the format in which it writes calls."""
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>", renderer=renderer)
    form, reason = choose_format("auto", template)
    if form is None or "writes calls" not in reason:
        pytest.skip(reason)
    return template, form


def trials_of(name: str, template: ChatTemplate, form: ToolFormat, step: int) -> list[CallTrial]:
    """Return answers that fit their schemas, as far as the template writes all calls of a message."""
    ((two, answer),) = written(template, [TRIALS[1]])
    writes_all = answer is not None and unread_length(form, two, answer) is not None
    most = (
        1 if not writes_all else 2 if name in CLOSE_LATE else len(max(answers(), key=lambda one: len(one.calls)).calls)
    )
    fitting = [one for one in answers() if one.fits and len(one.calls) <= most]
    assert fitting
    return [CallTrial(one.calls, one.functions) for one in fitting[::step]]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", templates())
def test_every_possible_answer_is_read_back(name: str, step: int, renderer: Renderer) -> None:
    template, form = known(templates()[name], renderer)
    trials = trials_of(name, template, form, step)
    refused, wrong = 0, []
    for trial, answer in written(template, trials):
        if answer is None:
            refused += 1
        elif unread_length(form, trial, answer) is None:
            wrong.append((trial.calls, answer))
    assert not wrong, f"{len(wrong)} of {len(trials)}, such as {wrong[:4]}"
    # Some templates fail with a parameter of any type.
    assert refused <= len(trials) // 20


@pytest.mark.parametrize("name", templates())
def test_streams_cut_anywhere_are_read_as_the_whole(name: str, renderer: Renderer) -> None:
    template, form = known(templates()[name], renderer)
    for trial, answer in written(template, trials_of(name, template, form, CUT)):
        text = next(endings(form, answer or ""))
        whole = parsed(form, trial.functions, [text])
        for cut in range(1, len(text)):
            assert parsed(form, trial.functions, [text[:cut], text[cut:]]) == whole
        assert parsed(form, trial.functions, text) == whole


@pytest.mark.parametrize("name", templates())
def test_grammars_accept_what_templates_write(name: str, renderer: Renderer) -> None:
    template, form = known(templates()[name], renderer)
    if name in OTHER_SPELLING:
        pytest.skip(OTHER_SPELLING[name])
    for trial, answer in written(template, trials_of(name, template, form, 100)):
        assert answer is None or accepts(form, trial, answer), answer

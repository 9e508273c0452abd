"""Every possible answer of a public function-calling set, written by each published template, is read back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.text.chat.chat_template import ChatTemplate
from quire.text.chat.rendering import Renderer
from quire.text.chat.trials import ASK, TemplateTrial, answer_in, header_of
from quire.text.tool_calls import ToolFormat
from quire.text.tool_calls.detection import (
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
from tests.published.leaderboard import Answer, answers

# Conversations in one question to the process that renders.
BATCH = 32
# One of so many answers is cut everywhere, and one is given to the grammar.
CUT, ACCEPTED = 200, 50


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    renderer = Renderer()
    yield renderer
    renderer.close()


def written(template: ChatTemplate, chosen: list[Answer]) -> Iterator[tuple[CallTrial, str | None]]:
    """Yield what a template writes for answers; None where it refuses one."""
    (prompt,) = template.try_all([TemplateTrial([ASK], definitions_of(chosen[0].functions), begins=True)])
    for start in range(0, len(chosen), BATCH):
        some = chosen[start : start + BATCH]
        trials = [TemplateTrial([ASK, message_of(one.calls)], definitions_of(one.functions)) for one in some]
        for one, text in zip(some, template.try_all(trials), strict=True):
            yield CallTrial(one.calls, one.functions), answer_in(text, header_of(prompt))


def known(source: str, renderer: Renderer) -> tuple[ChatTemplate, ToolFormat]:
    """Return a template and the format in which it writes calls."""
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>", renderer=renderer)
    found = choose_format("auto", template)
    if found.form is None or "writes calls" not in found.reason:
        pytest.skip(found.reason)
    return template, found.form


@pytest.mark.parametrize("source", templates().values(), ids=templates())
def test_every_possible_answer_is_read_back(source: str, renderer: Renderer) -> None:
    template, form = known(source, renderer)
    chosen = list(answers())
    assert chosen
    wrong, refused = [], 0
    for trial, answer in written(template, chosen):
        if answer is None:
            # Some templates write one call a message.
            refused += 1
            assert len(trial.calls) > 1
        elif unread_length(form, trial, answer) is None:
            wrong.append((trial.calls, answer))
    assert not wrong, f"{len(wrong)} of {len(chosen) - refused}, such as {wrong[:4]}"


@pytest.mark.parametrize("source", templates().values(), ids=templates())
def test_streams_cut_anywhere_are_read_as_the_whole(source: str, renderer: Renderer) -> None:
    template, form = known(source, renderer)
    for trial, answer in written(template, list(answers())[::CUT]):
        for text in endings(form, answer or ""):
            whole = parsed(form, trial.functions, [text])
            for cut in range(1, len(text)):
                assert parsed(form, trial.functions, [text[:cut], text[cut:]]) == whole
            assert parsed(form, trial.functions, text) == whole
            break


@pytest.mark.parametrize("source", templates().values(), ids=templates())
def test_grammars_accept_what_templates_write(source: str, renderer: Renderer) -> None:
    template, form = known(source, renderer)
    wrong = []
    for trial, answer in written(template, list(answers())[::ACCEPTED]):
        if answer is not None and not accepts(form, trial, answer):
            wrong.append(answer)
    assert not wrong, f"{len(wrong)}, such as {wrong[:4]}"

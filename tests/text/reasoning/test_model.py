"""A model's thinking: markers as tokens, and the phase in which an output begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.errors import InvalidParameter
from quire.sequences.thinking import ThinkingPhase
from quire.text.reasoning import REASONING_FORMATS, ReasoningModel
from quire.text.tokenizers.tokenizer import Tokenizer
from tests.server import checkpoint, reasoning_checkpoint

BEFORE, INSIDE, AFTER = ThinkingPhase.BEFORE, ThinkingPhase.INSIDE, ThinkingPhase.AFTER
EOS = 1


@pytest.fixture(scope="module", params=sorted(REASONING_FORMATS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ReasoningModel:
    """A model of each format, found by its template."""
    folder = reasoning_checkpoint.save(tmp_path_factory.mktemp("models") / "thinker", request.param)
    found = ReasoningModel.find("auto", Tokenizer.from_folder(folder), [EOS])
    assert found is not None
    assert found.form.name == request.param
    return found


def encode(model: ReasoningModel, text: str) -> list[int]:
    return model.tokenizer.encode(text, add_special_tokens=False)


def test_markers_are_tokens(model: ReasoningModel) -> None:
    tokens, form = model.tokens, model.form
    assert tokens is not None
    texts = [model.tokenizer.decode(ids, skip_special_tokens=False) for ids in (tokens.end_ids, tokens.close_ids)]
    assert texts == [form.end, form.close]
    assert model.tokenizer.token_text(tokens.start_id) == form.start
    assert EOS in tokens.boundary_ids
    # Special tokens would not be in the text.
    kept = {model.tokenizer.token_text(token_id) for token_id in model.sampling()["kept_special_ids"]}
    assert kept == (set() if form.name == "think" else set(reasoning_checkpoint.MARKS[form.name]))


def test_the_prompt_decides(model: ReasoningModel) -> None:
    name = model.form.name
    turn = f"<|user|>{model.form.start}hi<|eos|><|assistant|>"
    opened = model.form.start if name != "harmony" else "<|channel|>analysis<|message|>"
    for text, phase in (("", BEFORE), (opened, INSIDE), (reasoning_checkpoint.CLOSED[name], AFTER)):
        prompt_ids = encode(model, turn + text)
        assert model.phase_after(prompt_ids) is phase
        output = "a" if phase is AFTER else f"{'' if phase is INSIDE else opened}b{model.form.close}a"
        assert model.split(prompt_ids, output) == ("" if phase is AFTER else "b", "a")
        assert model.count(prompt_ids, encode(model, output)) == (0 if phase is AFTER else 1)


# Templates that write nothing behind the user's message but the beginning of the next one, or not even that.
OPEN_TURNS = {
    "an added token": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if opens is defined %}OPENING{% endif %}{% endif %}",
    "plain text": "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}\n[model]:\n{% if opens is defined %}OPENING{% endif %}{% endif %}",
    "whatever is asked": "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
    "{% if opens is defined %}OPENING{% endif %}",
    "nothing": "{% for m in messages %}{{ m.content }}{% endfor %}{% if opens is defined %}OPENING{% endif %}",
}


@pytest.mark.parametrize("kind", OPEN_TURNS)
@pytest.mark.parametrize("has_tokens", [True, False])
def test_markers_in_messages_decide_nothing(tmp_path: Path, kind: str, has_tokens: bool) -> None:
    source = OPEN_TURNS[kind].replace("OPENING", "<think>")
    folder = tmp_path / "model"
    saved = reasoning_checkpoint.save(folder, "think") if has_tokens else checkpoint.save(folder)
    tokenizer = Tokenizer.from_folder(saved)
    template = tokenizer.make_chat_template(source)
    model = ReasoningModel.find("think", tokenizer, [EOS], template)
    assert model is not None
    assert (model.tokens is not None) == has_tokens
    for text in (
        "hi",
        "a <think> b",
        "<think>",
        "a </think> b",
        "<think>x</think>",
        "[/INST] <think>",
        "<|assistant|><think>",
    ):
        for opens, phase in (({}, BEFORE), ({"opens": True}, INSIDE)):
            prompt = template.render([{"role": "user", "content": text}], variables=opens)
            if kind == "nothing" and "think" in text and not opens:
                continue  # there is nothing that tells the message from the template's own text
            assert model.phase_after(encode(model, prompt)) is phase, (text, opens)
    # A message that is to be continued decides: its thinking is the model's own.
    if kind in ("an added token", "plain text"):
        begun = template.render([{"role": "user", "content": "hi"}]) + "<think>Hm"
        assert model.phase_after(encode(model, begun)) is (INSIDE if has_tokens else BEFORE)


def test_markers_that_are_no_tokens_are_found_in_texts(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(checkpoint.save(tmp_path / "model"))
    assert ReasoningModel.find("auto", tokenizer, [EOS]) is None
    model = ReasoningModel.find("think", tokenizer, [EOS])
    assert model is not None
    assert model.tokens is None
    assert model.sampling() == {"kept_special_ids": (), "thinking": None}
    for text, phase in (
        ("<|assistant|>", BEFORE),
        ("<|assistant|><think>\n", INSIDE),
        ("<|assistant|><think>\n\n</think>\n\n", AFTER),
        ("<think>a</think>b<|eos|><|user|>hi<|assistant|>", BEFORE),
    ):
        assert model.phase_after(encode(model, text)) is phase
    assert model.count(encode(model, "<think>"), encode(model, "a</think>")) == 0
    with pytest.raises(InvalidParameter, match="reasoning_parser"):
        ReasoningModel.find("other", tokenizer, [EOS])
    assert ReasoningModel.find("deepseek_r1", tokenizer, [EOS]) == model

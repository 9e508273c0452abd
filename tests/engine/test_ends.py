"""The tokens that end the answers of a model: of folders and of files, and for all that ask for them."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams, StructuredOutputs
from quire.engine.startup.tokenizers import find_ends
from quire.models.checkpoints.checkpoint import Checkpoint, locate
from quire.text.tokenizers.ends import EndToken
from quire.text.tokenizers.tokenizer import Tokenizer
from tests.models.gguf.writer import f32, write_gguf

MESSAGES = [{"role": "user", "content": "Where do penguins live?"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
# Of the bundled vocabulary.
EOS, END = EndToken(1, "<|eos|>", False), EndToken(5, "<|end|>", True)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bundled model as a file that names the end of a text only."""
    return write_gguf(locate("bundled"), tmp_path_factory.mktemp("gguf") / "bundled.gguf", f32, pre="gpt-2")


def changed(folder: Path, eos: Any, listed: Any = None) -> Checkpoint:
    """Return a copy of the bundled model, with other ends in config.json and generation_config.json."""
    shutil.copytree(locate("bundled"), folder)
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": eos}
    (folder / "config.json").write_text(json.dumps(config))
    generation = {} if listed is None else {"eos_token_id": listed}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return Checkpoint.open(str(folder))


def ends_of(checkpoint: Checkpoint) -> tuple[EndToken, ...]:
    return find_ends(checkpoint, Tokenizer.from_folder(checkpoint.folder))


def test_a_folder_that_lists_no_ends_has_those_with_known_texts(tmp_path: Path) -> None:
    assert ends_of(changed(tmp_path / "one", 1)) == (EOS, END)
    assert ends_of(changed(tmp_path / "none", None)) == (EOS, END)
    # Both are named.
    assert ends_of(changed(tmp_path / "both", [5, 1])) == (END._replace(is_by_text=False), EOS)


def test_a_list_of_generation_config_is_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A token of the template that it leaves out is named, since a chat may then have no end."""
    checkpoint = changed(tmp_path / "listed", [5, 1], listed=1)
    with caplog.at_level(logging.WARNING):
        assert ends_of(checkpoint) == (EOS,)
    assert "the token <|end|> (5), and eos_token_id of generation_config.json does not list it" in caplog.text
    caplog.clear()
    assert ends_of(Checkpoint.open("bundled")) == (EOS, END._replace(is_by_text=False))
    assert not caplog.records


def test_without_a_tokenizer_the_files_alone_say_it(tmp_path: Path, file: Path) -> None:
    assert find_ends(changed(tmp_path / "one", 1), None) == (EOS._replace(text=""),)
    assert find_ends(Checkpoint.open(str(file)), None) == (EOS, END)


def test_chats_of_a_file_end(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All that asks for ends has the same: stop rules, grammars, minimum lengths, beams."""
    with LLM("bundled", dtype="float32", num_kv_blocks=64, max_model_len=256) as llm:
        expected = llm.chat(MESSAGES, GREEDY, use_tqdm=False)[0].outputs[0]
    assert (expected.finish_reason, expected.token_ids[-1]) == ("stop", 5)
    with caplog.at_level(logging.INFO), LLM(str(file), num_kv_blocks=64, max_model_len=256) as llm:
        assert "Answers end at 1 '<|eos|>', 5 '<|end|>' (by its text)" in caplog.text
        found = llm.chat(MESSAGES, GREEDY, use_tqdm=False)[0].outputs[0]
        assert (found.text, found.token_ids, found.finish_reason) == (
            expected.text,
            expected.token_ids,
            expected.finish_reason,
        )
        longer = SamplingParams(temperature=0.0, max_tokens=20, min_tokens=20)
        assert 5 not in llm.chat(MESSAGES, longer, use_tqdm=False)[0].outputs[0].token_ids
        past = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        assert llm.chat(MESSAGES, past, use_tqdm=False)[0].outputs[0].finish_reason == "length"
        beams = SamplingParams(temperature=0.0, max_tokens=40, beam_width=2)
        assert llm.chat(MESSAGES, beams, use_tqdm=False)[0].outputs[0].finish_reason == "stop"
        pushed = SamplingParams(
            max_tokens=8, logit_bias={5: 100.0}, structured_outputs=StructuredOutputs(choice=("yes", "no"))
        )
        answer = llm.chat(MESSAGES, pushed, use_tqdm=False)[0].outputs[0]
        assert (answer.text in ("yes", "no"), answer.finish_reason, answer.token_ids[-1]) == (True, "stop", 5)

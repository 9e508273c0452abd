"""`quire generate` serves real prompts with the bundled model, in every form of output."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from quire.cli.main import main
from quire.cli.terminal.live_table import LiveTable, MemoryWatch, printable
from quire.engine.llm import LLM
from quire.engine.outputs.outputs import CompletionOutput, RequestOutput
from quire.sequences.params import SamplingParams

PROMPTS = ["Once upon a time", "The little fox"]
GREEDY = ["--temperature", "0", "--max-tokens", "12", "--num-threads", "1", "--num-kv-blocks", "64"]


def expected(llm: LLM, prompts: list[str]) -> list[str]:
    """What the engine itself says."""
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def test_one_prompt_gives_its_text_alone(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", PROMPTS[0], *GREEDY]) == 0
    assert capsys.readouterr().out == expected(llm, PROMPTS[:1])[0] + "\n"


def test_streamed_text_is_the_same_text(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", PROMPTS[0], "--stream", *GREEDY]) == 0
    assert capsys.readouterr().out == expected(llm, PROMPTS[:1])[0] + "\n"


def test_a_file_and_a_pipe_have_a_prompt_on_each_line(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("\n\n".join(PROMPTS) + "\n", encoding="utf-8")
    assert main(["generate", "--prompts-file", str(file), *GREEDY]) == 0
    from_file = capsys.readouterr().out
    texts = expected(llm, PROMPTS)
    assert from_file == f"> {PROMPTS[0]}\n{texts[0]}\n\n> {PROMPTS[1]}\n{texts[1]}\n"
    with file.open(encoding="utf-8") as pipe:
        monkeypatch.setattr("sys.stdin", pipe)
        assert main(["generate", *GREEDY]) == 0
    assert capsys.readouterr().out == from_file


@pytest.mark.parametrize("kind", ["pipe", "file"])
@pytest.mark.parametrize("text", ["", " \n\n"])
def test_standard_input_without_a_prompt_is_a_mistake(
    kind: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(text, encoding="utf-8")
    given = file.open(encoding="utf-8")
    if kind == "pipe":
        reading, writing = os.pipe()
        given.close()
        os.write(writing, text.encode())
        os.close(writing)
        given = os.fdopen(reading, encoding="utf-8")
    with given:
        monkeypatch.setattr("sys.stdin", given)
        assert main(["generate", *GREEDY]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("quire: error: standard input is a pipe or a file without a prompt")
    assert shown.err.count("\n") == 1


def test_json_has_every_sample_and_its_log_probabilities(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--n", "2", "--logprobs", "1", "--prompt-logprobs", "0", "--json"]
    assert main(["generate", "--prompt", PROMPTS[0], "--prompt", PROMPTS[1], *flags, *GREEDY]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["index"] for line in lines] == [0, 1]
    assert [line["prompt"] for line in lines] == PROMPTS
    for line in lines:
        assert line["finished"] is True
        assert len(line["prompt_logprobs"]) == line["num_prompt_tokens"]
        assert line["prompt_logprobs"][0] is None
        assert [sample["index"] for sample in line["outputs"]] == [0, 1]
        for sample in line["outputs"]:
            assert [position[0]["token_id"] for position in sample["logprobs"]] == sample["token_ids"]


def test_a_beam_search_shows_its_best_outputs(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--beam-width", "4", "--n", "2", "--early-stopping", "never", *GREEDY]
    assert main(["generate", "--prompt", PROMPTS[0], "--json", *flags]) == 0
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    params = SamplingParams(beam_width=4, n=2, early_stopping="never", max_tokens=12)
    (output,) = llm.generate(PROMPTS[:1], params, use_tqdm=False)
    assert [sample["text"] for sample in line["outputs"]] == [sample.text for sample in output.outputs]
    scores = [sample["beam_score"] for sample in line["outputs"]]
    assert scores == pytest.approx([sample.beam_score for sample in output.outputs])
    assert main(["generate", "--prompt", PROMPTS[0], "--json", "--stream", *flags]) != 0
    assert "--stream has nothing to show" in capsys.readouterr().err


def test_json_deltas_join_to_the_whole(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", PROMPTS[0], "--prompt", PROMPTS[1], "--json", "--stream", *GREEDY]) == 0
    texts = ["", ""]
    for line in capsys.readouterr().out.splitlines():
        delta: dict[str, Any] = json.loads(line)
        texts[delta["index"]] += "".join(sample["text"] for sample in delta["outputs"])
    assert texts == expected(llm, PROMPTS)


def test_without_detokenizing_there_are_token_ids(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", PROMPTS[0], "--no-detokenize", *GREEDY]) == 0
    ids = capsys.readouterr().out.split()
    assert ids
    assert all(token_id.isdigit() for token_id in ids)


def test_a_prompt_that_is_too_long_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "word " * 200, "--max-model-len", "64", *GREEDY]) == 2
    assert "quire: error: the prompt has" in capsys.readouterr().err


def test_the_demonstration_shows_what_memory_did(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--demo", "--max-tokens", "24", "--num-threads", "1"]) == 0
    shown = capsys.readouterr().out
    assert "KV cache size:" in shown
    assert shown.count("\n> ") == 2 * 8 + 4
    assert shown.count("prompt tokens cached)") == 2 * 8 + 4
    assert "; 0 preemptions" in shown
    assert "4 copied on write" in shown
    assert "Prefix cache: 0 of" not in shown


def test_the_demonstration_in_little_memory_preempts_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    tight = ["--num-kv-blocks", "14", "--max-model-len", "224"]
    assert main(["generate", "--demo", "--max-tokens", "48", "--num-threads", "1", *tight]) == 0
    shown = capsys.readouterr().out
    assert shown.count("prompt tokens cached)") == 2 * 8 + 4
    assert "at most 14 of 14 in use" in shown
    assert "; 0 preemptions" not in shown


def test_a_terminal_gets_a_table_that_ends_whole(llm: LLM) -> None:
    texts = expected(llm, PROMPTS)
    screen = io.StringIO()
    table = LiveTable(PROMPTS, Console(file=screen, force_terminal=True, width=200, color_system=None))
    watch = MemoryWatch(llm)
    table.show(watch.over(llm.stream(PROMPTS, SamplingParams(temperature=0.0, max_tokens=12))))
    final = screen.getvalue().rpartition("cached")[2]
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert prompt in final
        assert " ".join(text.split()) in final
    assert final.count("done") == 2
    assert [row.num_tokens for row in table.rows] == [12, 12]
    assert watch.peak_blocks == 2
    assert watch.lines()[0].startswith("24 tokens in ")


def test_samples_have_a_row_each() -> None:
    table = LiveTable(["a", "b"], Console(file=io.StringIO()), num_samples=2)
    table.add(RequestOutput("1", "b", [1, 2], [CompletionOutput(1, "x", [7])], num_cached_tokens=1))
    (row,) = table.add(RequestOutput("1", "b", [1, 2], [CompletionOutput(1, "y", [8], finish_reason="stop")]))
    assert row is table.rows[3]
    assert (row.label, row.text, row.num_tokens, row.state) == ("b", "xy", 2, "done")
    assert [other.state for other in table.rows[:3]] == ["waits"] * 3


def test_what_a_terminal_would_obey_is_left_out() -> None:
    assert printable("a\x1b[2Jb\x07\x9bc\r\n\td é") == "a[2Jbc\n\td é"

"""`quire bench serve` beside a real server: open and closed loops, traces, refusals, an interruption."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from tests.server.conftest import KEY
from tests.server.process import PATIENCE_S, ServerProcess

# The tiny model has few tokens.
SMALL = ("--vocab-size", "200", "--input-len", "40", "--output-len", "5")


def bench(capsys: pytest.CaptureFixture[str], url: str, *flags: str) -> dict[str, Any]:
    """Return what a run that ended well has said."""
    assert main(["bench", "serve", "--json", "--url", url, *flags]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_synthetic_requests_at_a_rate(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    said = bench(capsys, server.url, *SMALL, "--num-prompts", "6", "--rate", "200", "--slo-ttft", "60")
    report = said["report"]
    assert (said["model"], said["load"]["as_ids"], said["load"]["ignore_eos"]) == ("tiny", True, True)
    assert (report["completed"], report["failed"], report["is_interrupted"]) == (6, {}, False)
    assert (report["num_prompt_tokens"], report["num_new_tokens"]) == (6 * 40, 6 * 5)
    assert report["goodput"] == 1.0
    assert 0 < report["time_to_first_token_s"]["p50"] <= report["end_to_end_s"]["p50"] <= report["duration_s"]


def test_a_shared_prefix_is_found_where_requests_come_in_turn(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--num-prompts", "3", "--concurrency", "1", "--shared-prefix", "32", "--workload-seed", "5")
    report = bench(capsys, server.url, *SMALL, *flags)["report"]
    assert report["completed"] == 3
    assert report["num_cached_tokens"] >= 2 * 32


def test_a_trace_is_sent_when_it_says(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "arrival_s": 100.1}
    lines = [chat, {"prompt": "Q", "max_tokens": 9, "arrival_s": 100.0}, {"prompt_token_ids": [9, 8], "max_tokens": 2}]
    lines[2]["arrival_s"] = 100.05
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    assert main(["bench", "serve", "--url", f"{server.url}/v1", "--trace", str(path), "--model", "tiny"]) == 0
    said = capsys.readouterr().out
    assert f"{server.url}, model tiny: requests of {path}\n3 requests, at the times of the file" in said
    # "Q" is answered with three tokens and an end, since nobody asks it to go on.
    assert "10 new tokens" in said
    assert "Completed 3 of 3 requests" in said


def test_requests_that_are_refused_are_counted(
    narrow_server: ServerProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = (*SMALL, "--num-prompts", "12", "--output-len", "60", "--api-key", KEY)
    report = bench(capsys, narrow_server.url, *flags)["report"]
    assert set(report["failed"]) == {"HTTP 429"}
    assert report["completed"] + report["failed"]["HTTP 429"] == 12
    assert "queue is full" in report["errors"]["HTTP 429"]
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    assert main(["bench", "serve", "--url", narrow_server.url]) == 2
    assert "refuses the API key, or wants one" in capsys.readouterr().err


def test_a_run_without_a_success_fails(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    long, short = ({"prompt_token_ids": [9] * count, "max_tokens": 2} for count in (100_000, 3))
    path.write_text("\n".join(map(json.dumps, (long, long))))
    assert main(["bench", "serve", "--url", server.url, "--trace", str(path)]) == 1
    shown = capsys.readouterr()
    assert "Completed 0 of 2 requests" in shown.out
    assert "Failed: 2 with HTTP 400" in shown.out
    assert shown.err == "quire: error: none of the 2 requests succeeded\n"
    path.write_text("\n".join(map(json.dumps, (long, short))))
    assert main(["bench", "serve", "--url", server.url, "--trace", str(path)]) == 0
    assert "Failed: 1 with HTTP 400" in capsys.readouterr().out


def test_ctrl_c_reports_what_was_done_and_leaves_the_server_idle(server: ServerProcess, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": "Z", "max_tokens": count}) for count in (3, 4000, 3)))
    command = [sys.executable, "-m", "quire", "bench", "serve", "--json", "--url", server.url, "--trace", str(path)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    flags = ("--concurrency", "1", "--ignore-eos")
    with subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True, env=env) as process:
        # The second one comes when the first one has ended.
        server.wait_until(lambda status: any(each["completion_tokens"] > 3 for each in status["requests"]))
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=PATIENCE_S)
    report = json.loads(out)["report"]
    assert process.returncode == 130
    assert report["is_interrupted"]
    assert (report["num_requests"], report["completed"], report["num_cut_off"], report["failed"]) == (3, 1, 1, {})
    assert report["num_new_tokens"] == 3
    server.wait_until_idle()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--url", "ftp://host"], "url must be an address like"),
        (["--trace", "/no/such/file"], "/no/such/file cannot be read"),
        (["--trace", "/no/such/file", "--input-len", "5"], "--input-len shapes synthetic requests"),
        (["--spread", "2"], "spread must be a number from 0 to 1"),
    ],
)
def test_a_mistake_is_said_before_anything_is_sent(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *flags]) == 2
    assert words in capsys.readouterr().err


def test_more_requests_than_a_trace_has_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"prompt": "a", "max_tokens": 1}\n')
    assert main(["bench", "serve", "--trace", str(path), "--num-prompts", "2"]) == 2
    assert f"num_prompts must be at most 1, which {path} has, got 2" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert main(["bench", "serve", "--url", url]) == 2
    assert f"no server answers at {url}: Connection refused" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_an_error(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--url", server.url, "--model", "huge"]) == 2
    assert "has no model 'huge'; it has 'tiny'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rate", "0"], "'0' is not a number of requests a second above 0, or inf"),
        (["--rate", "nan"], "'nan' is not a number of requests a second above 0, or inf"),
        (["--rate", "1", "--concurrency", "1"], "not allowed with argument"),
        (["--timeout", "inf"], "'inf' is not a number of seconds above 0"),
    ],
)
def test_paces_are_numbers(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "serve", *flags])
    assert words in capsys.readouterr().err

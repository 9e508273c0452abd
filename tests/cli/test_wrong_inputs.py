"""Each command refuses wrong inputs in one line of its own words, before it loads a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.cli.main import build_parser, main

# Longest line of an error: values are cut, and lists of what is allowed are short.
MAX_ERROR = 420
FILES = {"no-json": b"{", "no-utf8": b"\xe9\xff", "empty": b"", "other.json": b'{"other": 1}\n'}
# Inputs that every command with a model refuses.
MODELS = (
    ("/no/such/model",),
    ("~no_such_user/model",),
    ("./" + "x" * 300,),
    ("no-utf8",),
    ("no-json",),
    ("folder",),
    ("--bogus",),
    ("--revision", "main", "bundled"),
)
ENGINES = (
    *MODELS,
    ("--block-size", "0"),
    ("--dtype", "int3"),
    ("--swap-space", "4"),
    ("--kv-cache-memory-bytes", "4"),
    ("--kv-cache-memory-bytes", "4X"),
    ("--num-kv-blocks", "many"),
    ("--gpu-memory-utilization", "7"),
    ("--config", "/no/such/file"),
    ("--config", "no-json"),
    ("--config", "no-utf8"),
    ("--config", "other.json"),
    ("--chat-template", "/no/such/file"),
    ("--lora-modules", "sql"),
    ("--enable-eplb",),
)
WRONG = {
    "generate": (
        *((*flags, "--prompt", "a") for flags in ENGINES),
        *(("--prompts-file", name) for name in ("/no/such/file", "no-utf8", "empty", "/")),
        *(("--json-schema", name) for name in ("/no/such/file", "no-utf8", "no-json")),
        ("--prompt", "a", "--temperature", "-1"),
        ("--prompt", "a", "--regex", "("),
        ("--prompt", "a", "--max-tokens", "0"),
        ("--prompt", "a", "--logprobs", "2"),
        ("--prompt", "a", "--lora-name", "sql"),
    ),
    "chat": (*ENGINES, ("--temperature", "hot"), ("--max-tokens", "-1")),
    "serve": (
        *ENGINES,
        ("--port", "http"),
        ("--port", "70000"),
        ("--host", "0.0.0.0"),
        ("--uds", "/no/such/folder/socket"),
        ("--ssl-certfile", "/no/such/file"),
        ("--max-body-bytes", "big"),
        ("--drain-timeout", "-1"),
        ("--replicas", "0"),
        ("--log-level", "loud"),
        ("--allowed-origins", "*"),
        ("--default-chat-template-kwargs", "["),
        ("--tenant-header", "a b"),
        ("--no-enable-prompt-tokens-details", "--data-parallel-size", "2"),
        ("--allowed-methods", '["PUT"]'),
    ),
    "route": (
        (),
        ("--to", "server"),
        ("--to", "ftp://server"),
        ("--to", "http://server:99999"),
        ("--to", "http://127.0.0.1:1", "--policy", "best"),
        ("--to", "http://127.0.0.1:1", "--port", "http"),
        ("--bogus",),
    ),
    "bench": (
        *ENGINES,
        ("--input-len", "0"),
        ("--input-len", "100000"),
        ("--workload", "W9"),
        ("--workload", "W6-16k"),
        ("--workload", "W1", "--input-len", "3"),
        ("--spread", "2"),
        ("--fit", "/no/such/folder/file"),
        ("--fit", "/"),
    ),
    "bench serve": (
        ("--url", "server"),
        ("--url", "ftp://server"),
        ("--url", "http://127.0.0.1:1"),
        *(("--trace", name) for name in ("/no/such/file", "no-utf8", "no-json", "other.json", "empty")),
        ("--rate", "0"),
        ("--timeout", "0"),
        ("--rate", "1", "--concurrency", "2"),
    ),
    "bench quality": (
        *ENGINES,
        *(("--text", name) for name in ("/no/such/file", "no-utf8")),
        ("--tokens", "0"),
        ("--greedy", "many"),
        ("--greedy", "99x2"),
    ),
    "plan": (
        *MODELS,
        ("--gpu", "h99"),
        ("--memory", "big"),
        ("--memory", "1"),
        ("--lengths", "0"),
        ("--gpu", "h100", "--memory", "3G"),
        ("--max-model-len", "100000"),
    ),
    "simulate": (
        *MODELS,
        ("--hardware", "h99"),
        ("--gpus", "0"),
        ("--traffic", "some"),
        *(("--trace", name) for name in ("/no/such/file", "no-utf8", "no-json", "other.json", "empty")),
        *(("--step-times", name) for name in ("/no/such/file", "no-utf8", "no-json", "other.json")),
        ("--slo", "fast"),
        ("--compare", "all"),
        ("--find", "rate"),
        ("--chart", "/no/such/folder/chart"),
    ),
    "inspect": (*MODELS, (), ("empty",)),
    "quantize": (
        *((*flags, "out", "--to", "int8") for flags in MODELS),
        ("bundled", "out"),
        ("bundled", "out", "--to", "int9"),
        ("bundled", "folder", "--to", "int8"),
        ("bundled", "/no/such/folder/out", "--to", "int8"),
        ("bundled", "out", "--to", "int8", "--num-threads", "0"),
        ("bundled", "out", "--to", "int8", "--method", "rounded"),
        ("bundled", "out", "--to", "int4", "--calibration", "no-utf8"),
    ),
    "doctor": (("now",), ("--bogus",)),
    "replay": (
        (),
        *((name,) for name in ("/no/such/file", "no-utf8", "no-json", "empty", "/")),
        ("empty", "--check-every", "0"),
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text(json.dumps({"architectures": ["OtherModel"]}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_command_has_wrong_inputs() -> None:
    (commands,) = (action.choices for action in build_parser()._actions if action.dest == "command")
    assert commands is not None
    assert {*WRONG} == {*commands}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("command", WRONG)
def test_wrong_inputs_are_refused_in_one_line(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model is loaded for a wrong input")

    for module in ("engine.startup.loading", "engine.startup.start"):
        monkeypatch.setattr(f"quire.{module}.load_part", load)
    for flags in WRONG[command]:
        try:
            code = main([*command.split(), *flags])
        except SystemExit as end:
            code = end.code  # type: ignore[assignment]
        shown = capsys.readouterr()
        error = shown.err.removesuffix("\n")
        assert (code, shown.out) == (2, ""), (flags, shown)
        assert error.startswith("quire"), (flags, error)
        assert "\n" not in error, (flags, error)
        assert len(error) <= MAX_ERROR, (flags, error)
        for internal in ("Errno", "Traceback", "codec", "_ssl.c", "<class"):
            assert internal not in error, (flags, error)
        for word in flags:
            if word.startswith("/no/"):
                assert error.count(word) == 1, (flags, error)

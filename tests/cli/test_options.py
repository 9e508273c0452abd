"""Every field has a flag, flags are read as they are meant, and what is not given is left to the defaults."""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import fields
from typing import Any

import pytest

from quire.cli.main import main, parse_args
from quire.cli.options import (
    add_engine_options,
    add_sampling_options,
    engine_options,
    parse_size,
    sampling_options,
)
from quire.cli.server_options import read_server_config
from quire.config import EngineConfig, option_sections
from quire.config.hints import OPTION_HINTS
from quire.config.options import PARTS
from quire.errors import ConfigError
from quire.sequences.params import SamplingParams


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    add_sampling_options(parser, None)
    return parser


def test_nothing_given_leaves_all_defaults(parser: argparse.ArgumentParser) -> None:
    args = parser.parse_args([])
    assert engine_options(args) == {"model": "bundled"}
    assert EngineConfig.from_options(**engine_options(args)) == EngineConfig()
    assert sampling_options(args) == {}


def test_every_field_has_a_flag_with_its_meaning(parser: argparse.ArgumentParser) -> None:
    helps = {action.dest: action.help for action in parser._actions}
    for name in option_sections():
        assert helps[name], name
    for field in fields(SamplingParams):
        if field.init and field.metadata.get("has_flag", True):
            assert ("request_seed" if field.name == "seed" else field.name) in helps, field.name


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["some/model", "--max-model-len", "64"], {"model": "some/model", "max_model_len": 64}),
        (["--kv-cache-memory-bytes", "4G"], {"kv_cache_memory_bytes": 4 * 10**9}),
        (["--swap-space", "2GiB", "--preemption-mode", "swap"], {"swap_space": 2 << 30, "preemption_mode": "swap"}),
        (["--kv-cache-memory-fraction", "0.25"], {"kv_cache_memory_fraction": 0.25}),
        (["--no-enable-prefix-caching"], {"enable_prefix_caching": False}),
        (["--skip-tokenizer-init", "--num-kv-blocks", "9"], {"skip_tokenizer_init": True, "num_kv_blocks": 9}),
        (["--scheduling-policy", "priority", "--seed", "7"], {"scheduling_policy": "priority", "seed": 7}),
        (["--max-queue-len", "none", "--dtype", "float32"], {"max_queue_len": None, "dtype": "float32"}),
        (["--limit-mm-per-prompt", '{"image": 4}'], {"limit_mm_per_prompt": {"image": 4}}),
        (["--limit-mm-per-prompt", "image=4,video=0"], {"limit_mm_per_prompt": {"image": 4, "video": 0}}),
        (["--mm-processor-kwargs", '{"max_pixels": 4096}'], {"mm_processor_kwargs": {"max_pixels": 4096}}),
    ],
)
def test_engine_flags_become_options(
    parser: argparse.ArgumentParser, flags: list[str], expected: dict[str, Any]
) -> None:
    options = engine_options(parser.parse_args(flags))
    assert options == {"model": "bundled", **expected}
    config = EngineConfig.from_options(**options)
    for name, value in expected.items():
        assert getattr(getattr(config, option_sections()[name]), name) == value


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--temperature", "0", "--n", "3"], {"temperature": 0.0, "n": 3}),
        (["--stop", "a,b", "--stop", "c"], {"stop": ["a,b", "c"]}),
        (["--stop-token-ids", "1,22"], {"stop_token_ids": (1, 22)}),
        (["--logit-bias", "5=-1.5,6=2"], {"logit_bias": {5: -1.5, 6: 2.0}}),
        (["--bad-words", "a", "--bad-words", "b c"], {"bad_words": ["a", "b c"]}),
        (["--allowed-token-ids", "7"], {"allowed_token_ids": (7,)}),
        (["--beam-width", "4", "--early-stopping", "never"], {"beam_width": 4, "early_stopping": "never"}),
        (
            ["--beam-width", "4", "--early-stopping", "True", "--length-penalty", "0.5"],
            {"beam_width": 4, "early_stopping": True, "length_penalty": 0.5},
        ),
        (["--request-seed", "-3", "--seed", "4"], {"seed": -3}),
        (["--max-tokens", "None", "--ignore-eos"], {"max_tokens": None, "ignore_eos": True}),
    ],
)
def test_sampling_flags_become_parameters(
    parser: argparse.ArgumentParser, flags: list[str], expected: dict[str, Any]
) -> None:
    options = sampling_options(parser.parse_args(flags))
    assert options == expected
    SamplingParams(**options)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("17", 17),
        ("4K", 4000),
        ("4k", 4000),
        ("1.5GiB", 3 << 29),
        ("2 MiB", 2 << 20),
        ("3GB", 3 * 10**9),
        ("1T", 10**12),
    ],
)
def test_sizes_are_read(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "G", "-1", "4X", "1e9", "4GiBs", "0x10"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    "flags",
    [["--n", "x"], ["--top-p", ""], ["--logit-bias", "5"], ["--stop-token-ids", "1,,2"], ["--block-size", "none"]],
)
def test_what_cannot_be_read_ends_with_code_2(
    parser: argparse.ArgumentParser, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        parser.parse_args(flags)
    assert exit_.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_the_help_of_an_option_with_fixed_values_shows_them(parser: argparse.ArgumentParser) -> None:
    shown = {action.dest: action.metavar for action in parser._actions}
    for part in PARTS.values():
        for field in fields(part):
            if "choices" in field.metadata:
                words = [*field.metadata["choices"], *(["none"] if field.default is None else [])]
                assert shown[field.name] == "{" + ",".join(words) + "}"
    assert shown["preemption_mode"] == "{auto,recompute,swap}"
    assert shown["quantization"] == "{int8,int4,none}"


def test_the_help_of_a_limit_that_none_removes_shows_its_default(parser: argparse.ArgumentParser) -> None:
    helps = {action.dest: action.help for action in parser._actions}
    assert str(helps["prefix_cache_ttl_s"]).endswith('; "none" for no limit (default: 86400.0)')
    assert str(helps["pipeline_microbatches"]).endswith("; by default one per stage.")


def test_the_help_is_there_without_docstrings() -> None:
    command = [sys.executable, "-OO", "-m", "quire", "serve", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    words = " ".join(done.stdout.split())
    for config in PARTS.values():
        for field in fields(config):
            if field.name != "model":
                assert "--" + field.name.replace("_", "-") in words
    assert "work on token ids only" in words
    assert 'order in which idle blocks are evicted: "lru"' in words


@pytest.mark.parametrize("flags", [["--data-parallel-size", "2"], ["--data-parallel-size=2"], ["-dp", "2"]])
def test_a_flag_that_only_vllm_has_is_refused_with_a_hint(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    hint = OPTION_HINTS["data_parallel_size"][1]
    assert main(["generate", "--prompt", "Hello", *flags]) == 2
    assert capsys.readouterr().err == f"quire: error: data_parallel_size must be 1 or absent, got 2: {hint}\n"
    # Commands with some of the options know their names too.
    with pytest.raises(SystemExit) as exit_:
        parse_args(["plan", *flags])
    assert exit_.value.code == 2
    assert ("-dp" in flags) or f"; --data-parallel-size: {hint}" in capsys.readouterr().err


def test_flags_of_vllm_that_change_nothing_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    flags = "--enforce-eager --load-format auto --disable-log-requests -dp 1 --no-enable-eplb --max-logprobs 20"
    args = parse_args(["serve", "--model", "some/model", *flags.split()])
    config = EngineConfig.from_options(**engine_options(args))
    assert config == EngineConfig.from_options(model="some/model", enforce_eager=True)
    assert parse_args(["serve", "--enforce-eager", "some/model"]).model == "some/model"
    (record,) = caplog.records
    assert record.getMessage().endswith(
        "data_parallel_size, disable_log_requests, enable_eplb, load_format, max_logprobs"
    )


# Flags of vLLM's server as start-up scripts have them, and one value of each that asks for something else.
NEUTRAL = (
    ("--no-enable-log-outputs", "--enable-log-outputs"),
    ("--allow-credentials", ""),
    ("""--allowed-methods=["*"]""", """--allowed-methods=["PUT"]"""),
    ("""--allowed-headers=["*"]""", """--allowed-headers=["x-a"]"""),
    ("--disable-fastapi-docs", ""),
    ("--enable-tokenizer-info-endpoint", ""),
    ("-O3", ""),
    ("-O.mode=3", ""),
    ("--optimization-level=2", ""),
    ("--moe-backend=auto", "--moe-backend=deep_gemm"),
    ("--mamba-ssm-cache-dtype=auto", "--mamba-ssm-cache-dtype=float32"),
    ("--mamba-cache-dtype=auto", "--mamba-cache-dtype=float16"),
    ("--logprobs-mode=raw_logprobs", "--logprobs-mode=processed_logits"),
    ("--no-enable-dbo", ""),
    ("--data-parallel-size-local=1", "--data-parallel-size-local=4"),
    ("--kv-offloading-backend=native", "--kv-offloading-backend=lmcache"),
    ("--num-scheduler-steps=1", "--num-scheduler-steps=8"),
    ("--no-enable-ssl-refresh", "--enable-ssl-refresh"),
    ("--max-cudagraph-capture-size=512", ""),
)


@pytest.mark.parametrize(("neutral", "other"), NEUTRAL)
def test_a_neutral_flag_of_vllm_gives_one_warning_and_another_value_an_error(
    neutral: str, other: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig.from_options(**engine_options(parse_args(["serve", neutral])))
    assert config == EngineConfig()
    (record,) = caplog.records
    name = "optimization_level" if neutral.startswith("-O") else neutral.partition("=")[0].strip("-").replace("-", "_")
    assert record.getMessage() == f"ignored options that change nothing here: {name.removeprefix('no_')}"
    if other:
        with pytest.raises(ConfigError, match=other.partition("=")[0].strip("-").replace("-", "_") + " must be "):
            EngineConfig.from_options(**engine_options(parse_args(["serve", other])))


def test_a_log_of_requests_can_be_switched_off_as_in_vllm() -> None:
    for flags, is_on in (([], False), (["--no-enable-log-requests"], False), (["--enable-log-requests"], True)):
        assert read_server_config(parse_args(["serve", *flags])).log_requests is is_on


def test_the_help_of_the_server_begins_with_its_own_options() -> None:
    with pytest.raises(SystemExit), redirect_stdout(io.StringIO()) as output:
        parse_args(["serve", "--help"])
    positions = [output.getvalue().index(word) for word in ("--host", "--port", "--api-key", "model options:")]
    assert positions == sorted(positions)


def test_a_gpu_has_the_same_flag_in_plans_and_simulations() -> None:
    assert parse_args(["plan", "--gpu", "h100"]).gpu == "h100"
    assert parse_args(["simulate", "--gpu", "h100", "--gpus", "2"]).hardware == "h100"


@pytest.mark.parametrize("count", ["0", "1"])
def test_the_number_of_processes_for_http_is_one_as_in_scripts_for_vllm(count: str) -> None:
    args = parse_args(["serve", "--api-server-count", count])
    assert EngineConfig.from_options(**engine_options(args)) == EngineConfig()


def test_more_processes_for_http_are_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", "--api-server-count", "4"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("quire: error: api_server_count must be 0 or 1 or absent, got 4: front processes were ")
    assert "--replicas N" in error


def test_a_misspelt_flag_is_refused_in_one_line_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse_args(["generate", "--temprature=0", "--colour"])
    assert exit_.value.code == 2
    error = "quire: error: unrecognized arguments: --temprature=0 --colour; did you mean --temperature?\n"
    assert capsys.readouterr().err == error
    with pytest.raises(SystemExit):
        parse_args(["serve", "--port", "many"])
    assert capsys.readouterr().err.count("\n") == 1


def test_a_swap_space_without_a_unit_is_refused_before_loading(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "no/such/model", "--prompt", "Hello", "--swap-space", "4"]) == 2
    assert "--swap-space 4GiB" in capsys.readouterr().err


def test_every_line_of_the_help_has_its_default() -> None:
    shown: dict[str, str] = {}
    for command in ("serve", "generate", "chat"):
        with pytest.raises(SystemExit), redirect_stdout(io.StringIO()) as output:
            parse_args([command, "--help"])
        _, *entries = re.split(r"\n  (?=--)", output.getvalue().partition("model options:")[2])
        shown |= {entry.split()[0]: " ".join(entry.split()) for entry in entries}
    exclusive = ("--json-schema", "--json-object", "--regex", "--choice", "--grammar")
    plain = ("--watch", "--reasoning-content", "--log-requests,", "--allow-runtime-lora-updating")
    silent = {name for name, text in shown.items() if "default" not in text.lower()}
    assert silent <= {*exclusive, *plain}
    assert not re.search(r"\bNone\b", " ".join(shown.values()))
    assert "(default: 8GiB)" in shown["--prefix-cache-disk-bytes"]
    assert "(on by default)" in shown["--enable-prefix-caching,"]


@pytest.mark.parametrize("flags", [["--max-model-len", "auto"], ["--max-model-len", "-1"], []])
def test_an_automatic_context_length_is_the_default(parser: argparse.ArgumentParser, flags: list[str]) -> None:
    config = EngineConfig.from_options(**engine_options(parser.parse_args(flags)))
    assert config.model.max_model_len is None


def test_flags_of_vllm_that_mean_something_are_taken() -> None:
    flags = ["--served-model-name", "one", "two", "--num-gpu-blocks-override", "64", "--generation-config", "vllm"]
    flags += ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}', "--chat-template", "file"]
    flags += ["--allowed-origins", '["https://a.example"]', "--default-chat-template-kwargs", '{"a": 1}', "--uds", "x"]
    args = parse_args(["serve", "some/model", *flags])
    config = EngineConfig.from_options(**engine_options(args))
    assert config.model.served_names == ("one", "two")
    assert (config.cache.num_kv_blocks, config.speculative.num_tokens) == (64, 3)
    assert (config.model.generation_config, config.model.chat_template) == ("vllm", "file")
    assert (args.allowed_origins, args.default_chat_template_kwargs) == (["https://a.example"], {"a": 1})
    with pytest.raises(SystemExit):
        parse_args(["serve", "--allowed-origins", '{"a": 1}'])
    # A command without a server refuses what only a server has.
    with pytest.raises(ConfigError, match="an option of `quire serve`"):
        EngineConfig.from_options(**engine_options(parse_args(["generate", "--uds", "x"])))

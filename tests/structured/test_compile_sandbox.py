"""Grammars are compiled in a sandbox process: time bombs, memory bombs, and sandboxes that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="llguidance is not installed")

from quire.errors import InvalidParameter, UnsupportedFeature, WorkerError
from quire.platform.bounded.process import RemoteCall
from quire.sequences.structured import GrammarSource, StructuredOutputs
from quire.text.structured.compile_sandbox import CompileSandbox
from quire.text.structured.grammar_compiler import MAX_SANDBOXES, GrammarCompiler
from quire.text.structured.grammar_setup import GrammarModel, GrammarSetup
from quire.text.structured.local_grammars import LocalGrammars
from tests.structured.grammar_world import NUM_IDS, json_call

SETUP = GrammarSetup(json_call(), NUM_IDS, (0,))
# The remainders of a million numbers are the states of an automaton.
TIME_BOMB = StructuredOutputs(json={"type": "integer", "multipleOf": 999_983})
# A chain of rules, each of which may end or go on to the next one.
CHAIN = "".join(f'r{idx}: "a" r{idx + 1}? "b"\n' for idx in range(4000))
MEMORY_BOMB = StructuredOutputs(grammar=f'start: {" | ".join(f"r{idx}" for idx in range(4000))}\n{CHAIN}r4000: "n"\n')
SOUND = StructuredOutputs(regex="[ab]+")
RECURSIVE = StructuredOutputs(json={"properties": {"a": {"$ref": "#"}}, "additionalProperties": False})


def grammars(timeout_s: float = 30.0, memory_bytes: int = 1 << 29) -> GrammarCompiler:
    local = LocalGrammars(GrammarModel(json_call, NUM_IDS, (0,)))
    return GrammarCompiler(local, timeout_s=timeout_s, memory_bytes=memory_bytes)


@pytest.fixture(scope="module")
def trial() -> Iterator[CompileSandbox]:
    trial = CompileSandbox(SETUP, 1 << 29)
    yield trial
    trial.close()
    assert not trial.is_alive


def test_a_time_bomb_ends_its_process_and_the_next_one_gets_another() -> None:
    opened = grammars(timeout_s=0.3)
    with pytest.raises(InvalidParameter, match=r"longer than 0\.3 s \(grammar_timeout_s\)") as caught:
        opened.open(TIME_BOMB)
    assert caught.value.field == "structured_outputs.json"
    assert opened.open(SOUND) is opened.find(SOUND)
    opened.close()


def test_a_memory_bomb_ends_its_process_and_the_next_one_gets_another() -> None:
    opened = grammars(memory_bytes=1 << 24)
    with pytest.raises(InvalidParameter, match=r"more than 16 MiB \(grammar_memory_bytes\)") as caught:
        opened.open(MEMORY_BOMB)
    assert caught.value.field == "structured_outputs.grammar"
    assert opened.open(SOUND) is opened.find(SOUND)
    opened.close()


@pytest.mark.parametrize(
    ("wanted", "field", "says"),
    [
        ({"json": {"type": "strin"}}, "json", "type is one of array, "),
        ({"json": {"items": {"uniqueItems": True}}}, "json", "items: uniqueItems cannot be enforced, since"),
        ({"json": {"$ref": "#/nowhere"}}, "json", "no part of the schema is '#/nowhere'"),
        ({"json": {"format": "regex", "type": "string"}}, "json", "there is no expression of regex"),
        ({"json": "[" * 200 + "]" * 200}, "json", "object"),
        ({"json": {"allOf": [{"const": 1}, {"const": 2}]}}, "json", "no value meets it"),
        ({"regex": "("}, "regex", "unclosed group"),
        ({"regex": "(?=a)b"}, "regex", "look-around"),
        ({"regex": "z"}, "regex", "no text that it matches and the model can write"),
        ({"regex": "(" * 50_000 + ")" * 50_000}, "regex", ""),
        ({"regex": "(a{1000}){1000}"}, "regex", "forces"),
        ({"choice": ["z", "zz"]}, "choice", "no text that it matches and the model can write"),
        ({"grammar": "start x"}, "grammar", "Expected"),
        ({"grammar": "start: x"}, "grammar", "unknown name"),
        ({"grammar": 'start: "a" start'}, "grammar", "forces"),
        ({"grammar": 'begin: "a"'}, "grammar", "start"),
    ],
)
def test_what_does_not_compile_is_refused_with_the_reason(wanted: dict[str, Any], field: str, says: str) -> None:
    opened = grammars()
    with pytest.raises(InvalidParameter) as caught:
        opened.open(StructuredOutputs(**wanted))
    assert caught.value.field == f"structured_outputs.{field}"
    assert says in str(caught.value)
    opened.close()


def test_schemas_that_name_themselves_and_large_ones_compile(trial: CompileSandbox) -> None:
    assert trial.compile(RECURSIVE.source, 30.0) is None
    names = [f"name{idx}" for idx in range(300)]
    large = StructuredOutputs(json={"properties": {name: {"type": "string"} for name in names}, "required": names})
    assert trial.compile(large.source, 30.0) is None
    many = StructuredOutputs(choice=tuple(f"name {idx}" for idx in range(4000)))
    assert trial.compile(many.source, 30.0) is None
    assert trial.is_alive


def test_a_process_that_somebody_ends_is_replaced() -> None:
    opened = grammars()
    opened.open(SOUND)
    (trial,) = opened.sandboxes.idle()
    os.kill(trial.pid, signal.SIGKILL)
    while trial.is_alive:
        pass
    assert opened.open(RECURSIVE) is opened.find(RECURSIVE)
    opened.close()


def test_a_bomb_holds_up_no_other_grammar() -> None:
    assert MAX_SANDBOXES > 1
    opened = grammars(timeout_s=3.0)
    refused: list[str] = []

    def open_bomb() -> None:
        try:
            opened.open(TIME_BOMB)
        except InvalidParameter as error:
            refused.append(str(error))

    bomb = threading.Thread(target=open_bomb)
    bomb.start()
    assert opened.open(SOUND) is not None
    assert bomb.is_alive()
    assert len(opened.sandboxes.idle()) == 1, "the other one has the bomb"
    bomb.join()
    assert len(refused) == 1
    opened.close()


def test_nothing_is_left_behind() -> None:
    opened = grammars()
    opened.open(SOUND)
    (trial,) = opened.sandboxes.idle()
    opened.close()
    assert not trial.is_alive


def test_the_process_loads_no_torch(trial: CompileSandbox) -> None:
    assert trial.compile(SOUND.source, 30.0) is None
    maps = f"/proc/{trial.pid}/maps"
    with open(maps, encoding="utf-8") as file:
        loaded = file.read()
    assert "llguidance" in loaded
    assert "torch" not in loaded


def test_a_tokenizer_that_cannot_be_used_is_refused() -> None:
    with pytest.raises(UnsupportedFeature, match="tokenizer cannot be used") as caught:
        CompileSandbox(
            SETUP._replace(tokenizer=RemoteCall("quire.text.tokenizers.tokenizer_json:same", ('{"model": {}}',))),
            1 << 29,
        )
    assert caught.value.field == "structured_outputs"


def test_a_process_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(WorkerError, match="does not start"):
        CompileSandbox(SETUP, 1 << 29)


@pytest.mark.slow
def test_without_the_package_the_extra_is_named() -> None:
    script = (
        "import sys; sys.modules['llguidance'] = None\n"
        "from quire import LLM, SamplingParams\n"
        "llm = LLM(num_kv_blocks=64, num_threads=1, max_model_len=64)\n"
        "try:\n"
        "    llm.generate('a', SamplingParams(structured_outputs={'regex': 'a'}))\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error.field, error)\n"
        "print(len(llm.generate('a', SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids))\n"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environ, check=True)
    first, second = result.stdout.splitlines()
    assert first.startswith("UnsupportedFeature structured_outputs")
    assert "pip install llguidance" in first
    assert second == "2"


def test_a_source_is_what_the_process_gets(trial: CompileSandbox) -> None:
    assert trial.compile(GrammarSource("json", '{"type": "object"}', False), 30.0) is None
    assert trial.compile(GrammarSource("json", "not json"), 30.0)


def test_what_compiling_took_is_known_whatever_came_before(trial: CompileSandbox) -> None:
    names = tuple(f"name {idx} {idx * 7919 % 1000}" for idx in range(4000))
    small, large = StructuredOutputs(regex="[ab]+c"), StructuredOutputs(choice=names)
    taken = []
    for wanted in (large, small, large, small, large):
        assert trial.compile(wanted.source, 30.0) is None
        taken.append(trial.num_bytes)
    assert min(taken[0::2]) > 1 << 19
    assert max(taken[1::2]) < 1 << 19
    opened = grammars()
    assert opened.open(large).num_bytes > 1 << 19
    opened.close()

"""Logits of other engines for given tokens: `PeerReader` starts this module under a peer's interpreter.

The process answers each line of JSON on its standard input: `{"read": [ids]}` with the logits of all positions, float32
as they lie in memory; `{"greedy": [[ids]], "num_tokens": n}` with a line of JSON. Nothing but the standard library is
imported before the peer.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol

from benchmarks.contenders import APART
from benchmarks.machine import version_of
from benchmarks.peers import IkLlamaCppEngine, LlamaCppEngine
from benchmarks.serving import Setup, serve_by_steps
from quire.measurement.bench.workloads import BenchRequest

if TYPE_CHECKING:
    from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
MAX_LENGTH = 2048


class LogitsReader(Protocol):
    """A peer in its own process."""

    def logits(self, ids: list[int]) -> Iterator[bytes]:
        """Yield the logits of all positions in order, float32, some at a time."""

    def greedy(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Return the likeliest tokens after each prompt, past the end of the text."""


class LlamaCppReader:
    """llama.cpp or ik_llama.cpp, with a KV cache as they have it by default."""

    engine_class = LlamaCppEngine

    def __init__(self, model: Path, num_threads: int) -> None:
        self._engine = self.engine_class(Setup(model, num_threads, 1, MAX_LENGTH, False, {}))

    def logits(self, ids: list[int]) -> Iterator[bytes]:
        """Decode the sequence, with the logits of every token."""
        return self._engine.logits(ids)

    def greedy(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Serve the prompts one after the other."""
        outputs = []
        for prompt in prompts:
            serve_by_steps(self._engine, [BenchRequest(prompt, num_tokens)])
            outputs += self._engine.outputs
        return outputs


class IkLlamaCppReader(LlamaCppReader):
    """ik_llama.cpp."""

    engine_class = IkLlamaCppEngine


class TransformersReader:
    """transformers in float32, on weights in 16 or 32 bits."""

    def __init__(self, model: Path, num_threads: int) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._torch.set_num_threads(num_threads)
        auto: Any = importlib.import_module("transformers").AutoModelForCausalLM
        self._model = auto.from_pretrained(model, dtype=self._torch.float32).eval()

    def logits(self, ids: list[int]) -> Iterator[bytes]:
        """Run the whole sequence."""
        with self._torch.inference_mode():
            for row in self._model(self._torch.tensor([ids])).logits[0]:
                yield row.numpy().tobytes()

    def greedy(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Generate after each prompt by itself."""
        options = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False, "eos_token_id": None}
        with self._torch.inference_mode():
            outputs = [self._model.generate(self._torch.tensor([ids]), **options)[0].tolist() for ids in prompts]
        return [output[len(prompt) :] for output, prompt in zip(outputs, prompts, strict=True)]


class OpenVinoReader:
    """OpenVINO on an exported model, with the KV cache and dynamic quantisation that are its defaults on CPUs."""

    def __init__(self, model: Path, num_threads: int) -> None:
        self._numpy: Any = importlib.import_module("numpy")
        core: Any = importlib.import_module("openvino").Core()
        properties = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1", "INFERENCE_NUM_THREADS": num_threads}
        compiled = core.compile_model(str(model / "openvino_model.xml"), "CPU", properties)
        self._request = compiled.create_infer_request()

    def logits(self, ids: list[int]) -> Iterator[bytes]:
        """Run the whole sequence."""
        self._request.reset_state()
        for row in self._run(ids, 0):
            yield row.tobytes()

    def greedy(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Decode after each prompt by itself, a token a step."""
        outputs = []
        for prompt in prompts:
            self._request.reset_state()
            output: list[int] = []
            fed = prompt
            while len(output) < num_tokens:
                logits = self._run(fed, len(prompt) + len(output) - len(fed))
                fed = [int(logits[-1].argmax())]
                output += fed
            outputs.append(output)
        return outputs

    def _run(self, ids: list[int], num_past: int) -> Any:
        """Return the logits of tokens, float32 [T, V], after those that the cache has."""
        array, length = self._numpy.array, num_past + len(ids)
        inputs = {
            "input_ids": array([ids], dtype="int64"),
            "attention_mask": self._numpy.ones((1, length), dtype="int64"),
            "position_ids": self._numpy.arange(num_past, length, dtype="int64")[None],
            "beam_idx": array([0], dtype="int32"),
        }
        return self._request.infer(inputs)["logits"][0].astype("float32")


class KnownPeer(NamedTuple):
    """A kind of peer.

    Args:
        reader: class that runs in the peer's process.
        package: package whose version is reported.
        model: option of `benchmarks.quality` that names the model in the peer's form.
    """

    reader: Any
    package: str
    model: str = "file"


READERS = {
    "llamacpp": KnownPeer(LlamaCppReader, APART["llamacpp"]),
    "ik": KnownPeer(IkLlamaCppReader, APART["ik"]),
    "openvino": KnownPeer(OpenVinoReader, "openvino", "openvino_model"),
    "transformers": KnownPeer(TransformersReader, "transformers", "folder"),
}


class PeerReader:
    """A peer's process, which ends on leaving.

    Args:
        python: interpreter of the peer's environment.
        name: name in `READERS`.
        model: checkpoint in the peer's form.
        num_threads: number of threads.

    Attributes:
        version: version of the peer's package.
    """

    def __init__(self, python: Path, name: str, model: Path, num_threads: int) -> None:
        command = [str(python), "-m", "benchmarks.peer_logits", name, str(model), "--threads", str(num_threads)]
        env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(num_threads)}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=env, cwd=ROOT)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input: Any = self._process.stdin
        self._output: Any = self._process.stdout
        self.version: str | None = self._line()

    def __enter__(self) -> PeerReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def logits(self, ids: list[int], vocab_size: int, most: int) -> Iterator[Tensor]:
        """Yield the logits of all positions, float32 [R, V], at most `most` at a time."""
        import torch

        self._ask({"read": ids})
        for first in range(0, len(ids), most):
            count = min(most, len(ids) - first)
            raw = bytearray(self._output.read(4 * vocab_size * count))
            if len(raw) != 4 * vocab_size * count:
                raise RuntimeError(f"the peer's process ended with status {self._process.wait()}")
            yield torch.frombuffer(raw, dtype=torch.float32).view(count, vocab_size)

    def greedy(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Return the likeliest tokens after each prompt."""
        self._ask({"greedy": prompts, "num_tokens": num_tokens})
        outputs: list[list[int]] = self._line()
        return outputs

    def _ask(self, question: dict[str, Any]) -> None:
        self._input.write(json.dumps(question).encode() + b"\n")
        self._input.flush()

    def _line(self) -> Any:
        line = self._output.readline()
        if not line:
            raise RuntimeError(f"the peer's process ended with status {self._process.wait()}")
        return json.loads(line)


def answer(reader: LogitsReader, question: dict[str, Any], output: BinaryIO) -> None:
    """Answer one line."""
    if "read" in question:
        for part in reader.logits(question["read"]):
            output.write(part)
    else:
        outputs = reader.greedy(question["greedy"], question["num_tokens"])
        output.write(json.dumps(outputs).encode() + b"\n")
    output.flush()


def main() -> None:
    """Answer the lines that come in on standard input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=READERS)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    # Libraries print to standard output, which is for answers only.
    with os.fdopen(os.dup(1), "wb") as output:
        os.dup2(2, 1)
        peer = READERS[args.peer]
        reader: LogitsReader = peer.reader(args.model, args.threads)
        output.write(json.dumps(version_of(peer.package)).encode() + b"\n")
        output.flush()
        for line in sys.stdin:
            answer(reader, json.loads(line), output)


if __name__ == "__main__":
    main()

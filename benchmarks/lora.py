"""Time steps with adapters beside the same steps without: `python -m benchmarks.lora --output FILE`.

Qwen3-0.6B's shape with random weights, 16 sequences, 8 adapters of rank 16 in all linear layers, two sequences each.
The last lines compare with the mark. A ratio is the median of the rounds' ratios, since a machine changes between them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file

from benchmarks.machine import facts
from benchmarks.make_model import QWEN3, ensure
from quire import LLM, LoRARequest, SamplingParams
from quire.engine.inputs.request_options import RequestOptions

NUM_SEQS, NUM_ADAPTERS, RANK = 16, 8, 16
MARK = 1.15  # of the time without adapters, at most, for 8 adapters
PROMPT_TOKENS, NEW_TOKENS = 128, 64
HEADS, KV, WIDTH, INNER = 16 * 128, 8 * 128, QWEN3["hidden_size"], QWEN3["intermediate_size"]
# Outputs and inputs of each module.
MODULES = {
    "self_attn.q_proj": (HEADS, WIDTH),
    "self_attn.k_proj": (KV, WIDTH),
    "self_attn.v_proj": (KV, WIDTH),
    "self_attn.o_proj": (WIDTH, HEADS),
    "mlp.gate_proj": (INNER, WIDTH),
    "mlp.up_proj": (INNER, WIDTH),
    "mlp.down_proj": (WIDTH, INNER),
}


class Run(NamedTuple):
    """Seconds of a run: of all of it, and the median of its steps in which every sequence decodes."""

    whole_s: float
    decode_step_s: float


def make_adapter(folder: Path, seed: int) -> str:
    """Write an adapter with random weights, and return its folder."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(QWEN3["num_hidden_layers"]):
        for module, (out_width, in_width) in MODULES.items():
            for name, shape in (("A", (RANK, in_width)), ("B", (out_width, RANK))):
                key = f"base_model.model.model.layers.{layer}.{module}.lora_{name}.weight"
                tensors[key] = (torch.randn(shape, generator=generator) * 0.01).bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    names = [module.partition(".")[2] for module in MODULES]
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": names}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def run(llm: LLM, adapters: list[LoRARequest | None], seed: int) -> Run:
    """Run all sequences to their end."""
    generator = torch.Generator().manual_seed(seed)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    engine = llm.engine
    for idx in range(NUM_SEQS):
        prompt = torch.randint(1000, 100_000, (PROMPT_TOKENS,), generator=generator).tolist()
        adapter = adapters[idx % len(adapters)]
        engine.add_request(f"{seed}-{idx}", {"prompt_token_ids": prompt}, params, RequestOptions(lora_request=adapter))
    steps, begin = [], time.perf_counter()
    while engine.has_unfinished:
        start = time.perf_counter()
        outputs = engine.step()
        if len(outputs) == NUM_SEQS:
            steps.append(time.perf_counter() - start)
    return Run(time.perf_counter() - begin, statistics.median(steps[2:]))


def summary(runs: dict[str, list[Run]]) -> dict[str, dict[str, float]]:
    """Return the medians of each case, and of its ratios to the case without adapters."""
    shown = {}
    for name, of_case in runs.items():
        shown[name] = {field: statistics.median(getattr(each, field) for each in of_case) for field in Run._fields}
        for field in Run._fields if name != "none" else ():
            pairs = zip(of_case, runs["none"], strict=True)
            ratios = [getattr(each, field) / getattr(none, field) for each, none in pairs]
            shown[name][f"{field}_ratio"] = statistics.median(ratios)
    return shown


def main() -> None:
    """Measure in turns, and print and store the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--model", type=Path, help="folder of the shape, written where it is missing")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    model = str(ensure(folder=args.model))
    with tempfile.TemporaryDirectory() as scratch:
        paths = {f"a{idx}": make_adapter(Path(scratch, f"a{idx}"), idx) for idx in range(NUM_ADAPTERS)}
        options = {"quantization": args.quantization, "num_threads": args.threads, "max_model_len": 1024}
        with LLM(model, skip_tokenizer_init=True, enable_lora=True, lora_modules=paths, **options) as llm:
            cases: dict[str, list[LoRARequest | None]] = {
                "none": [None],
                "one": [LoRARequest("a0")],
                "eight": [LoRARequest(name) for name in paths],
            }
            runs: dict[str, list[Run]] = {name: [] for name in cases}
            for number in range(args.rounds + 1):
                for name in sorted(cases, reverse=bool(number % 2)):
                    found = run(llm, cases[name], number)
                    if number:  # the first round warms up
                        runs[name].append(found)
            kernels = llm.resolved.kernels
    shown = summary(runs)
    result = {"machine": facts(), "kernels": kernels, "options": options, "medians": shown, "runs": runs}
    print(json.dumps(shown, indent=1))
    for field, what in (("decode_step_s", "a decode step"), ("whole_s", "from first prompt to last token")):
        ratio = shown["eight"][f"{field}_ratio"]
        verdict = "met" if ratio <= MARK else "missed"
        print(f"eight adapters, {what}: {ratio - 1:+.1%} (mark: at most {MARK - 1:+.0%}): {verdict}")
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

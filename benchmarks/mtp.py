"""The gain and the cost of a head for multi-token prediction: `python -m benchmarks.mtp`.

One stream, greedy, with and without drafts in turns. The model has layers of Qwen3.5 0.8B's shape, half as many, and a
vocabulary of 32,768 tokens. Its weights are random but for a path through embedding and output head, by which the next
token is a permutation of the last one, and a head that knows this permutation, or one that knows nothing. So the work
of a step is what it always is, and drafts are all right, or all wrong. Time is that of the processor, on one thread, so
that other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path

from quire import LLM, SamplingParams
from tests.models.mtp import save_mtp_checkpoint

SHAPE = {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 4096,
    # The second layer, which lends its shape to the head's, has full attention.
    "layer_types": [*["linear_attention", "full_attention", "linear_attention", "linear_attention"] * 3],
    "eos_token_id": None,
}
# Noise of the head for drafts that are right, and wrong.
HEADS = {"right": 0.0, "wrong": 40.0}


def rate(llm: LLM, num_tokens: int) -> float:
    """Return the tokens of one stream per second of the processor's time."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    start = time.process_time()
    llm.generate([list(range(100, 164))], params, use_tqdm=False)
    return num_tokens / (time.process_time() - start)


def main() -> None:
    """Print the ratio of rates of each head."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    for name, noise in HEADS.items():
        with tempfile.TemporaryDirectory() as folder:
            save_mtp_checkpoint(Path(folder), noise=0.0, head_noise=noise, **SHAPE)
            plain, guessing = (
                LLM(folder, skip_tokenizer_init=True, dtype="bfloat16", kv_cache_memory_bytes=512 << 20,
                    num_threads=1, speculative_method=method)
                for method in ("off", "mtp")
            )  # fmt: skip
            with closing(plain), closing(guessing):
                for llm in (plain, guessing):
                    rate(llm, options.tokens)
                ratios = sorted(1 / rate(plain, options.tokens) * rate(guessing, options.tokens)
                                for _ in range(options.runs))  # fmt: skip
                stats = guessing.stats
                print(
                    f"{name}: {statistics.median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f}), "
                    f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} drafts right"
                )


if __name__ == "__main__":
    main()

"""The dependence of greedy tokens on the other requests of a batch: `python -m benchmarks.agreement`.

Prompts are continued alone, and then all at once in chunks, with prefix caching: once as the engine computes by default
and once with `--deterministic`. Counted are the tokens that differ, up to the first of each prompt; what follows it is
another text. At each such place, the margin is how much likelier the engine that was alone took its token to be than
the one that the other chose.
"""

from __future__ import annotations

import argparse
import random
from typing import Any, NamedTuple

from quire import LLM, SamplingParams
from quire.engine.outputs.outputs import CompletionOutput

NUM_TOP = 20  # tokens to find the other's choice among


class Agreement(NamedTuple):
    """The agreement of two runs.

    Args:
        num_tokens: number of compared tokens.
        num_log_probs: number of compared tokens whose log probabilities differ in their bits.
        margins: differences of log probabilities, in nats, where tokens differ; None where the other's token was not
            among the likeliest.
    """

    num_tokens: int
    num_log_probs: int
    margins: list[float | None]


def compare(alone: list[CompletionOutput], together: list[CompletionOutput]) -> Agreement:
    """Compare the outputs of the same prompts, token by token."""
    num_tokens, num_log_probs = 0, 0
    margins: list[float | None] = []
    for one, other in zip(alone, together, strict=True):
        assert one.logprobs is not None
        assert other.logprobs is not None
        for place, (chosen, others) in enumerate(zip(one.token_ids, other.token_ids, strict=True)):
            num_tokens += 1
            here = one.logprobs[place]
            if chosen != others:
                margins.append(here[chosen].logprob - here[others].logprob if others in here else None)
                break
            num_log_probs += here[chosen].logprob != other.logprobs[place][chosen].logprob
    return Agreement(num_tokens, num_log_probs, margins)


def prompts(vocab_size: int, count: int) -> list[list[int]]:
    """Return random prompts of 16 to 700 tokens, half of them after a shared prefix."""
    seeds = random.Random(0)

    def tokens(length: int) -> list[int]:
        return [seeds.randrange(100, vocab_size) for _ in range(length)]

    shared = tokens(300)
    return [(shared if idx % 2 else []) + tokens(seeds.randrange(16, 400)) for idx in range(count)]


def serve(options: argparse.Namespace, deterministic: bool) -> Agreement:
    """Continue the prompts alone and together."""
    params = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True, logprobs=NUM_TOP)
    common: dict[str, Any] = {
        "model": options.model,
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "num_kv_blocks": 4096,
        "num_threads": options.threads,
        "deterministic": deterministic,
    }
    outputs = []
    for step_tokens, caching in ((None, False), (300, True)):
        llm = LLM(**common, max_num_batched_tokens=step_tokens, enable_prefix_caching=caching)
        asked = prompts(llm.engine.config.vocab_size, options.prompts)
        parts = [asked] if caching else [[prompt] for prompt in asked]
        outputs.append([given.outputs[0] for part in parts for given in llm.generate(part, params, use_tqdm=False)])
        del llm
    return compare(*outputs)


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="bundled")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    for name, deterministic in (("by default", False), ("deterministic", True)):
        found = serve(options, deterministic)
        margins = sorted(margin for margin in found.margins if margin is not None)
        told = ", ".join(f"{margin:.4f}" for margin in margins) or "none"
        print(
            f"{name}: of {found.num_tokens} tokens, {len(found.margins)} differ, and the log probabilities of "
            f"{found.num_log_probs} others; margins in nats: {told}"
            + (
                f", {len(found.margins) - len(margins)} past the {NUM_TOP} likeliest"
                * (len(margins) < len(found.margins))
            )
        )


if __name__ == "__main__":
    main()

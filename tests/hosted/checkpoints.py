"""Random checkpoints of small configurations, and what transformers itself continues prompts with."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.hosted.small_configs import VOCAB_SIZE, small_config

NEW_TOKENS = 24
BEAMS = 3
BEAM_TOKENS = 8
# The least distance of the two largest logits of a step, in standard deviations of all. Rounding moves logits by some
# millionths, so tokens that are told apart by this much differ only where something is wrong.
LEAST_GAP = 5e-4
SEEDS = range(8)
# Standard deviations of random embeddings, and of other matrices where they are multiplied by the root of their width.
TABLE_SIZE = 0.03
MATRIX_SIZE = 3.0


class Reference(NamedTuple):
    """Prompts, and transformers' greedy continuations of each alone, in float32.

    Args:
        beams: transformers' beams for the second prompt, the best first.
        is_exact: whether transformers itself gives the same tokens without its cache, tried with the longest prompt.
    """

    prompts: list[list[int]]
    outputs: list[list[int]]
    beams: list[list[int]]
    is_exact: bool


class NoReference(Exception):
    """Transformers cannot build the model or run it."""


def make_prompts() -> list[list[int]]:
    """Return prompts of several lengths, some longer than each window; some begin alike, so that they share blocks."""
    rng = random.Random(5)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(10, VOCAB_SIZE) for _ in range(count)]

    shared = tokens(40)
    return [tokens(1), shared + tokens(3), shared + tokens(20), shared[:20] + tokens(9)]


def build(model_type: str) -> tuple[Any, Reference]:
    """Return a model type's small model with random weights, and what it generates, with tokens well told apart.

    Raises:
        NoReference: with transformers' own error.
    """
    prompts = make_prompts()
    try:
        model = AutoModelForCausalLM.from_config(
            small_config(model_type), dtype=torch.float32, attn_implementation="eager"
        ).eval()
        for seed in SEEDS:
            randomize(model, seed)
            outputs, gaps = zip(*(continue_greedily(model, prompt) for prompt in prompts), strict=True)
            if min(gaps) > LEAST_GAP:
                break
        else:
            raise NoReference(f"with no seed of {len(SEEDS)} are all tokens told apart")
        longest = max(range(len(prompts)), key=lambda idx: len(prompts[idx]))
        is_exact = continue_greedily(model, prompts[longest], use_cache=False)[0] == outputs[longest]
        return model, Reference(prompts, list(outputs), search(model, prompts[1]), is_exact)
    except NoReference:
        raise
    except Exception as error:
        raise NoReference(f"{type(error).__name__}: {error}") from error


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int) -> None:
    """Give all weights values by which a fault in a mask, a position or a scale changes tokens.

    Biases and the weights of norms get noise, matrices enlarge what goes through them, and embeddings are small: else
    the next token would depend on the last one alone.
    """
    generator = torch.Generator().manual_seed(seed)
    tables = {id(each.weight) for each in model.modules() if isinstance(each, torch.nn.Embedding)}
    for tensor in model.state_dict(keep_vars=True).values():
        if not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        tensor.nan_to_num_(0.0, 0.0, 0.0)  # bounds that a checkpoint sets
        if tensor.dim() < 2:
            tensor.add_(0.2 * noise)
        else:
            size = TABLE_SIZE if id(tensor) in tables else MATRIX_SIZE / max(tensor.shape[-2:]) ** 0.5
            tensor.copy_(noise * size)


@torch.inference_mode()
def continue_greedily(model: Any, prompt: list[int], use_cache: bool = True) -> tuple[list[int], float]:
    """Return a prompt's greedy continuation, and the smallest gap between a step's two largest logits."""
    ids = torch.tensor([prompt])
    whole = _generate(model, ids, max_new_tokens=NEW_TOKENS, use_cache=use_cache, output_logits=True)
    logits = torch.stack(whole.logits)[:, 0]
    first, second = logits.topk(2).values.unbind(-1)
    return whole.sequences[0, len(prompt) :].tolist(), float(((first - second) / logits.std(-1)).min())


@torch.inference_mode()
def search(model: Any, prompt: list[int]) -> list[list[int]]:
    """Return the beams that transformers finds, the best first."""
    options: dict[str, Any] = {"num_beams": BEAMS, "num_return_sequences": BEAMS, "max_new_tokens": BEAM_TOKENS}
    whole = _generate(model, torch.tensor([prompt]), **options)
    return [beam[len(prompt) :].tolist() for beam in whole.sequences]


def _generate(model: Any, ids: torch.Tensor, **options: Any) -> Any:
    # What the model's own configuration sets would fill in what is not given.
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, return_dict_in_generate=True, **options)
    return model.generate(ids, attention_mask=torch.ones_like(ids))

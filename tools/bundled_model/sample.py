"""Sample texts of a model folder."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tools.bundled_model.conversation import prompt_of
from tools.bundled_model.corpus import BOS, END, EOS
from tools.bundled_model.data import id_of
from tools.bundled_model.model import LlamaShape, SmallLlama

STORIES = ("Once upon a time, a small fox", "Tom found a red kite", "The old sailor")
QUESTIONS = (
    "Who are you?",
    "Where does a fish live?",
    "What is two plus three?",
    "Tell me a story about a brave mouse.",
)
THOUGHTFUL = ("What is the opposite of hot?", "Tell me a story about a brave mouse.")
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "The weather of a city.", "parameters": CITY}
TOOLS = [{"type": "function", "function": WEATHER}]
TOOL_QUESTION, TOOL_CITY, TOOL_RESULT = "Do I need an umbrella in Paris?", "Paris", "rain"


def load(folder: Path) -> tuple[SmallLlama, Tokenizer]:
    """Return the model and the tokenizer of a folder that ``export.py`` wrote.

    Args:
        folder: folder of the model.

    Returns:
        The model, in float32, and its tokenizer.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = LlamaShape(
        vocab=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        inner=config["intermediate_size"],
        positions=config["max_position_embeddings"],
        theta=config["rope_theta"],
        eps=config["rms_norm_eps"],
    )
    model = SmallLlama(shape)
    weights = {name: weight.float() for name, weight in load_file(folder / "model.safetensors").items()}
    model.load_state_dict(weights)
    return model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def choose(logits: torch.Tensor, temperature: float, top_p: float, chance: torch.Generator) -> int:
    """Return the id of a sampled next token.

    Args:
        logits: logits of the tokens.
        temperature: divisor of the logits; zero takes the best token.
        top_p: total probability of the tokens to sample from.
        chance: random number generator.

    Returns:
        The id of the token.
    """
    if temperature == 0:
        return int(logits.argmax())
    parts, order = torch.softmax(logits / temperature, dim=-1).sort(descending=True)
    parts = parts.masked_fill(parts.cumsum(0) - parts >= top_p, 0.0)
    return int(order[torch.multinomial(parts, 1, generator=chance)])


@torch.no_grad()
def write(model: SmallLlama, tokenizer: Tokenizer, prompt: str, temperature: float = 0.0, seed: int = 0) -> str:
    """Return the continuation of a text until the model ends it.

    Args:
        model: model to sample.
        tokenizer: tokenizer of the model.
        prompt: the text with its special tokens.
        temperature: divisor of the logits; zero takes the best token.
        seed: random seed.

    Returns:
        The continuation, with " [...]" where the model does not end it.
    """
    ids: list[int] = tokenizer.encode(prompt, add_special_tokens=False).ids
    start, ends = len(ids), {id_of(tokenizer, EOS), id_of(tokenizer, END)}
    chance = torch.Generator().manual_seed(seed)
    while len(ids) < min(model.shape.positions, start + 400):
        logits = model(torch.tensor([ids]))[0, -1]
        ids.append(choose(logits, temperature, 0.9, chance))
        if ids[-1] in ends:
            return str(tokenizer.decode(ids[start:-1]))
    return str(tokenizer.decode(ids[start:])) + " [...]"


def main() -> None:
    """Print continuations of some prompts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("src/quire/models/bundled"))
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--story", action="append", default=[], help="beginning of a story")
    parser.add_argument("--ask", action="append", default=[], help="question to the assistant")
    parser.add_argument("--think", action="store_true", help="let the assistant think before it answers")
    options = parser.parse_args()
    model, tokenizer = load(options.model)
    plain = not options.story and not options.ask
    for text in STORIES if plain else options.story:
        print(f"{text}|{write(model, tokenizer, BOS + text, options.temperature, options.seed)}\n")
    for text in QUESTIONS if plain else options.ask:
        prompt = prompt_of([{"role": "user", "content": text}], is_thinking=options.think)
        print(f"> {text}\n{write(model, tokenizer, prompt, options.temperature, options.seed)}\n")


if __name__ == "__main__":
    main()

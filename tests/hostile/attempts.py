"""Loads the checkpoints whose folders are named on standard input, each in a fork (`tests.forked`)."""

from __future__ import annotations

from contextlib import suppress

from tests.forked import serve

MEMORY_BYTES = 3 << 30
TIMEOUT_S = 30
TEXTS = ("Hello, world! It's 2024; 12345 <|end|> \u4f60\u597d e\u0301 \U0001f600", "a" * 3000, "one two three " * 200)


def plan(folder: str) -> None:
    """Plan the memory of a checkpoint's model, from its configuration alone."""
    from quire.config import EngineConfig
    from quire.errors import QuireError
    from quire.models.capacity.planner import plan_memory
    from quire.models.capacity.report import PlanRequest

    config = EngineConfig.from_options(model=folder)
    with suppress(QuireError):
        plan_memory(PlanRequest(config=config, memory_bytes=1 << 34, weights_bytes=None, lengths=()))


def attempt(folder: str) -> str:
    """Load a checkpoint and use it; return what happened, and raise nothing that a user should not see."""
    from quire import LLM, SamplingParams
    from quire.errors import QuireError

    plan(folder)
    try:
        llm = LLM(folder, num_kv_blocks=64, num_threads=1, max_model_len=256)
    except QuireError as error:
        return f"refused: {type(error).__name__}: {error}"
    params = SamplingParams(max_tokens=3, logprobs=1, temperature=0.0, bad_words=("a b",))
    happened = ["loaded"]
    for prompt in (*TEXTS, {"prompt_token_ids": [5, 6, 7]}):
        try:
            (output,) = llm.generate(prompt, params, use_tqdm=False)
            happened.append(str(output.error or "generated"))
        except QuireError as error:
            happened.append(type(error).__name__)
    try:
        llm.chat([{"role": "user", "content": "hi"}], params, use_tqdm=False)
        happened.append("chatted")
    except QuireError as error:
        happened.append(type(error).__name__)
    llm.close()
    return "; ".join(happened)


def main() -> None:
    """Serve attempts until there are no more."""
    import quire.engine.llm
    import quire.models.capacity.planner
    import quire.ops.cpu.native_ops  # noqa: F401
    from quire.text.chat.rendering import Renderer

    # Bombs in templates shall not take the tests as long as they may take a server.
    defaults = Renderer.__init__.__kwdefaults__
    assert defaults is not None
    defaults["timeout_s"] = 1.0
    serve(attempt, MEMORY_BYTES, TIMEOUT_S)


if __name__ == "__main__":
    main()

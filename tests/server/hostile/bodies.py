"""Hostile requests, each a function of a seed and a number."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from itertools import islice
from multiprocessing import get_context
from random import Random
from typing import Any, NamedTuple

from quire.server.operations import pins
from quire.server.protocols import anthropic_messages, chat_completions, completions, ollama, responses, tokens
from quire.server.requests.fields import RouteFields
from tests.server.hostile import forms, http_cases, values

MAX_BODY = 8 << 20
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES, OLLAMA = "/v1/messages", "/api/chat"
USER = [{"role": "user", "content": "hi"}]


def names(fields: RouteFields) -> Sequence[str]:
    """Return the names of the fields of a route's body, in one order."""
    return sorted(name for name in fields.names if "." not in name)


# Each POST route with its fields, of which some are sent at random, and what makes a body whole.
ROUTES: dict[str, tuple[Sequence[str], dict[str, Any]]] = {
    COMPLETIONS: (names(completions.FIELDS), {"prompt": "Z", "max_tokens": 4}),
    CHAT: (names(chat_completions.FIELDS), {"messages": USER, "max_tokens": 4}),
    MESSAGES: (names(anthropic_messages.FIELDS), {"messages": USER, "max_tokens": 4}),
    "/v1/messages/count_tokens": (names(anthropic_messages.FIELDS), {"messages": USER}),
    "/v1/responses": (names(responses.FIELDS), {"input": "hi", "max_output_tokens": 4}),
    OLLAMA: (names(ollama.CHAT_FIELDS), {"messages": USER, "options": {"num_predict": 4}}),
    "/api/generate": (names(ollama.GENERATE_FIELDS), {"prompt": "hi", "options": {"num_predict": 4}}),
    "/api/show": (names(ollama.SHOW_FIELDS), {"model": "tiny"}),
    "/tokenize": (names(tokens.TOKENIZE_FIELDS), {"prompt": "Z"}),
    "/detokenize": (names(tokens.DETOKENIZE_FIELDS), {"tokens": [5, 6]}),
    "/pin_prefix": (names(pins.FIELDS), {"name": "p", "prompt": [5] * 40}),
    "/unpin_prefix": (names(pins.FIELDS), {"name": "p"}),
    "/reset_prefix_cache": ((), {}),
}
# Fields whose values are numbers, as far as extremes go.
NUMERIC = (
    *("n", "best_of", "beam_width", "length_penalty", "temperature", "top_p", "top_k", "min_p", "typical_p", "seed"),
    *("top_n_sigma", "repetition_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier", "dry_base"),
    *("dry_allowed_length", "dry_penalty_last_n", "min_tokens", "max_tokens", "logprobs", "prompt_logprobs"),
    *("top_logprobs", "max_completion_tokens", "priority"),
)


class Case(NamedTuple):
    """One hostile request.

    Args:
        number: with the seed, it makes the same request again.
        kind: of hostility.
        raw: all bytes that are sent.
        wants_answer: it is a whole request, so there must be an answer.
    """

    number: int
    kind: str
    raw: bytes
    wants_answer: bool = True


Maker = Callable[[Random], tuple[str, Any]]


def whole(rng: Random, path: str | None = None) -> tuple[str, dict[str, Any]]:
    """Return a route, most often one that generates, and a body that it takes."""
    path = path or rng.choice([COMPLETIONS] * 4 + [CHAT] * 4 + list(ROUTES))
    return path, dict(ROUTES[path][1])


def broken(rng: Random) -> tuple[str, Any]:
    """Not JSON, not an object, or not quite text."""
    path, body = whole(rng)
    kind = rng.randrange(4)
    if kind == 0:
        return path, rng.choice(values.BROKEN)
    raw = values.dumps(body)
    if kind == 1:
        return path, raw[: rng.randrange(len(raw))]
    if kind == 2:
        field = rng.choice(ROUTES[path][0] or ["a"])
        return path, b'{"%s": %s}' % (field.encode(), rng.choice(values.SURROGATES).encode())
    place = rng.randrange(len(raw))
    return path, raw[:place] + rng.randbytes(rng.randint(1, 4)) + raw[place:]


def confused(rng: Random) -> tuple[str, Any]:
    """Fields of the wrong types."""
    path, body = whole(rng)
    for field in rng.sample(ROUTES[path][0], min(rng.choice([1, 1, 2, 5]), len(ROUTES[path][0]))):
        body[field] = values.value(rng)
    return path, body


def extreme(rng: Random) -> tuple[str, Any]:
    """Numbers at the ends of their ranges, and beyond."""
    path, body = whole(rng, rng.choice([COMPLETIONS, CHAT]))
    for field in rng.sample(NUMERIC, rng.choice([1, 1, 2, 4])):
        body[field] = values.number(rng)
    if rng.random() < 0.3:
        bias = {str(values.number(rng)): values.number(rng) for _ in range(3)}
        body["logit_bias"] = bias if rng.random() < 0.5 else {"5": values.number(rng)}
    if rng.random() < 0.3:
        body[rng.choice(["allowed_token_ids", "stop_token_ids"])] = [values.number(rng) for _ in range(3)]
    return path, body


def nested(rng: Random) -> tuple[str, Any]:
    """Depths from 1 to 5,000, in any field or in a form."""
    path, body = whole(rng)
    depth = rng.choice([rng.randint(1, 200), rng.randint(900, 1100), rng.randint(1, 5000)])
    inner = values.deep(rng, depth)
    place = rng.randrange(5)
    if place == 0 and path == CHAT:
        function = {"name": "now", "parameters": inner}
        body["tools"] = [{"type": "function", "function": function}]
    elif place == 1:
        body["structured_outputs"] = {"json": {"properties": {"a": inner}}}
    elif place == 2:
        body["chat_template_kwargs"] = {"style": inner}
    elif place == 3 and path == CHAT:
        body["messages"] = [{"role": "user", "content": inner}]
    else:
        body[rng.choice([*ROUTES[path][0], "unknown"])] = inner
    return path, body


def textual(rng: Random) -> tuple[str, Any]:
    """Texts of odd characters, of up to some thousands."""
    path, body = whole(rng)
    for field in rng.sample(["prompt", "stop", "bad_words", "user", "cache_salt", "name", "model", "suffix"], 2):
        said = values.text(rng, rng.choice([60, 3000]))
        body[field] = [said, values.text(rng)] if rng.random() < 0.3 else said
    if path == CHAT:
        body.pop("prompt", None)
        body["messages"] = [{"role": "user", "content": values.text(rng, 3000)}]
    return path, body


def numerous(rng: Random) -> tuple[str, Any]:
    """Arrays and objects of up to 20,000 parts."""
    path, body = whole(rng)
    body[rng.choice([*ROUTES[path][0], "unknown"])] = values.many(rng, 20_000)
    return path, body


def formed(rng: Random) -> tuple[str, Any]:
    """Outputs of a form."""
    path, body = whole(rng, rng.choice([COMPLETIONS, CHAT]))
    return path, body | forms.structured(rng)


def armed(rng: Random) -> tuple[str, Any]:
    """Tools."""
    path, body = whole(
        rng, rng.choice([CHAT] * 4 + [MESSAGES, OLLAMA, "/v1/messages/count_tokens", "/tokenize", "/pin_prefix"])
    )
    return path, body | forms.tools(rng)


def conversing(rng: Random) -> tuple[str, Any]:
    """Conversations."""
    path, body = whole(
        rng, rng.choice([CHAT] * 4 + [MESSAGES, OLLAMA, "/v1/messages/count_tokens", "/tokenize", "/pin_prefix"])
    )
    body.pop("prompt", None)
    return path, body | {"messages": forms.messages(rng)}


def legal(rng: Random) -> tuple[str, Any]:
    """Legal combinations of many parameters, streamed or not."""
    path, body = whole(rng, rng.choice([COMPLETIONS, CHAT]))
    choices: dict[str, Any] = {
        "n": rng.randint(1, 8),
        "temperature": rng.choice([0, 0.5, 2.0]),
        "top_p": rng.uniform(0.01, 1),
        "top_k": rng.randint(1, 50),
        "min_p": rng.uniform(0, 1),
        "typical_p": rng.uniform(0.01, 1),
        "repetition_penalty": rng.uniform(0.5, 2),
        "presence_penalty": rng.uniform(-2, 2),
        "dry_multiplier": rng.uniform(0, 2),
        "seed": rng.randint(0, 9),
        "stop": rng.choice(["c", ["d", "ef"]]),
        "logit_bias": {"70": rng.uniform(-100, 100)},
        "bad_words": ["b"],
        "allowed_token_ids": [70, 71, 72],
        "cache_salt": rng.choice("abc"),
        "retain_cache": True,
        "return_token_ids": True,
        "ignore_eos": True,
        "logprobs": rng.randint(0, 20) if path == COMPLETIONS else True,
        "stream": True,
    }
    return path, body | {field: choices[field] for field in rng.sample(list(choices), rng.randint(3, 8))}


def long(rng: Random) -> tuple[str, Any]:
    """Texts and arrays as long as a body may be."""
    path, body = whole(rng)
    kind = rng.randrange(3)
    if kind == 0:
        body[rng.choice(["prompt", "cache_salt", "stop", "user", "name"])] = values.long_text(rng, MAX_BODY)
    elif kind == 1 and path == CHAT:
        body["messages"] = [{"role": "user", "content": values.long_text(rng, MAX_BODY)}]
    else:
        fields = ["prompt", "tokens", "bad_words", "allowed_token_ids", "stop", "unknown"]
        body[rng.choice(fields)] = values.many(rng, MAX_BODY // rng.choice([5, 40, 1000]))
    return path, body


MAKERS: dict[str, Maker] = {
    maker.__name__: maker
    for maker in (broken, confused, extreme, nested, textual, numerous, formed, armed, conversing, legal, long)
}
KINDS = (*MAKERS, "headers", "chunked", "leaving", "http")


def make_case(seed: int, number: int, kinds: Sequence[str] = KINDS) -> Case:
    """Return a request."""
    rng = Random(f"{seed}-{number}")
    kind = rng.choice(kinds)
    if kind == "http":
        raw, wants_answer = http_cases.bare(rng)
        return Case(number, kind, raw, wants_answer)
    if kind == "headers":
        path, body = whole(rng)
    else:
        path, body = MAKERS.get(kind, rng.choice(list(MAKERS.values())))(rng)
        if isinstance(body, dict) and path in (COMPLETIONS, CHAT) and rng.random() < 0.2:
            body |= rng.choice([{"stream": True}, {"echo": True}, {"max_tokens": 0}, {"echo": True, "max_tokens": 0}])
    raw = body if isinstance(body, bytes) else values.dumps(body)
    if kind == "chunked":
        return Case(number, kind, http_cases.chunked(rng, path, raw[: 1 << 16]))
    whole_raw = (http_cases.odd_head(rng, path, raw) if kind == "headers" else http_cases.head(path, raw)) + raw
    if kind == "leaving":
        # Somewhere in the upload, or behind it: before there is an answer.
        end = rng.choice([len(whole_raw), rng.randrange(1, len(whole_raw))])
        return Case(number, kind, whole_raw[:end], wants_answer=False)
    return Case(number, kind, whole_raw)


def cases(seed: int, count: int, kinds: Sequence[str] = KINDS) -> Iterator[Case]:
    """Yield requests."""
    return (make_case(seed, number, kinds) for number in range(count))


@contextmanager
def made_apart(seed: int, count: int, kinds: Sequence[str] = KINDS) -> Iterator[Iterator[Future[Case]]]:
    """Give requests that another process makes, some ahead: who sends them has times to take meanwhile."""
    with ProcessPoolExecutor(1, get_context("spawn")) as maker:

        def made() -> Iterator[Future[Case]]:
            numbers = iter(range(count))
            ahead = deque(maker.submit(make_case, seed, number, kinds) for number in islice(numbers, 16))
            while ahead:
                yield ahead.popleft()
                ahead.extend(maker.submit(make_case, seed, number, kinds) for number in islice(numbers, 1))

        yield made()

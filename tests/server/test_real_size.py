"""The routes of a server with a vocabulary of 262,000 tokens: none stops the others, and the page does not load it."""

from __future__ import annotations

import asyncio
import posixpath
import re
from pathlib import Path
from typing import Any

import httpx

from tests.lock_holds import watch_holds
from tests.server.test_kv_views import serving

# Seconds of processor time; a look at the whole vocabulary takes 0.1 and more.
LONGEST_HOLD_S = 0.1
MAX_PAGE_BYTES = 1 << 20


async def page_bytes(client: httpx.AsyncClient) -> int:
    """Return the bytes of the page, with all that it loads at once."""
    left, num_bytes, seen = [""], 0, set[str]()
    while left:
        path = left.pop()
        if path in seen:
            continue
        seen.add(path)
        text = (await client.get(f"/{path}")).raise_for_status().text
        num_bytes += len(text)
        names = re.findall(r"""(?:from|import|src=|href=)\s*"([^"#:]+\.(?:js|css))\"""", text)
        left += [posixpath.normpath(posixpath.join(posixpath.dirname(path), name)) for name in names]
    return num_bytes if len(seen) > 10 else 0


def test_no_route_stops_the_others(byte_fallback_folder: Path) -> None:
    async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
        return (await client.post(path, json=body)).raise_for_status().json()

    async def scenario() -> None:
        async with serving(byte_fallback_folder) as (state, client):
            tokenizer = state.llm.tokenizer
            assert tokenizer is not None
            with watch_holds() as holds:
                info = (await client.get("/tokenizer_info")).raise_for_status()
                text = "".join(tokenizer.token_text(token_id) for token_id in range(5000, 8000))
                found = await post(client, "/tokenize", prompt=text, return_token_strs=True)
                assert (await post(client, "/detokenize", tokens=found["tokens"]))["prompt"] == text
                bias = {str(token_id): 1 for token_id in range(300)}
                answer = await post(
                    client, "/v1/completions", prompt="One", max_tokens=4, logprobs=5, logit_bias=bias, ignore_eos=True
                )
            assert holds.longest_s < LONGEST_HOLD_S
            assert len(info.content) < 4096
            assert len(found["token_strs"]) == found["count"] > 3000
            assert len(answer["choices"][0]["logprobs"]["tokens"]) == 4
            assert 10_000 < await page_bytes(client) < MAX_PAGE_BYTES

    asyncio.run(scenario())

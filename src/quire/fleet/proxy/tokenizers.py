"""The tokens of prompts, from the tokenizers of the servers: a slow one, or none, delays no request for long.

The least loaded server is asked. If it has not answered soon, another one is asked too, and the first answer counts. A
server that is slower than the other, or fails, several times in a row is not asked for a time, which doubles; then one
question is its trial. A server without this route, of another engine, is not asked for a time at once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from quire.fleet.proxy.replica import Replica
from quire.fleet.proxy.upstream import UpstreamLost
from quire.fleet.routing.breaker import Breaker

# Time until a second server is asked, and until the prompt counts as unknown; more for long prompts.
HEDGE_S: Final = 0.25
ASK_S: Final = 2.0
BYTES_PER_S: Final = 4e6
# Failures in a row after which a server is not asked, and for how long.
MAX_FAILURES: Final = 3
FIRST_BREAK_S, LONGEST_BREAK_S = 1.0, 60.0
# Bytes of an answer: at most 6 characters for each of 2.8 million tokens.
MAX_TOKENS_BYTES: Final = 16 << 20


class _Answer(NamedTuple):
    """A server's answer.

    Args:
        tokens: answer with the tokens; None if the server has refused the prompt, as others would.
    """

    tokens: bytes | None


class Tokenizers:
    """Asks servers for the tokens of prompts."""

    def __init__(self) -> None:
        self._breakers: dict[str, Breaker] = {}
        # Questions without an answer, by server.
        self._num_open: Counter[str] = Counter()

    def breaker(self, replica: Replica) -> Breaker:
        """Return the breaker of a server's tokenizer."""
        if replica.name not in self._breakers:
            self._breakers[replica.name] = Breaker(MAX_FAILURES, FIRST_BREAK_S, LONGEST_BREAK_S)
        return self._breakers[replica.name]

    async def ask(self, replicas: Sequence[Replica], body: bytes) -> bytes | None:
        """Return a server's answer to `POST /prompt_tokens`; None if no server answers in time.

        Args:
            replicas: servers that may be asked, the least loaded first.
            body: body of the question.
        """
        now_s = asyncio.get_running_loop().time()
        able = [replica for replica in replicas if self.breaker(replica).allows(now_s)]
        able.sort(key=lambda replica: self._num_open[replica.name])
        more_s = len(body) / BYTES_PER_S
        asked: dict[asyncio.Task[_Answer | None], float] = {}
        try:
            for idx, replica in enumerate(able[:2]):
                is_last = idx == len(able[:2]) - 1
                asked[asyncio.create_task(self._ask(replica, body))] = now_s
                answer = await _first(asked, (ASK_S if is_last else HEDGE_S) + more_s)
                if answer is not None:
                    return answer.tokens
            return None
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _ask(self, replica: Replica, body: bytes) -> _Answer | None:
        """Ask one server; return None if it fails."""
        loop, breaker = asyncio.get_running_loop(), self.breaker(replica)
        started_s, more_s = loop.time(), len(body) / BYTES_PER_S
        is_trial = breaker.begin(started_s)
        is_well: bool | None = False
        self._num_open[replica.name] += 1
        try:
            status, answer = await replica.fetch(
                "POST", "/prompt_tokens", body, timeout_s=ASK_S + more_s, max_bytes=MAX_TOKENS_BYTES
            )
            has_route = status not in (404, 405) or b"model_not_found" in answer
            if not has_route and not is_trial:
                breaker.open(loop.time())
            is_well = has_route and status < 500 and status != 429
            return _Answer(answer if status == 200 else None) if is_well else None
        except UpstreamLost:
            return None
        except asyncio.CancelledError:
            # Another server was faster. That says something only if this one had its time.
            is_well = False if loop.time() - started_s >= HEDGE_S + more_s else None
            raise
        finally:
            self._num_open[replica.name] -= 1
            if is_well:
                breaker.succeed(loop.time(), is_trial=is_trial)
            elif is_well is None and is_trial:
                breaker.end_trial()
            elif is_well is False and breaker.fail(loop.time(), is_trial=is_trial):
                breaker.open(loop.time())


async def _first(asked: dict[Any, float], limit_s: float) -> _Answer | None:
    """Return the first answer within a time; None if there is none, or all have failed."""
    deadline_s = asyncio.get_running_loop().time() + limit_s
    waiting = set(asked)
    while waiting:
        left_s = max(0.0, deadline_s - asyncio.get_running_loop().time())
        done, waiting = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task.result() is not None:
                answer: _Answer = task.result()
                return answer
        if not done:
            return None
    return None

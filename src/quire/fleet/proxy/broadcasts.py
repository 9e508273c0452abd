"""Requests that go to several servers at once: changes of the state of all, and the list of all models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from quire.fleet.proxy.exchange import Exchange, ReadAnswer
from quire.fleet.proxy.fleet import Fleet
from quire.fleet.proxy.replica import Replica
from quire.fleet.proxy.shared_state import ADAPTERS
from quire.fleet.proxy.streams import fields_of
from quire.fleet.proxy.upstream import UpstreamLate, UpstreamLost, read_whole
from quire.server.requests.errors import unavailable

# Time for a server to make a change, such as to read an adapter's folder; and to list its models.
CHANGE_S: Final = 600.0
LIST_S: Final = 5.0
MAX_ANSWER_BYTES: Final = 16 << 20
# A list is parsed on the event loop.
MAX_LIST_BYTES: Final = 1 << 20
# Routes that list models, with the field of the list and the field of a model's name.
LISTS: Final = {"/v1/models": ("data", "id"), "/api/tags": ("models", "name"), "/api/ps": ("models", "name")}


class Broadcasts:
    """Sends requests to several servers.

    Args:
        fleet: the servers.
        tenant_header: name of the header with the tenant; None without one.
    """

    def __init__(self, fleet: Fleet, tenant_header: str | None) -> None:
        self._fleet = fleet
        self._tenant_header = tenant_header

    async def change(self, exchange: Exchange) -> None:
        """Have every server that is up make a change; answer with the first error, or else the first answer.

        Servers that are down, or are lost meanwhile, are told when they come up. The change goes on if the client
        leaves, so that servers do not differ.
        """
        shared = self._fleet.shared
        if not await exchange.unless_left(shared.lock.acquire()):
            return
        try:
            replicas = [replica for replica in self._fleet.replicas.values() if replica.is_up]
            answers = await _ask_all(exchange, replicas, CHANGE_S)
            if any(answer.status < 400 for answer in answers.values()):
                shared.record(exchange, self._tenant_header)
                for name in answers:
                    self._fleet.replicas[name].told(shared.seq)
                for replica in replicas:
                    if replica.name not in answers:
                        replica.miss_change()
        finally:
            shared.lock.release()
        if exchange.path in ADAPTERS:
            await asyncio.gather(*(self._fleet.replicas[name].read_models() for name in answers))
        if not answers:
            if replicas:
                raise unavailable("every server was lost meanwhile", "replica_lost")
            await exchange.give_up(False)
            return
        name = next((name for name, answer in answers.items() if answer.status >= 400), next(iter(answers)))
        await exchange.relay(answers[name], name)

    async def list_models(self, exchange: Exchange) -> None:
        """Answer with the models of all servers that take requests."""
        replicas = {replica.models: replica for replica in self._fleet.available()}
        asking = _ask_all(exchange, list(replicas.values()), LIST_S, MAX_LIST_BYTES)
        answers = await exchange.unless_left(asking)
        if answers is None:
            return
        if not answers:
            await exchange.give_up(bool(replicas))
            return
        list_field, name_field = LISTS[exchange.path]
        cards: dict[str, Any] = {}
        others: Mapping[str, Any] = {}
        for answer in answers.values():
            fields = fields_of(answer.body) if answer.status == 200 else {}
            data = fields.get(list_field)
            for card in data if isinstance(data, list) else ():
                if isinstance(card, dict) and isinstance(card.get(name_field), str):
                    others = others or fields
                    cards.setdefault(card[name_field], card)
        name, first = next(iter(answers.items()))
        if cards:
            body = json.dumps({**others, list_field: list(cards.values())}).encode()
            first = ReadAnswer(200, [(b"content-type", b"application/json")], body)
        await exchange.relay(first, name)


async def _ask_all(
    exchange: Exchange, replicas: Sequence[Replica], limit_s: float, max_bytes: int = MAX_ANSWER_BYTES
) -> dict[str, ReadAnswer]:
    """Return the answers of servers, by name; without those that are lost or send nothing in time."""

    async def ask(replica: Replica) -> ReadAnswer:
        try:
            async with asyncio.timeout(limit_s):
                answer = await exchange.send_to(replica.upstream)
                try:
                    body = await read_whole(answer.parts(), max_bytes, "its answer")
                finally:
                    answer.close()
        except TimeoutError as error:
            raise UpstreamLate(f"no answer in {limit_s:g} s") from error
        return ReadAnswer(answer.status, answer.headers, body)

    results = await asyncio.gather(*map(ask, replicas), return_exceptions=True)
    answers: dict[str, ReadAnswer] = {}
    for replica, result in zip(replicas, results, strict=True):
        if isinstance(result, ReadAnswer):
            answers[replica.name] = result
        elif isinstance(result, UpstreamLost):
            replica.lose(result)
        else:
            raise result
    return answers

"""The proxy's policies where servers fail, in simulated time: ejection, budgets, suspects, and time limits."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.fleet.routing.failure_policy import FailurePolicy
from tests.serving.simulated import Got, Reply, SimulatedProxy, SimulatedServer, run_simulated, statuses

EVENT, DONE = b'data: {"choices": []}\n\n', b"data: [DONE]\n\n"


def well(_: dict[str, Any]) -> Reply:
    return Reply()


def broken(_: dict[str, Any]) -> Reply:
    return Reply(500, 0.001, [b'{"error": {"code": "internal_error"}}'])


def busy(_: dict[str, Any]) -> Reply:
    return Reply(429, 0.001, [b"{}"])


def poisonable(fields: dict[str, Any]) -> Reply:
    is_poison = fields.get("prompt") == "poison"
    return Reply(kills=is_poison, after_s=0.08 if is_poison else 0.2)


async def spaced(proxy: SimulatedProxy, count: int, gap_s: float = 0.02, **fields: Any) -> list[Got]:
    """Send requests at equal distances."""
    tasks = []
    for number in range(count):
        tasks.append(asyncio.create_task(proxy.post(prompt=str(number), **fields)))
        await asyncio.sleep(gap_s)
    return await asyncio.gather(*tasks)


@pytest.mark.parametrize("router", ["cache_aware", "least_loaded", "round_robin"])
def test_a_server_that_answers_500_at_once_attracts_no_traffic(router: str) -> None:
    """Without ejection, its short queue attracted 153 of 200 requests."""
    servers = [SimulatedServer(broken), SimulatedServer(well), SimulatedServer(well)]

    async def main() -> tuple[list[Got], dict[str, Any]]:
        async with SimulatedProxy(servers, router=router) as proxy:
            got = await spaced(proxy, 200)
            return got, proxy.fleet.replicas["http://server-0"].describe()

    got, state = run_simulated(main())
    assert statuses(got) == {200: 200}
    # Three to be ejected, a few that were on their way, and one trial after 1 s and after 2 s more.
    assert len(servers[0].asked) <= 10
    assert (state["breaker"], state["is_available"], state["num_ejections"]) == ("open", False, 3)


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_is_busy_at_once_attracts_no_traffic_and_is_not_ejected(status: int) -> None:
    servers = [SimulatedServer(lambda _: Reply(status, 0.001, [b"{}"])), SimulatedServer(well), SimulatedServer(well)]

    async def main() -> tuple[list[Got], dict[str, Any]]:
        async with SimulatedProxy(servers) as proxy:
            got = await spaced(proxy, 200)
            return got, (await proxy.state())["replicas"][0]

    got, state = run_simulated(main())
    assert statuses(got) == {200: 200}
    assert len(servers[0].asked) <= 4.0 / 0.25 + 1
    assert (state["breaker"], state["num_ejections"]) == ("closed", 0)


def test_failures_that_all_servers_have_alike_eject_none_and_are_passed_on() -> None:
    servers = [SimulatedServer(broken) for _ in range(3)]

    async def main() -> tuple[list[Got], list[str]]:
        async with SimulatedProxy(servers) as proxy:
            got = await spaced(proxy, 100)
            return got, [replica.describe()["breaker"] for replica in proxy.fleet.replicas.values()]

    got, breakers = run_simulated(main())
    assert statuses(got) == {500: 100}
    assert {each.code for each in got} == {"internal_error"}
    assert breakers.count("closed") >= 2


def test_a_request_that_fails_everywhere_counts_against_no_server() -> None:
    servers = [SimulatedServer(lambda fields: broken(fields) if fields["prompt"] == "bad" else Reply())] * 1
    servers += [SimulatedServer(servers[0].behave) for _ in range(2)]

    async def main() -> tuple[list[Got], list[Got], list[int]]:
        async with SimulatedProxy(servers) as proxy:
            bad = [await proxy.post(prompt="bad") for _ in range(20)]
            good = await spaced(proxy, 20)
            return bad, good, [replica.breaker.num_opened for replica in proxy.fleet.replicas.values()]

    bad, good, ejections = run_simulated(main())
    assert statuses(bad) == {500: 20}
    assert statuses(good) == {200: 20}
    assert ejections == [0, 0, 0]
    assert sum(len(server.asked) for server in servers) == 20 * 2 + 20


def test_an_ejected_server_comes_back_by_one_trial() -> None:
    servers = [SimulatedServer(broken), SimulatedServer(well)]

    async def main() -> list[int]:
        async with SimulatedProxy(servers, router="round_robin") as proxy:
            breaker = proxy.fleet.replicas["http://server-0"].breaker
            while not breaker.num_opened:
                await proxy.post(prompt="a")
            counts = [len(servers[0].asked)]
            await asyncio.sleep(1.1)
            # Of many requests at once, one is the trial. It fails, and the next is two seconds later.
            await asyncio.gather(*(proxy.post(prompt=str(number)) for number in range(10)))
            counts.append(len(servers[0].asked))
            await asyncio.sleep(1.5)
            await proxy.post(prompt="b")
            counts.append(len(servers[0].asked))
            servers[0].behave = well
            await asyncio.sleep(1.0)
            await asyncio.gather(*(proxy.post(prompt=str(number)) for number in range(10)))
            counts.append(len(servers[0].asked))
            await asyncio.gather(*(proxy.post(prompt=str(number)) for number in range(10)))
            return [*counts, len(servers[0].asked)]

    first, failed, early, succeeded, after = run_simulated(main())
    assert (failed, early, succeeded) == (first + 1, first + 1, first + 2)
    assert after > succeeded + 2


def test_all_servers_that_are_up_take_requests_if_all_are_ejected() -> None:
    servers = [SimulatedServer(broken), SimulatedServer(well)]

    async def main() -> Got:
        async with SimulatedProxy(servers) as proxy:
            await spaced(proxy, 20)
            servers[0].behave = well
            servers[1].kill()
            return await proxy.post(prompt="a")

    assert run_simulated(main()).status == 200


def test_retries_are_bounded_by_a_budget_and_the_rest_is_passed_on() -> None:
    servers = [SimulatedServer(busy) for _ in range(4)]

    async def main() -> tuple[list[Got], dict[str, Any]]:
        policy = FailurePolicy(retry_share=0.2, retry_min_per_s=0.0)
        async with SimulatedProxy(servers, policy) as proxy:
            return await spaced(proxy, 300, 0.02), await proxy.state()

    got, state = run_simulated(main())
    num_sent = sum(len(server.asked) for server in servers)
    assert statuses(got) == {429: 300}
    assert 300 * 1.15 <= num_sent <= 300 * 1.25
    assert state["num_retries_refused"] > 200


def test_a_request_that_kills_costs_two_servers_and_the_others_are_answered() -> None:
    servers = [SimulatedServer(poisonable, restart_s=1000.0) for _ in range(5)]

    async def main() -> tuple[Got, list[Got], list[Got], dict[str, Any]]:
        async with SimulatedProxy(servers) as proxy:
            others = [asyncio.create_task(proxy.post(prompt=str(number))) for number in range(40)]
            poison = await proxy.post(prompt="poison")
            again = [await proxy.post(prompt="poison") for _ in range(5)]
            return poison, again, await asyncio.gather(*others), await proxy.state()

    poison, again, others, state = run_simulated(main())
    assert sum(server.num_killed for server in servers) == 2
    assert (poison.status, poison.code) == (500, "request_loses_servers")
    assert {each.code for each in again} == {"request_loses_servers"}
    assert statuses(others) == {200: 40}
    assert state["num_suspects"] >= 15  # the eight of each server
    assert state["num_suspects_waiting"] == 0


def test_copies_of_a_request_that_kills_cost_two_servers_together() -> None:
    servers = [SimulatedServer(poisonable, restart_s=1000.0) for _ in range(6)]

    async def main() -> list[Got]:
        async with SimulatedProxy(servers) as proxy:
            first = asyncio.create_task(proxy.post(prompt="poison"))
            await asyncio.sleep(0.07)
            rest = [asyncio.create_task(proxy.post(prompt=prompt)) for prompt in ("poison", "a", "poison", "b") * 3]
            return await asyncio.gather(first, *rest)

    got = run_simulated(main())
    # Those that were sent before the first loss each cost the server that they are on, and none after the refusal.
    assert {each.code for each in got if each.status != 200} == {"request_loses_servers"}
    assert statuses(got)[200] == 6


def test_suspects_are_tried_one_at_a_time() -> None:
    servers = [SimulatedServer(lambda _: Reply(after_s=1.0), restart_s=1000.0) for _ in range(2)]

    async def main() -> tuple[list[Got], int]:
        async with SimulatedProxy(servers) as proxy:
            tasks = [asyncio.create_task(proxy.post(prompt=str(number))) for number in range(8)]
            await asyncio.sleep(0.9)
            lost, kept = sorted(servers, key=lambda server: len(server.in_flight))[::-1]
            before = len(kept.in_flight)
            lost.kill()
            await asyncio.sleep(0.05)
            return await asyncio.gather(*tasks), len(kept.in_flight) - before

    got, num_at_once = run_simulated(main())
    assert statuses(got) == {200: 8}
    assert num_at_once <= 1


def test_a_suspect_whose_client_leaves_gives_its_turn_away() -> None:
    servers = [SimulatedServer(lambda _: Reply(after_s=1.0), restart_s=1000.0) for _ in range(2)]

    async def main() -> list[Got]:
        async with SimulatedProxy(servers) as proxy:
            tasks = [
                asyncio.create_task(proxy.post(prompt=str(number), leave_after_s=1.5 if number % 2 else None))
                for number in range(12)
            ]
            await asyncio.sleep(0.9)
            servers[0].kill()
            return await asyncio.gather(*tasks)

    assert statuses(run_simulated(main()))[200] >= 6


def test_a_server_that_takes_no_connections_while_it_stops_ends_its_streams() -> None:
    parts = [EVENT] * 20 + [DONE]
    servers = [SimulatedServer(lambda _: Reply(parts=parts, part_s=0.5, is_stream=True)) for _ in range(2)]

    async def main() -> list[Got]:
        async with SimulatedProxy(servers) as proxy:
            tasks = [asyncio.create_task(proxy.post(prompt=str(number))) for number in range(4)]
            await asyncio.sleep(2.0)
            servers[0].refuses = True
            tasks += [asyncio.create_task(proxy.post(prompt=f"later {number}")) for number in range(4)]
            return await asyncio.gather(*tasks)

    got = run_simulated(main())
    assert [each.body for each in got] == [b"".join(parts)] * 8
    assert {each.replica for each in got[4:]} == {"http://server-1"}


def test_a_server_that_sends_nothing_is_a_504_in_the_form_of_the_protocol() -> None:
    server = SimulatedServer(lambda _: Reply(after_s=1e6))

    async def main() -> tuple[Got, Got]:
        async with SimulatedProxy([server], FailurePolicy(first_byte_timeout_s=20.0)) as proxy:
            return await proxy.post(prompt="a"), await proxy.post("/v1/embeddings", input="a")

    for got in run_simulated(main()):
        assert (got.status, got.code, got.seconds) == (504, "replica_timeout", pytest.approx(20.0))


def test_a_stream_that_falls_silent_ends_with_an_error_event() -> None:
    parts = (EVENT, EVENT, DONE)
    slow = SimulatedServer(lambda _: Reply(parts=parts, part_s=9.0, is_stream=True))
    silent = SimulatedServer(lambda _: Reply(parts=parts, part_s=11.0, is_stream=True))

    async def main(server: SimulatedServer) -> Got:
        async with SimulatedProxy([server], FailurePolicy(idle_timeout_s=10.0)) as proxy:
            return await proxy.post(prompt="a", stream=True)

    assert run_simulated(main(slow)).body == b"".join(parts)
    got = run_simulated(main(silent))
    assert (got.status, got.code) == (200, "replica_timeout")
    assert got.body.startswith(EVENT)
    assert got.body.endswith(DONE)
    assert got.seconds == pytest.approx(11.05 + 10.0)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 40))])
def test_random_failures_lose_no_request_without_a_word(seed: int) -> None:
    """Servers die, answer 500, are busy, fall silent, at random; every request ends with an answer or a typed error."""
    rng = random.Random(seed)

    def behave(fields: dict[str, Any]) -> Reply:
        draw = rng.random()
        if fields["prompt"].startswith("poison"):
            return Reply(after_s=rng.uniform(0, 0.3), kills=True)
        if draw < 0.02:
            return Reply(rng.choice((500, 502, 503, 429)), rng.uniform(0, 0.2), [b'{"error": {"code": "typed"}}'])
        if draw < 0.03:
            return Reply(after_s=500.0)
        is_stream = rng.random() < 0.5
        parts = (EVENT, EVENT, DONE) if is_stream else (b'{"choices": []}',)
        return Reply(200, rng.expovariate(4.0), parts, rng.expovariate(10.0), is_stream=is_stream)

    servers = [SimulatedServer(behave, restart_s=rng.uniform(0.5, 5.0)) for _ in range(rng.randint(2, 6))]

    async def main() -> tuple[list[Got], int, int]:
        policy = FailurePolicy(first_byte_timeout_s=60.0, idle_timeout_s=30.0)
        num_random_kills = num_poison = 0
        async with SimulatedProxy(servers, policy) as proxy:
            tasks = []
            for number in range(400):
                is_poison = rng.random() < 0.01
                num_poison += is_poison
                prompt = f"poison {number}" if is_poison else str(number)
                tasks.append(asyncio.create_task(proxy.post(prompt=prompt)))
                await asyncio.sleep(rng.expovariate(20.0))
                if rng.random() < 0.02:
                    victim = rng.choice(servers)
                    num_random_kills += victim.is_alive
                    victim.kill()
            got = await asyncio.gather(*tasks)
            # All is back once the failures end.
            for server in servers:
                server.behave = well
            await asyncio.sleep(100.0)
            last = await spaced(proxy, 50, 0.5)
            assert statuses(last) == {200: 50}
            assert all(replica.is_available for replica in proxy.fleet.replicas.values())
            assert (await proxy.state())["num_suspects_waiting"] == 0
            assert all(replica.num_in_flight == 0 for replica in proxy.fleet.replicas.values())
            return got, num_random_kills, num_poison

    got, num_random_kills, num_poison = run_simulated(main())
    codes: Counter[str] = Counter()
    for each in got:
        if each.status == 200 and each.body.endswith((DONE, b"}")) and each.code is None:
            continue
        assert each.code is not None, each
        codes[each.code] += 1
    assert set(codes) <= {
        *("typed", "replica_lost", "replica_timeout", "no_replica", "busy", "queue_full", "request_loses_servers")
    }
    assert sum(server.num_killed for server in servers) - num_random_kills <= 2 * num_poison


@pytest.mark.parametrize(
    ("field", "value"),
    [("eject_failures", 0), ("eject_rate", 0.0), ("max_ejected", 1.5), ("retry_share", -0.1), ("idle_timeout_s", 0)],
)
def test_a_wrong_number_of_a_policy_is_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field) as found:
        FailurePolicy(**{field: value})  # type: ignore[arg-type]
    assert found.value.field == field

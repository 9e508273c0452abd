"""What holds for every test: few threads, no network, visible skips, repeatable searches, covers of pairs."""

from __future__ import annotations

import gc
import heapq
import ipaddress
import logging
import os
import socket
from collections.abc import Generator, Hashable, Iterator, Mapping, Set
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

# Read by libraries when they are first imported, so set before any test module is.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

settings.register_profile("person", deadline=None)
settings.register_profile(
    "ci", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci" if os.environ.get("CI") else "person")


# Cases that were measured to take long, which are slow as well, but not the last of their kind: CI runs them with the
# slow tests, and for the coverage of the control plane. Written by a run with `--list-long-tests`.
LONG_CASES = Path(__file__).with_name("long_cases.txt")
# The ids of all cases of a run, also of those that marks leave out of it.
COLLECTED_CASES = pytest.StashKey[frozenset[str]]()
# Modules, and tests, that stay in the default run however long they take.
NEVER_LONG = (
    "tests/architecture/",
    "tests/conformance/test_histories.py",
    "tests/docs/test_readme.py",
    "tests/engine/test_concurrent_callers.py",
    "tests/engine/test_sampling_batches.py::test_any_parameters_in_any_company[",
    "tests/engine/test_sampling_batches.py::test_every_value_of_every_parameter[ahead]",
    "tests/engine/test_structured.py::test_each_form_in_one_batch",
    "tests/memory/test_million.py",
    "tests/models/test_conformance.py",
    "tests/platform/test_huge_pages.py",
    "tests/scheduling/test_random_runs.py::test_tokens_do_not_depend_on_memory_budget_policy_or_company",
)
# Folders with cases for many models, or many seeds: `--share` runs some of their slow cases.
SHARED_FOLDERS = (
    "tests/conformance/",
    "tests/engine/",
    "tests/hosted/",
    "tests/hostile/",
    "tests/kvstore/",
    "tests/memory/",
    "tests/models/",
    "tests/mutants/",
    "tests/scheduling/",
    "tests/schemas/",
)
# Fixtures and parameters with the name of a model, all cases of which are in one share.
MODEL_FIXTURES = ("reference", "model_type", "name")
# The line of a module whose tests are all slow.
SLOW_MODULE = "\npytestmark = pytest.mark.slow\n"
Case = TypeVar("Case")


class NetworkBlocked(RuntimeError):
    """A test tried to reach another machine."""


def is_loopback(address: Any) -> bool:
    """Tell whether a socket address (of any family) stays on this machine."""
    if not isinstance(address, tuple):
        return True  # a path: AF_UNIX
    return is_loopback_host(address[0])


def is_loopback_host(host: str | bytes | None) -> bool:
    """Tell whether a host name or address is this machine, without asking a name server."""
    name = host.decode() if isinstance(host, bytes) else host
    if name in (None, "", "localhost", socket.gethostname()):
        return True
    try:
        parsed = ipaddress.ip_address(str(name).partition("%")[0])
    except ValueError:
        return False
    return parsed.is_loopback or parsed.is_unspecified


@pytest.fixture(scope="session", autouse=True)
def network_attempts() -> Iterator[list[str]]:
    """Refuse every connection and name look-up that leaves this machine, and list the attempts."""
    attempts: list[str] = []
    connect, connect_ex, getaddrinfo = socket.socket.connect, socket.socket.connect_ex, socket.getaddrinfo

    def refuse(target: object) -> None:
        attempts.append(repr(target))
        raise NetworkBlocked(f"tests stay on this machine, but something wanted to reach {target!r}")

    def guarded_connect(self: socket.socket, address: Any) -> None:
        if not is_loopback(address):
            refuse(address)
        connect(self, address)

    def guarded_connect_ex(self: socket.socket, address: Any) -> int:
        if not is_loopback(address):
            refuse(address)
        return connect_ex(self, address)

    def guarded_getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_loopback_host(host):
            refuse(host)
        return getaddrinfo(host, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded_connect)
        patch.setattr(socket.socket, "connect_ex", guarded_connect_ex)
        patch.setattr(socket, "getaddrinfo", guarded_getaddrinfo)
        yield attempts


@pytest.fixture(autouse=True)
def no_network(network_attempts: list[str]) -> Iterator[None]:
    """Fail a test that tried to leave this machine even where its code swallowed the error."""
    network_attempts.clear()
    yield
    attempts = list(network_attempts)
    network_attempts.clear()
    assert not attempts, f"the test tried to reach {', '.join(attempts)}"


@pytest.fixture(autouse=True)
def same_log() -> Iterator[None]:
    """Undo what a test has set up of the process's log: commands write it to streams that end with their test."""
    loggers = [logging.getLogger(name) for name in ("", "asyncio", "httpx", "uvicorn", "quire")]
    before = [(logger, logger.level, list(logger.handlers)) for logger in loggers]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all processes of this test run share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def byte_level_folder(shared_folder: Path) -> Path:
    """Return a checkpoint's folder with a byte-level vocabulary of 152,000 tokens, as Qwen 3 has; see `real_size`."""
    from tests import real_size

    return real_size.made_once(shared_folder, real_size.byte_level_vocabulary)


@pytest.fixture(scope="session")
def byte_fallback_folder(shared_folder: Path) -> Path:
    """Return a checkpoint's folder with a vocabulary of 262,000 tokens and byte fallback, as Gemma 3 has."""
    from tests import real_size

    return real_size.made_once(shared_folder, real_size.byte_fallback_vocabulary)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import the tests without the garbage collector, and have it never look at what they imported.

    That is most of what a process of the tests ever has: hundreds of thousands of objects that stay.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import a module that is slow as a whole in a run without slow tests."""
    if config.option.markexpr != "not slow" or collection_path.suffix != ".py":
        return None
    return True if SLOW_MODULE in collection_path.read_text(encoding="utf-8") else None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that measures which cases are long, and the one that leaves out some models."""
    text = f"write the cases that take more processor time to {LONG_CASES.name}, beside those that are in it"
    parser.addoption("--list-long-tests", type=float, metavar="SECONDS", help=text)
    text = f"of the slow cases of {', '.join(SHARED_FOLDERS)}, run one of COUNT shares, counted from 0"
    parser.addoption("--share", metavar="NUMBER/COUNT", help=text)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Note a case that takes long, with its fixtures and the processes that it waits for."""
    limit = item.config.getoption("--list-long-tests")
    before = sum(os.times()[:4])
    try:
        return (yield)
    finally:
        if limit is not None and sum(os.times()[:4]) - before > limit and not item.nodeid.startswith(NEVER_LONG):
            with LONG_CASES.open("a", encoding="utf-8") as file:  # one write, whole: other workers append as well
                file.write(f"{item.nodeid}\n")


@pytest.hookimpl(tryfirst=True)  # before marks select what is run
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU where there is none; of tests marked `pairwise`, mark all but a cover slow.

    Exhaustive tests are slow ones, and so are the cases that were measured to take long.
    """
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if wanting:
        import torch

        if not torch.cuda.is_available():
            for item in wanting:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
    mark_beyond_pairs(items)
    config.stash[COLLECTED_CASES] = frozenset(item.nodeid for item in items)
    long_cases = frozenset(LONG_CASES.read_text(encoding="utf-8").splitlines())
    for item in items:
        if item.get_closest_marker("exhaustive"):
            item.add_marker(pytest.mark.slow)
        elif item.nodeid in long_cases and not item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.long)
    if share := config.getoption("--share"):
        kept, others = by_share(items, share)
        config.hook.pytest_deselected(items=others)
        items[:] = kept


def by_share(items: list[pytest.Item], share: str) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the items without, and with, the slow cases that belong to another share than this one, `NUMBER/COUNT`."""
    number, count = map(int, share.split("/"))
    kept: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        case = getattr(item, "callspec", None)
        is_shared = case is not None and item.nodeid.startswith(SHARED_FOLDERS) and item.get_closest_marker("slow")
        if case is None or not is_shared:
            kept.append(item)
            continue
        key = next((case.params[name] for name in MODEL_FIXTURES if name in case.params), case.id)
        (kept if crc32(str(key).encode()) % count == number else others).append(item)
    return kept, others


def mark_beyond_pairs(items: list[pytest.Item]) -> None:
    """Mark the cases of each `pairwise` test slow whose pairs of parameter values other cases have as well.

    What is left holds every pair of values of any two parameters. Cases that are skipped here cover nothing.
    """
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if (
            "pairwise" in marks
            and "slow" not in marks
            and isinstance(item, pytest.Function)
            and hasattr(item, "callspec")
        ):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        pairs = {case: {*combinations(values_of(case), 2)} for case in cases}
        runnable = {case: pairs[case] for case in cases if case.get_closest_marker("skip") is None}
        skipped = {case: pairs[case] for case in cases if case not in runnable}
        cover = {*cover_of(runnable), *cover_of(skipped)}
        for case in cases:
            if len(pairs[case]) > 1 and case not in cover:
                case.add_marker(pytest.mark.slow)


def values_of(case: pytest.Function) -> list[tuple[str, str]]:
    """Return the name and the value of each parameter, in an order that all cases of a test share."""
    return sorted((name, repr(value)) for name, value in case.callspec.params.items())


def cover_of(pairs: Mapping[Case, Set[Hashable]]) -> list[Case]:
    """Return few cases that together have all pairs: again and again the first one that adds the most."""
    missing: set[Hashable] = set().union(*pairs.values())
    cases = list(pairs)
    # What a case adds only shrinks, so one that still adds what it did when it was last looked at is the best.
    queue = [(-len(pairs[case]), index) for index, case in enumerate(cases)]
    heapq.heapify(queue)
    cover = []
    while missing:
        negative, index = queue[0]
        added = pairs[cases[index]] & missing
        if len(added) < -negative:
            heapq.heapreplace(queue, (-len(added), index))
            continue
        heapq.heappop(queue)
        cover.append(cases[index])
        missing -= added
    return cover

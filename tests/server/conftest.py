"""A real server process, started once, and the real client of OpenAI to talk to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest

from quire.text.tokenizers.tokenizer import Tokenizer
from tests.server import checkpoint, tool_checkpoint
from tests.server.process import PATIENCE_S, ServerProcess, running
from tests.server.tool_answers import Serve

KEY = "a secret"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model."""
    return checkpoint.save(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    """The tiny model's tokenizer."""
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="session")
def shared_server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The server that most tests share."""
    flags = ("--num-kv-blocks", "600", "--max-num-seqs", "32", "--log-interval", "0.2", "--max-body-bytes", "1MiB")
    more = ("--pin-limit", "0.1")
    with running(folder, tmp_path_factory.mktemp("logs") / "shared.log", *flags, *more) as process:
        yield process


@pytest.fixture
def server(shared_server: ServerProcess) -> ServerProcess:
    """The shared server, with nothing left over from the test before."""
    shared_server.wait_until_idle()
    return shared_server


@pytest.fixture(scope="session")
def narrow_server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a key that runs one sequence at a time, lets two requests wait, and pings often."""
    flags = ("--num-kv-blocks", "300", "--max-num-seqs", "1", "--max-queue-len", "2", "--ping-interval", "0.02")
    origin = ("--allow-origin", "https://example.org")
    with running(folder, tmp_path_factory.mktemp("logs") / "narrow.log", *flags, *origin, key=KEY) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    """OpenAI's client, which does not try again."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Gives the server of a model that writes calls in a format, started when it is first asked for."""
    servers: dict[str, ServerProcess] = {}
    with ExitStack() as stack:

        def start(form: str) -> ServerProcess:
            if form not in servers:
                folder = tool_checkpoint.save(tmp_path_factory.mktemp("models") / form, form)
                log = tmp_path_factory.mktemp("logs") / "tools.log"
                flags = ("--num-kv-blocks", "400", "--max-num-seqs", "8", "--pin-limit", "0.1")
                servers[form] = stack.enter_context(running(folder, log, *flags))
            return servers[form]

        yield start


@pytest.fixture
def hermes(serve: Serve) -> ServerProcess:
    """The server of Hermes' format."""
    return serve("hermes")


@pytest.fixture
def tool_client(hermes: ServerProcess) -> Iterator[openai.OpenAI]:
    """OpenAI's client, which does not try again."""
    with openai.OpenAI(base_url=f"{hermes.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client

"""An agent framework against the server: a tool is called, its result goes back, and the answer ends the run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolReturnPart
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.run import AgentRunResult
from pydantic_ai.settings import ModelSettings

from tests.server import tool_checkpoint
from tests.server.process import PATIENCE_S, ServerProcess, running
from tests.server.tool_answers import needs_grammars

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["hermes", "qwen3_xml"])
def caller(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The server of a model that calls a tool, and answers once it has the result."""
    folder = tool_checkpoint.save(tmp_path_factory.mktemp("models") / "caller", request.param, answers=True)
    with running(folder, tmp_path_factory.mktemp("logs") / "agents.log", "--num-kv-blocks", "400") as process:
        yield process


@asynccontextmanager
async def chat(url: str) -> AsyncIterator[Model]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=PATIENCE_S) as client:
        yield OpenAIChatModel("tiny", provider=OpenAIProvider(openai_client=client))


@asynccontextmanager
async def responses(url: str) -> AsyncIterator[Model]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=PATIENCE_S) as client:
        yield OpenAIResponsesModel("tiny", provider=OpenAIProvider(openai_client=client))


@asynccontextmanager
async def messages(url: str) -> AsyncIterator[Model]:
    async with AsyncAnthropic(base_url=url, api_key="none", timeout=PATIENCE_S) as client:
        yield AnthropicModel("tiny", provider=AnthropicProvider(anthropic_client=client))


Protocol = Callable[[str], AbstractAsyncContextManager[Model]]
SETTINGS = ModelSettings(temperature=0.0, max_tokens=200)


def get_weather(city: str) -> str:
    """Look at the sky over a city."""
    return f"rain in {city}"


@needs_grammars
@pytest.mark.parametrize("protocol", [chat, responses, messages])
def test_an_agent_calls_its_tool_and_ends(caller: ServerProcess, protocol: Protocol) -> None:
    async def run() -> AgentRunResult[str]:
        async with protocol(caller.url) as model:
            agent = Agent(model, tools=[get_weather], model_settings=SETTINGS)
            return await agent.run("hi")

    result = asyncio.run(run())
    returned = [part for message in result.all_messages() for part in message.parts if isinstance(part, ToolReturnPart)]
    assert [(part.tool_name, part.content) for part in returned] == [("get_weather", "rain in Paris")]
    assert result.output == "xyz"


class Sky(BaseModel):
    """An answer with a form of its own."""

    wet: bool


# Untrained, the model of Hermes' format would prefer another call to the answer, each time.
@needs_grammars
@pytest.mark.parametrize("caller", ["qwen3_xml"], indirect=True)
@pytest.mark.parametrize("protocol", [chat, responses])
def test_an_answer_beside_tools_has_the_form_that_is_asked_for(caller: ServerProcess, protocol: Protocol) -> None:
    async def run() -> Sky:
        async with protocol(caller.url) as model:
            agent = Agent(model, tools=[get_weather], output_type=NativeOutput(Sky), model_settings=SETTINGS)
            return (await agent.run("hi")).output

    assert isinstance(asyncio.run(run()), Sky)

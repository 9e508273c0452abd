"""The interface of an engine for the routes of a server: `AsyncLLM` has it, and a client in a front process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from quire.config import ResolvedConfig
from quire.engine.inputs.request_options import RequestOptions
from quire.sequences.lora import LoRARequest
from quire.sequences.params import SamplingParams
from quire.text.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:  # the server starts before the engine is imported
    from quire.engine.adapters import LoadedAdapter
    from quire.engine.exporters.engine_report import EngineReport
    from quire.engine.inputs.prompts import Prompt
    from quire.engine.inputs.request_builder import PreparedRequest
    from quire.engine.inputs.tokenizer_pool import TokenizerPool
    from quire.engine.outputs.outputs import RequestOutput
    from quire.models.checkpoints.pooling_config import PoolingConfig


class Reservation(AbstractContextManager[Any], Protocol):
    """Slots of the waiting queue for the prompts of one HTTP request; what is not used is given back at exit."""


class AdapterClient(Protocol):
    """The adapters of an engine; see `AsyncAdapters`."""

    async def list_loaded(self) -> Sequence[LoadedAdapter]:
        """Return the loaded adapters, in the order in which they were loaded."""

    async def load(self, lora_request: LoRARequest) -> LoadedAdapter:
        """Load an adapter."""

    async def unload(self, lora_name: str) -> None:
        """Unload an adapter."""


class EngineClient(Protocol):
    """An engine, as the routes of a server use it; what is not described here is described in `AsyncLLM`."""

    @property
    def model_name(self) -> str:
        """Name under which the model is served."""

    @property
    def resolved(self) -> ResolvedConfig:
        """Configuration of the engine."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None where the engine works on token ids only."""

    @property
    def pooling(self) -> PoolingConfig:
        """Pooling of the model's embeddings."""

    @property
    def texts(self) -> TokenizerPool:
        """Threads that make texts into tokens."""

    @property
    def adapters(self) -> AdapterClient:
        """Loaded adapters."""

    @property
    def has_failed(self) -> bool:
        """True once the engine has died of an error."""

    def default_sampling_params(self) -> dict[str, Any]:
        """Return the sampling parameters that the model's generation config sets."""

    def reserve(self, count: int) -> Reservation:
        """Reserve slots of the waiting queue; a client in another process may be refused at `generate` only."""

    def check_room(self) -> None:
        """Check that the waiting queue has a free slot; cheap."""

    def stream(
        self,
        prompt: PreparedRequest,
        params: SamplingParams,
        options: RequestOptions,
        *,
        request_id: str,
        place: Any,
        take: Callable[[RequestOutput], bool] | None,
    ) -> AsyncIterator[RequestOutput]:
        """Generate, as a stream of output deltas; see `AsyncLLM.generate`."""

    async def has_added(self, request_ids: Sequence[str]) -> bool:
        """Return whether the engine has all of these requests, so that none of them can be refused any more."""

    async def pin_prefix(
        self,
        name: str,
        prompt: Prompt,
        cache_salt: str | None,
        *,
        tenant: str | None,
        add_special_tokens: bool,
        lora_request: LoRARequest | None,
    ) -> int:
        """Keep a prompt's whole blocks in the prefix cache, and return the number of their tokens."""

    async def unpin_prefix(self, name: str, tenant: str | None) -> None:
        """Unpin a prefix."""

    def reset_prefix_cache(self) -> Awaitable[None]:
        """Drop all cached prefixes."""

    async def report(self) -> EngineReport:
        """Return the health, the memory and the totals of the engine."""

    def on_http_request(self, route: str, method: str, status: int) -> None:
        """Count an answered HTTP request."""

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, and return whether those in progress ended in time."""

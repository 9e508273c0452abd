"""The memory managers under test, asked in the same words.

Each class does with its manager what the manager's own scheduler does with it, in the same order. What a scheduler asks
besides, and what an engine keeps of a request besides, is left out on both sides.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from quire.memory import (
    FullAttention,
    KVCacheManager,
    KVCacheSpec,
    Namespace,
    PrefixHit,
    SlidingWindow,
    TokenChain,
    Verdict,
)

BLOCK_SIZE = 16
MAX_MODEL_LEN = 65536
# Tokens that a layer with a window reads, Gemma 3's.
WINDOW = 512


class Manager(Protocol):
    """A memory manager with prefix caching, and the requests that it is asked to serve."""

    version: str

    def prepare(self, prompts: list[list[int]]) -> None:
        """Make the request objects for some prompts, nothing hashed yet; they replace those of the last call."""
        ...

    def hash(self) -> None:
        """Compute the identities of all full blocks of the requests."""
        ...

    def look_up(self) -> int:
        """Return how many tokens of the requests, hashed before, are found in the prefix index."""
        ...

    def admit(self) -> int:
        """Take in all requests: hash, look up, allocate, hand over the block ids, publish.

        Returns:
            Tokens that were found in the prefix index.
        """
        ...

    def decode_step(self, token_id: int) -> None:
        """Append a token to each request, and do for it what a decode step does."""
        ...

    def release(self) -> None:
        """Free the blocks of all requests."""
        ...

    def take_turns(self) -> None:
        """Take in each request and free it before the next one."""
        ...

    def num_used(self) -> int:
        """Return the blocks that requests hold: of the group that keeps all tokens, where there are two."""
        ...


@dataclass(slots=True)
class QuireRequest:
    """The state of a sequence that Quire's scheduler passes to the memory manager."""

    seq_id: int
    tokens: list[int]
    chain: TokenChain
    num_computed: int = 0


class QuireMemory:
    """Quire's `KVCacheManager`.

    Args:
        num_blocks: usable blocks, of each cache group.
        window: tokens that a second group of as many layers reads; None for one group.
    """

    def __init__(self, num_blocks: int, window: int | None = None) -> None:
        self.version = f"quire {importlib.metadata.version('quire')}"
        groups: list[KVCacheSpec] = [FullAttention(block_size=BLOCK_SIZE)]
        if window is not None:
            groups.append(SlidingWindow(block_size=BLOCK_SIZE, window=window))
        self._memory = KVCacheManager(groups, num_blocks, key=b"benchmark")
        self._requests: list[QuireRequest] = []
        self._next_id = 0

    def prepare(self, prompts: list[list[int]]) -> None:
        """Make the request objects for some prompts."""
        self._requests = [
            QuireRequest(seq_id, prompt.copy(), self._memory.chain([], Namespace()))
            for seq_id, prompt in enumerate(prompts, self._next_id)
        ]
        self._next_id += len(prompts)

    def hash(self) -> None:
        """Compute the identities of all full blocks of the requests."""
        for request in self._requests:
            request.chain = self._memory.chain(request.tokens, Namespace())
            request.chain.digests(len(request.tokens) // BLOCK_SIZE)

    def look_up(self) -> int:
        """Return how many tokens of the requests are found."""
        return sum(_whole(self._match(request)) for request in self._requests)

    def admit(self) -> int:
        """Take in all requests."""
        return sum(map(self._open, self._requests))

    def decode_step(self, token_id: int) -> None:
        """Append a token to each request, and do for it what a decode step does."""
        memory = self._memory
        for request in self._requests:
            request.tokens.append(token_id)
        for request in self._requests:
            if not memory.append_slots((request.seq_id,), 1):
                raise RuntimeError("no block left for a decode step")
            memory.take_table_deltas((request.seq_id,))
        memory.take_ops()
        for request in self._requests:
            request.num_computed += 1
            memory.publish(request.seq_id, request.num_computed)

    def release(self) -> None:
        """Free the blocks of all requests."""
        for request in self._requests:
            self._memory.free(request.seq_id)

    def take_turns(self) -> None:
        """Take in each request and free it before the next one."""
        for request in self._requests:
            self._open(request)
            self._memory.free(request.seq_id)

    def num_used(self) -> int:
        """Return the blocks that requests hold."""
        return self._memory.usage().groups[0].used

    def _open(self, request: QuireRequest) -> int:
        """Take in one request, and return the tokens that were found."""
        memory, seq_id, num_tokens = self._memory, request.seq_id, len(request.tokens)
        request.chain = memory.chain(request.tokens, Namespace())
        hit = self._match(request)
        if memory.capacity.can_allocate(num_tokens, hit).verdict is not Verdict.OK:
            raise RuntimeError("no blocks left for a request")
        memory.allocate(seq_id, request.chain, hit)
        if not memory.append_slots((seq_id,), num_tokens - hit.num_tokens):
            raise RuntimeError("a request was promised blocks and did not get them")
        memory.take_table_deltas((seq_id,))[0]
        memory.take_ops()
        memory.publish(seq_id, num_tokens)
        request.num_computed = num_tokens
        return _whole(hit)

    def _match(self, request: QuireRequest) -> PrefixHit:
        """Look for the tokens of whole blocks but the last: the peers use no part of that."""
        return self._memory.match_prefix(request.chain, (len(request.tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE)


def _whole(hit: PrefixHit) -> int:
    """Return the tokens of a hit's whole blocks: two prompts may begin with the same token by chance."""
    return hit.num_tokens - hit.num_copied


class VllmMemory:
    """vLLM's `v1.core.kv_cache_manager.KVCacheManager`.

    It publishes a block when it allocates it, so `admit` and `decode_step` have one call less than Quire's.

    Args:
        hash_name: hash function of blocks, a name of `vllm.utils.hashing`.
        num_blocks: usable blocks, of each cache group.
        window: tokens that a second group of as many layers reads; None for one group.
    """

    def __init__(self, hash_name: str, num_blocks: int, window: int | None = None) -> None:
        utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
        spec = importlib.import_module("vllm.v1.kv_cache_interface")
        vllm = importlib.import_module("vllm")
        distribution = importlib.metadata.packages_distributions()["vllm"][0]
        self.version = f"{distribution} {importlib.metadata.version(distribution)}, {hash_name}"
        hash_fn = importlib.import_module("vllm.utils.hashing").get_hash_fn_by_name(hash_name)
        utils.init_none_hash(hash_fn)
        self._hasher = utils.get_request_block_hasher(BLOCK_SIZE, hash_fn)
        shape = {
            "block_size": BLOCK_SIZE,
            "num_kv_heads": 8,
            "head_size": 128,
            "dtype": importlib.import_module("torch").bfloat16,
        }
        groups = [spec.KVCacheGroupSpec(["layer"], spec.FullAttentionSpec(**shape))]
        if window is not None:
            layers = spec.SlidingWindowSpec(**shape, sliding_window=window)
            groups.append(spec.KVCacheGroupSpec(["window layer"], layers))
        self._num_blocks = num_blocks * len(groups)
        config = spec.KVCacheConfig(
            num_blocks=self._num_blocks + 1,  # one of them is its null block
            kv_cache_tensors=[],
            kv_cache_groups=groups,
        )
        self._memory: Any = importlib.import_module("vllm.v1.core.kv_cache_manager").KVCacheManager(
            config,
            max_model_len=MAX_MODEL_LEN,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            enable_caching=True,
        )
        self._new_request = partial(
            importlib.import_module("vllm.v1.request").Request,
            sampling_params=vllm.SamplingParams(max_tokens=MAX_MODEL_LEN),
            pooling_params=None,
        )
        self._requests: list[Any] = []
        self._next_id = 0

    def prepare(self, prompts: list[list[int]]) -> None:
        """Make the request objects for some prompts."""
        self._requests = [
            self._new_request(request_id=str(request_id), prompt_token_ids=prompt)
            for request_id, prompt in enumerate(prompts, self._next_id)
        ]
        self._next_id += len(prompts)

    def hash(self) -> None:
        """Compute the identities of all full blocks of the requests."""
        for request in self._requests:
            self._hash(request)

    def look_up(self) -> int:
        """Return how many tokens of the requests are found."""
        return sum(self._memory.get_computed_blocks(request)[1] for request in self._requests)

    def admit(self) -> int:
        """Take in all requests."""
        self._memory.new_step_starts()
        return sum(map(self._open, self._requests))

    def decode_step(self, token_id: int) -> None:
        """Append a token to each request, and do for it what a decode step does."""
        memory = self._memory
        for request in self._requests:
            request.append_output_token_ids(token_id)
        memory.new_step_starts()
        for request in self._requests:
            blocks = memory.allocate_slots(request, 1)
            if blocks is None:
                raise RuntimeError("no block left for a decode step")
            blocks.get_block_ids(allow_none=True)
        for request in self._requests:
            request.num_computed_tokens += 1

    def release(self) -> None:
        """Free the blocks of all requests."""
        for request in self._requests:
            self._memory.free(request)

    def take_turns(self) -> None:
        """Take in each request and free it before the next one."""
        for request in self._requests:
            self._memory.new_step_starts()
            self._open(request)
            self._memory.free(request)

    def num_used(self) -> int:
        """Return the blocks that requests hold."""
        if int(self._memory.block_pool.get_num_free_blocks()) == self._num_blocks:
            return 0
        tables = (self._memory.get_blocks(request.request_id).get_block_ids() for request in self._requests)
        return len({block_id for table in tables for block_id in table[0]})

    def _hash(self, request: Any) -> None:
        """Give a request its hasher, which its constructor would have called, and call it."""
        request._block_hasher = self._hasher
        request.update_block_hashes()

    def _open(self, request: Any) -> int:
        """Take in one request, and return the tokens that were found."""
        self._hash(request)
        found, num_found, _ = self._memory.get_computed_blocks(request)
        num_tokens = request.num_tokens
        if self._memory.allocate_slots(request, num_tokens - num_found, num_found, found) is None:
            raise RuntimeError("no blocks left for a request")
        self._memory.get_blocks(request.request_id).get_block_ids()
        request.num_computed_tokens = num_tokens
        return int(num_found)


MANAGERS: dict[str, Callable[[int], Manager]] = {
    "quire": QuireMemory,
    "vllm": partial(VllmMemory, "sha256"),  # its default
    "vllm-xxhash": partial(VllmMemory, "xxhash"),  # its fastest; not collision resistant
    "quire-window": partial(QuireMemory, window=WINDOW),
    "vllm-window": partial(VllmMemory, "sha256", window=WINDOW),
    "vllm-window-xxhash": partial(VllmMemory, "xxhash", window=WINDOW),
}

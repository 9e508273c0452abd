"""Disaggregated prefill: hand-over of a prompt's blocks from the engine that prefills to the engine that decodes.

```
 request with do_remote_decode  -> computed -> its published blocks are copied out and kept
                                -> the answer names this engine: do_remote_prefill, remote_host, remote_port, ...
 request with do_remote_prefill -> waits -> blocks are fetched from the engine that it names -> checked like disk blocks
```
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from quire.config.kv_transfer import KVTransferConfig
from quire.distributed.kvstore.counters import TransferStats
from quire.distributed.kvstore.exports import ExportTable
from quire.distributed.kvstore.sources import SourcePool
from quire.distributed.kvstore.transfer import PeerAddress, Peers, TransferServer
from quire.engine.kv.disk_prefetch import DiskPrefetcher
from quire.engine.outputs.outputs import RequestOutput
from quire.execution.runners.executor import Executor
from quire.memory.manager import KVCacheManager
from quire.sequences.kv_transfer import KVTransferParams
from quire.sequences.sequence import Request

# Number of open requests at which requests that ended without an answer are removed.
MOST_OPEN = 1024


class HandOver:
    """Exports the blocks of finished prompts, and finds the engine with the blocks of a waiting prompt."""

    def __init__(
        self, config: KVTransferConfig, exports: ExportTable | None, identity: bytes, block_bytes: int
    ) -> None:
        self.config = config
        self._exports = exports
        self._server = None if exports is None else TransferServer(config, identity, exports)
        self._peers = Peers(identity, config.token, config.timeout_s, block_bytes)
        self._engine_id = config.engine_id or secrets.token_hex(8)
        self._open: dict[str, Request] = {}

    def add(self, request: Request, running: Iterable[str]) -> None:
        """Register a request, if its blocks are to be exported."""
        asked = request.params.kv_transfer
        if asked is None or not asked.do_remote_decode:
            return
        if len(self._open) >= MOST_OPEN:
            names = set(running)
            self._open = {name: open_request for name, open_request in self._open.items() if name in names}
        self._open[request.request_id] = request

    def finish(
        self, outputs: Iterable[RequestOutput], memory: KVCacheManager, prefetch: DiskPrefetcher, executor: Executor
    ) -> None:
        """Export the blocks of the prompts that ended in a step, and put this engine's address into their outputs."""
        if not self._open:
            return
        for output in outputs:
            request = self._open.pop(output.request_id, None) if output.finished else None
            if request is None or output.error is not None:
                continue
            spans = [media.span for media in request.media]
            chain = memory.chain(list(request.prompt_token_ids), request.namespace, spans)
            num_blocks = request.num_prompt // memory.block_size
            blocks = prefetch.copy_out(executor, chain, num_blocks, lambda _: True, exports=True)
            ids: list[list[int]] = [[] for _ in memory.groups]
            for block in blocks:
                ids[block.group_idx].append(len(ids[block.group_idx]))
            output.kv_transfer_params = self._answer(request.request_id, ids).as_json()

    def source_of(self, request: Request) -> SourcePool | None:
        """Return the engine that has the blocks of a request; None if the request names no engine."""
        asked = request.params.kv_transfer
        if asked is None or not asked.do_remote_prefill:
            return None
        assert asked.remote_host is not None
        assert asked.remote_port is not None
        return self._peers.source_of(PeerAddress(asked.remote_host, asked.remote_port))

    def close(self) -> None:
        """Stop listening, and close all connections."""
        if self._server is not None:
            self._server.close()
        self._peers.close()

    @property
    def stats(self) -> TransferStats:
        """Counters since the start."""
        exports, server = self._exports, self._server
        return self._peers.counters.shown_as(
            TransferStats,
            num_kept=0 if exports is None else len(exports),
            kept_bytes=0 if exports is None else exports.num_bytes,
            num_sent=0 if server is None else server.num_sent,
            sent_bytes=0 if server is None else server.sent_bytes,
            num_turned_away=0 if server is None else server.num_turned_away,
            num_starved=0 if server is None else server.num_starved,
        )

    def _answer(self, request_id: str, block_ids: list[list[int]]) -> KVTransferParams:
        assert self._server is not None
        return KVTransferParams(
            do_remote_prefill=True,
            remote_block_ids=block_ids,
            remote_engine_id=self._engine_id,
            remote_request_id=request_id,
            remote_host=self._server.host,
            remote_port=self._server.port,
        )

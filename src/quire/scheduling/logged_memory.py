"""Pin commands of a memory manager, which no scheduler issues, for the log of `quire.scheduling.command_log`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.errors import LockstepDrift, UnsupportedFeature
from quire.memory.manager import KVCacheManager
from quire.memory.prefix.token_chain import Namespace, TokenChain


class LoggedMemory:
    """A proxy of a memory manager that logs pins; all other attributes are the manager's.

    Args:
        inner: the manager.
        log: function that is called with each command.
    """

    def __init__(self, inner: KVCacheManager, log: Callable[[list[Any]], object]) -> None:
        vars(self).update(_inner=inner, _log=log)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    def pin(self, name: str, chain: TokenChain) -> int:
        """See `KVCacheManager.pin`.

        Raises:
            UnsupportedFeature: the chain has media.
        """
        if chain.media:
            raise UnsupportedFeature("media", "embeddings are not sent to other ranks; use one process")
        num_tokens: int = self._inner.pin(name, chain)
        if num_tokens:
            namespace = Namespace.deserialise(chain.root.content)
            self._log(["pin", name, chain.tokens[:num_tokens], list(namespace)])
        return num_tokens

    def unpin(self, name: str) -> None:
        """See `KVCacheManager.unpin`."""
        self._inner.unpin(name)
        self._log(["unpin", name])


def repeat_pin(memory: KVCacheManager, name: str, tokens: list[int], namespace: list[str | None]) -> None:
    """Pin a prefix that rank 0 has pinned.

    Raises:
        LockstepDrift: not all of the prefix is in this rank's prefix cache.
    """
    model, *others = namespace
    assert model is not None, "a namespace has a model"
    num_tokens = memory.pin(name, memory.chain(tokens, Namespace(model, *others)))
    if num_tokens != len(tokens):
        raise LockstepDrift(
            f"rank 0 has pinned {len(tokens)} tokens, of which {num_tokens} are in the prefix cache here"
        )

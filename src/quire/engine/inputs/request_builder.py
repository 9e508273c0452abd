"""Checks requests of clients and builds the scheduler's `Request` from them."""

from __future__ import annotations

import secrets
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

from quire.config import ResolvedConfig
from quire.config.kv_transfer import KVTransferConfig
from quire.engine.adapters import LoadedAdapter
from quire.engine.inputs.prompts import Prompt, PromptReader, TextPair, TokenPrompt
from quire.engine.inputs.request_options import RequestOptions
from quire.errors import InvalidParameter, UnsupportedFeature
from quire.sequences.kv_transfer import NAME
from quire.sequences.params import SamplingParams
from quire.sequences.pooling import NO_SAMPLING, Pooling, PromptedText
from quire.sequences.sequence import Request
from quire.text.structured.grammar_compiler import GrammarCompiler
from quire.text.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:  # a process that only reads prompts does not import torch
    from quire.engine.inputs.images.reader import ImageReader

# Bytes of the salt of a request whose blocks are for it alone.
SALT_BYTES: Final = 32


class PreparedRequest(NamedTuple):
    """A prompt, and the strings of its request's parameters, as tokens.

    Args:
        prompt: the prompt as tokens.
        words: the strings as tokens.
        pooling: result of a pooled request, instead of generated tokens; None to generate.
    """

    prompt: TokenPrompt
    words: TokenizedParams
    pooling: Pooling | None = None


class RequestBuilder:
    """Checks requests against the engine's vocabulary, context length, number of sequences and features."""

    def __init__(
        self,
        config: ResolvedConfig,
        prompts: PromptReader,
        grammars: GrammarCompiler | None,
        end_token_ids: frozenset[int],
        cache_name: str,
        *,
        can_generate: bool = True,
    ) -> None:
        self.end_token_ids = end_token_ids
        self._can_generate = can_generate
        self._config = config
        self._prompts = prompts
        self._grammars = grammars
        self._cache_name = cache_name
        # Requests of one batch share their parameters, so the last tokenized strings are kept.
        self._last_words: tuple[SamplingParams | None, TokenizedParams] = (None, TokenizedParams())

    @property
    def image_reader(self) -> ImageReader | None:
        """Reader of images; None for a model that reads none."""
        return self._prompts.image_reader

    @property
    def max_images(self) -> int:
        """Maximum number of images of a prompt."""
        return 0 if self.image_reader is None else self.image_reader.max_images

    def prepare(self, prompt: Prompt, params: SamplingParams, *, add_special_tokens: bool) -> PreparedRequest:
        """Convert the texts of a request to tokens, which may take long; thread-safe."""
        if type(params) is not SamplingParams:
            raise InvalidParameter("sampling_params", params, "SamplingParams")
        if not isinstance(add_special_tokens, bool):
            raise InvalidParameter("add_special_tokens", add_special_tokens, "true or false")
        config, tokenizer = self._config, self._prompts.tokenizer
        params.check_for_model(vocab_size=config.vocab_size, max_num_seqs=config.max_num_seqs)
        if params.stop and tokenizer is None:
            raise UnsupportedFeature("stop", "this engine runs without a tokenizer; use stop_token_ids")
        read_params, words = self._last_words
        if read_params != params:
            words = tokenize_params(params, tokenizer, config.vocab_size)
            self._last_words = params.clone(), words
        return PreparedRequest(self._prompts.read(prompt, add_special_tokens=add_special_tokens), words)

    def prepare_pooled(
        self,
        prompt: Prompt | TextPair | PromptedText,
        pooling: Pooling,
        truncate_prompt_tokens: int | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> PreparedRequest:
        """Convert the prompt of a pooled request to tokens; thread-safe. Its sampling parameters are `NO_SAMPLING`."""
        if isinstance(prompt, TextPair):
            read, second_start = self._prompts.read_pair(prompt, truncate_prompt_tokens)
            return PreparedRequest(read, TokenizedParams(), pooling._replace(second_start=second_start))
        first = 0
        if isinstance(prompt, PromptedText):
            first = self._prompts.num_leading(prompt.prompt, add_special_tokens=add_special_tokens)
            prompt = prompt.prompt + prompt.text
        single: Prompt = prompt
        if truncate_prompt_tokens is not None:
            single = self._prompts.truncate(prompt, truncate_prompt_tokens, add_special_tokens=add_special_tokens)
        prepared = self.prepare(single, NO_SAMPLING, add_special_tokens=add_special_tokens)
        first = min(first, len(prepared.prompt.token_ids) - 1)  # a text may be cut within its prompt
        return prepared._replace(pooling=pooling._replace(first=first))

    def read(
        self,
        request_id: str,
        prompt: Prompt | PreparedRequest,
        params: SamplingParams,
        options: RequestOptions,
        *,
        arrival: int,
        can_guess: bool,
        adapter: LoadedAdapter | None = None,
    ) -> tuple[Request, str | None]:
        """Check a request and build it; return it with the text of its prompt, if any.

        See `Engine.add_request`. `arrival` is the request's number, `can_guess` is True if drafts can be proposed.
        """
        self._config.check_priority(options.priority)
        if not isinstance(prompt, PreparedRequest):
            prompt = self.prepare(prompt, params, add_special_tokens=options.add_special_tokens)
        tokens, words, pooling = prompt
        if pooling is None and not self._can_generate:
            raise UnsupportedFeature("prompt", "the checkpoint has no output head: this engine makes embeddings only")
        if params.speculative and not can_guess:
            raise UnsupportedFeature("speculative", "this engine guesses no tokens; see speculative_method")
        check_hand_over(self._config.kv_transfer, params)
        namespace, source = options.namespace(self._cache_name, None if adapter is None else adapter.digest), None
        if is_from_stranger(self._config.kv_transfer, params):
            namespace, source = namespace._replace(cache_salt=secrets.token_hex(SALT_BYTES)), namespace
        num_prompt = len(tokens.token_ids)
        grammar = None
        if params.thinking_token_budget is not None and (params.thinking is None or self._grammars is None):
            why = "no markers of thinking are known; chats know them from the model's template"
            raise UnsupportedFeature("thinking_token_budget", why)
        if params.structured_outputs is not None:
            if self._grammars is None:
                raise UnsupportedFeature("structured_outputs", "this engine runs without a tokenizer or an end token")
            grammar = self._grammars.open(params.structured_outputs)
        request = Request(
            request_id=request_id,
            prompt_token_ids=tokens.token_ids,
            params=params.clone(),  # the caller may assign to theirs
            max_total_tokens=self._max_total_tokens(num_prompt, params),
            end_token_ids=frozenset() if params.ignore_eos else self.end_token_ids,
            arrival=arrival,
            seed=self._seed(arrival) if params.seed is None else params.seed,
            priority=options.priority,
            flow=options.flow,
            namespace=namespace,
            source_namespace=source,
            media=tokens.media,
            retain_cache=options.retain_cache,
            bad_words=words.bad_words,
            dry_breakers=words.dry_breakers,
            grammar=grammar,
            pooling=pooling,
            adapter=None if adapter is None else adapter.slot,
        )
        allowed = params.allowed_token_ids
        if allowed is not None and request.suppressed_ids and set(request.suppressed_ids).issuperset(allowed):
            raise InvalidParameter("min_tokens", params.min_tokens, "0 where all allowed_token_ids end the output")
        return request, tokens.text

    def _max_total_tokens(self, num_prompt: int, params: SamplingParams) -> int:
        # A request of an encoder ends with its prompt, which may fill the context: the token after it is not computed.
        limit = self._config.max_prompt_len + 1
        return limit if params.max_tokens is None else min(limit, num_prompt + params.max_tokens)

    def _seed(self, number: int) -> int:
        """Return the seed of a request without one, derived from the engine's seed and the request's number."""
        data = self._config.seed.to_bytes(16, "little") + number.to_bytes(16, "little")
        return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> 1


def check_hand_over(config: KVTransferConfig | None, params: SamplingParams) -> None:
    """Check whether an engine can honour the hand-over that a request asks for."""
    asked = params.kv_transfer
    if asked is None or not (asked.do_remote_decode or asked.do_remote_prefill):
        return
    if config is None:
        raise UnsupportedFeature(NAME, "this engine hands no blocks over; see kv_transfer_config")
    if asked.do_remote_decode and not config.is_producer:
        raise UnsupportedFeature(f"{NAME}.do_remote_decode", f"this engine's kv_role is {config.kv_role}")
    if asked.do_remote_prefill and not config.is_consumer:
        raise UnsupportedFeature(f"{NAME}.do_remote_prefill", f"this engine's kv_role is {config.kv_role}")
    host, port = asked.remote_host, asked.remote_port
    if asked.do_remote_prefill and host is not None and port is not None:
        field = config.refused_field(host, port)
        if field is not None:
            allowed = "one that allowed_hosts in kv_connector_extra_config of this engine's kv_transfer_config names"
            raise InvalidParameter(f"{NAME}.{field}", getattr(asked, field), allowed)


def is_from_stranger(config: KVTransferConfig | None, params: SamplingParams) -> bool:
    """Return whether a request fetches blocks from an engine that proves nothing, since there is no token.

    Whoever listens at its address can forge blocks, so they are for this request alone.
    """
    asked = params.kv_transfer
    return config is not None and config.token is None and asked is not None and asked.do_remote_prefill


class TokenizedParams(NamedTuple):
    """The strings of one request's parameters as tokens; the fields are those of `Request`."""

    bad_words: tuple[tuple[int, ...], ...] = ()
    dry_breakers: tuple[int, ...] = ()


def tokenize_params(params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int) -> TokenizedParams:
    """Convert the strings of a request's parameters to tokens.

    A bad word gives two token sequences, without and with a leading space. A breaker gives its last token, when
    tokenized after other text.
    """
    breakers = params.dry_sequence_breakers if params.dry_multiplier else ()
    if tokenizer is None:
        if params.bad_words:
            raise UnsupportedFeature("bad_words", "this engine runs without a tokenizer; use logit_bias")
        if breakers:
            raise UnsupportedFeature("dry_sequence_breakers", "this engine runs without a tokenizer; give none")
        return TokenizedParams()
    bad_words: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        within = _encode(tokenizer, "bad_words", word)
        behind_space = _encode(tokenizer, "bad_words", f" {word.lstrip()}")
        for token_ids in (within, behind_space):
            if token_ids and max(token_ids) < vocab_size:
                bad_words[token_ids] = None
    single = {word[0] for word in bad_words if len(word) == 1}
    if params.allowed_token_ids is not None and single.issuperset(params.allowed_token_ids):
        raise InvalidParameter("bad_words", params.bad_words, "such that one of allowed_token_ids is left")
    ends = {_encode(tokenizer, "dry_sequence_breakers", f"a{breaker}")[-1] for breaker in breakers}
    return TokenizedParams(tuple(bad_words), tuple(sorted(ends)))


def _encode(tokenizer: Tokenizer, name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(tokenizer.encode(text, add_special_tokens=False))
    except InvalidParameter as error:
        raise InvalidParameter(name, error.value, error.allowed) from error

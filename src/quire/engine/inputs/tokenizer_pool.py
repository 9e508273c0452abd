"""Tokenizes and renders texts in threads, so that event loops and the engine do not wait."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar
from weakref import finalize

from quire.engine.inputs.prompts import Prompt, TextPair, too_long
from quire.engine.inputs.request_builder import PreparedRequest, RequestBuilder
from quire.errors import ImagesFull, InvalidParameter, RequestError, TextsFull, UnsupportedFeature
from quire.platform.threads import WorkerThreads
from quire.sequences.media import Media
from quire.sequences.params import SamplingParams
from quire.sequences.pooling import NO_SAMPLING, Pooling, PromptedText
from quire.text.chat.chat_prompt import ChatPrompt
from quire.text.chat.chat_template import require_chat_template
from quire.text.chat.images import ChatImage
from quire.text.chat.rendering import MAX_PROCESSES
from quire.text.tokenizers.tokenizer import Tokenizer
from quire.text.vocabulary.long_texts import TooManyTokens

# Characters (or tokens) up to which a text takes less time than a thread switch, and above which it takes long.
FEW_CHARS = 1 << 10
MANY_CHARS = 1 << 16
SHORT_THREADS = 2
# Threads that wait for the decoders of images and make patches of these, and threads that wait for the network.
IMAGE_THREADS = 2
FETCH_THREADS = 16
# Limit of the characters of waiting long texts and chats: 32 bodies of the default largest size.
MAX_WAITING_CHARS = 1 << 28
# Limit of the bytes of patches of images in requests; those of 16 megapixels take 384 MiB.
MAX_PATCH_BYTES = 2 << 30

P = TypeVar("P")
R = TypeVar("R")


class TokenizerPool:
    """Tokenizes texts and renders chats for event loops.

    Texts up to `MANY_CHARS` have a pool of threads; longer ones share one thread, so that they take only one core and
    the memory of one such text.
    """

    def __init__(
        self,
        reader: RequestBuilder,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        sanitizing: str = "always",
    ) -> None:
        self._reader = reader
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._sanitizing = sanitizing
        if tokenizer is not None:
            # This reads the vocabulary in one long call, now that no request waits for it.
            tokenizer.prepare_long_texts()
        self._short = WorkerThreads(SHORT_THREADS, "quire-texts")
        self._long = WorkerThreads(1, "quire-long-texts")
        # Threads that wait for the rendering processes.
        self._chats = WorkerThreads(MAX_PROCESSES, "quire-chats")
        self._images = WorkerThreads(IMAGE_THREADS, "quire-images")
        self._fetches = WorkerThreads(FETCH_THREADS, "quire-fetches")
        self._patches = LivePatches()
        self._num_waiting = 0

    @property
    def max_images(self) -> int:
        """Maximum number of images of a prompt; 0 for a model that reads none."""
        return self._reader.max_images

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The model's own end tokens."""
        return self._reader.end_token_ids

    async def prepare(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, add_special_tokens: bool = True
    ) -> list[PreparedRequest]:
        """Convert the prompts of a request, and the strings of its parameters, to tokens."""
        if not isinstance(params, SamplingParams):
            raise InvalidParameter("sampling_params", params, "SamplingParams")
        length = sum(map(len, params.bad_words)) + sum(map(_length, prompts))

        def prepare(prompt: Prompt) -> PreparedRequest:
            return self._reader.prepare(prompt, params, add_special_tokens=add_special_tokens)

        if not any(isinstance(prompt, ChatPrompt) and prompt.images for prompt in prompts):
            return await self.run(length, partial(_prepare_each, prompts, prepare))
        if self._patches.num_bytes() >= MAX_PATCH_BYTES:
            raise ImagesFull(MAX_PATCH_BYTES)
        with self._waiting(length):
            async with self._loaded(prompts) as loaded:
                prepared = await self._images.run(partial(_prepare_each, loaded, prepare))
        for each in prepared:
            self._patches.add(each.prompt.media)
        self._images.give_back_soon()
        return prepared

    @asynccontextmanager
    async def _loaded(self, prompts: Sequence[Prompt]) -> AsyncIterator[list[Prompt]]:
        """Give prompts whose images have their files; several images are read side by side."""
        reader = self._reader.image_reader
        assert reader is not None, "no conversation of a model without images has any"

        async def load(image: ChatImage) -> ChatImage:
            threads = self._fetches if image.is_remote else self._images
            return await threads.run(partial(reader.load, image))

        with ExitStack() as waiting:
            whole: list[Prompt] = []
            for prompt in prompts:
                if isinstance(prompt, ChatPrompt) and prompt.images:
                    images = await asyncio.gather(*map(load, prompt.images))
                    waiting.enter_context(self._waiting(sum(image.num_bytes for image in images)))
                    prompt = replace(prompt, images=tuple(images))
                whole.append(prompt)
            yield whole

    async def prepare_pooled(
        self,
        prompts: Sequence[Prompt | TextPair | PromptedText],
        pooling: Pooling,
        truncate_prompt_tokens: int | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> list[PreparedRequest]:
        """Convert the prompts of pooled requests to tokens; see `prepare` and `RequestBuilder.prepare_pooled`."""

        def prepare(prompt: Prompt | TextPair | PromptedText) -> PreparedRequest:
            return self._reader.prepare_pooled(
                prompt, pooling, truncate_prompt_tokens, add_special_tokens=add_special_tokens
            )

        return await self.run(sum(map(_length, prompts)), partial(_prepare_each, prompts, prepare))

    async def encode(self, text: str | ChatPrompt, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text; an image of a conversation has all of its tokens."""
        if isinstance(text, ChatPrompt) and text.images:
            (prepared,) = await self.prepare([text], NO_SAMPLING, add_special_tokens=add_special_tokens)
            return prepared.prompt.token_ids
        encode = partial(self._known_tokenizer.encode, text, add_special_tokens=add_special_tokens)
        try:
            return await self.run(len(text), partial(encode, max_tokens=self._max_model_len))
        except TooManyTokens as error:
            raise too_long(error, self._max_model_len, self._max_model_len) from error

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        hints: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """Render a conversation as a prompt; see `ChatTemplate.prompt`.

        Variables that the template does not use are left out; see `ChatTemplate.used_variables`.
        """
        tokenizer = self._known_tokenizer
        template = require_chat_template(tokenizer.chat_template)
        form = template.for_tools if tools else template

        def render() -> ChatPrompt:
            used = form.used_variables(variables or {}, hints or {})
            return form.prompt(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                variables=used,
                added_tokens=tokenizer.added_tokens,
                sanitizing=self._sanitizing,
                max_images=self.max_images,
            )

        with self._waiting(_chat_length(messages)):
            prompt = await self._chats.run(render)
        if len(prompt) > MANY_CHARS:
            self._chats.give_back_soon()
        return prompt

    async def run(self, length: int, work: Callable[[], R]) -> R:
        """Run work on texts in the thread for their length."""
        if length <= FEW_CHARS:
            return work()
        if length <= MANY_CHARS:
            return await self._short.run(work)
        try:
            with self._waiting(length):
                return await self._long.run(work)
        finally:
            self._long.give_back_soon()

    @contextmanager
    def _waiting(self, length: int) -> Iterator[None]:
        if self._num_waiting + length > MAX_WAITING_CHARS:
            raise TextsFull(MAX_WAITING_CHARS)
        self._num_waiting += length
        try:
            yield
        finally:
            self._num_waiting -= length

    def close(self) -> None:
        """End the threads; waiting work is cancelled."""
        for threads in (self._short, self._long, self._chats, self._images, self._fetches):
            threads.close()

    @property
    def _known_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise UnsupportedFeature("prompt", "this engine runs without a tokenizer; give token ids")
        return self._tokenizer


class LivePatches:
    """Counts the bytes of patches that requests hold; for one thread."""

    def __init__(self) -> None:
        self._num_bytes = 0
        # Sizes of patches that were freed, in any thread and at any time.
        self._freed: deque[int] = deque()

    def num_bytes(self) -> int:
        """Return the number of bytes."""
        while self._freed:
            self._num_bytes -= self._freed.popleft()
        return self._num_bytes

    def add(self, media: Sequence[Media]) -> None:
        """Count the patches of a prompt until they are freed."""
        for medium in media:
            values = getattr(medium.embeddings, "values", None)
            if values is not None:
                self._num_bytes += values.nbytes
                finalize(values, self._freed.append, values.nbytes).atexit = False


def _prepare_each(prompts: Sequence[P], prepare: Callable[[P], PreparedRequest]) -> list[PreparedRequest]:
    def at(idx: int, prompt: P) -> PreparedRequest:
        try:
            return prepare(prompt)
        except RequestError as error:
            error.prompt_idx = idx
            raise

    return [at(idx, prompt) for idx, prompt in enumerate(prompts)]


def _chat_length(messages: object) -> int:
    """Return the number of characters of messages' contents: texts, and URLs of images; other values count as 0."""
    contents = [message.get("content") for message in _as_list(messages) if isinstance(message, Mapping)]
    parts = chain.from_iterable(_as_list(content) or [content] for content in contents)
    return sum(map(_part_length, parts))


def _part_length(part: object) -> int:
    if isinstance(part, ChatImage):
        return part.num_bytes
    if isinstance(part, Mapping):
        image = part.get("image_url")
        texts = part.get("text"), image.get("url") if isinstance(image, Mapping) else image
    else:
        texts = part, None
    return sum(len(text) for text in texts if isinstance(text, str))


def _as_list(value: object) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _length(prompt: object) -> int:
    """Return the number of characters of a prompt; token ids count as 0, since they take no time."""
    if isinstance(prompt, TextPair):
        return len(prompt.first) + len(prompt.second)
    if isinstance(prompt, PromptedText):
        return len(prompt.prompt) + len(prompt.text)
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt")
    if isinstance(prompt, ChatPrompt):
        return len(prompt) + sum(image.num_bytes for image in prompt.images)
    return len(prompt) if isinstance(prompt, str) else 0

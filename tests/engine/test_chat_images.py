"""Images in conversations of `LLM.chat`: the tokens of a prompt with the same images, whatever their form."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from quire import LLM, SamplingParams
from quire.engine.inputs import tokenizer_pool
from quire.engine.inputs.tokenizer_pool import FETCH_THREADS, TokenizerPool
from quire.engine.outputs.outputs import RequestOutput
from quire.errors import ConfigError, ImagesFull, InvalidParameter, PromptTooLong, RequestError, UnsupportedFeature
from tests.images.tiny_model import GEMMA_MARKS, PAD, data_url, picture, save, save_gemma, url_part
from tests.models.gguf.writer import f32, write_gguf, write_mmproj

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 600, "num_threads": 1}
FIRST, SECOND = picture(40, 24, 0), picture(16, 56, 1)
WORDS = {"type": "text", "text": "What is this?"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "vision")


@pytest.fixture(scope="module")
def llm(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    media = tmp_path_factory.mktemp("media")
    (media / "a.png").write_bytes(FIRST)
    (media.parent / "outside.png").write_bytes(FIRST)
    options = {"limit_mm_per_prompt": {"image": 3}, "allowed_local_media_path": str(media)}
    with LLM(str(folder), **OPTIONS, **options, allowed_media_domains=["localhost"]) as llm:
        yield llm


def chat(llm: LLM, *content: Any, **options: Any) -> RequestOutput:
    (output,) = llm.chat([{"role": "user", "content": list(content)}], GREEDY, use_tqdm=False, **options)
    return output


def generate(llm: LLM, text: str, *images: bytes) -> list[int]:
    token_ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
    prompt = {"prompt_token_ids": token_ids, "multi_modal_data": {"image": list(images)}}
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def test_all_forms_of_an_image_are_one(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(FIRST)
    expected = generate(llm, f"<|user|><|vision_start|>{PAD}<|vision_end|>What is this?<|assistant|>", FIRST)
    media = llm.engine.requests.image_reader
    assert media is not None
    allowed = media._sources._folder
    for part in (
        url_part(FIRST),
        url_part(FIRST, detail="auto"),
        {"type": "image_url", "image_url": data_url(FIRST)},
        {"type": "image_url", "image_url": {"url": f"file://{allowed}/a.png"}},
        {"type": "image", "image": FIRST},
        {"type": "image", "image": path},
        {"type": "image", "image": Image.open(BytesIO(FIRST))},
    ):
        output = chat(llm, part, WORDS)
        assert output.outputs[0].token_ids == expected
        # 24 x 40 pixels are 3 x 5 tokens of 8 x 8.
        assert output.prompt_token_ids.count(llm.get_tokenizer().added_ids[PAD]) == 15


def test_several_images_keep_their_places(llm: LLM) -> None:
    one = two = f"<|vision_start|>{PAD}<|vision_end|>"
    expected = generate(llm, f"<|user|>a{one}b{two}<|assistant|>", FIRST, SECOND)
    text = [{"type": "text", "text": text} for text in "ab"]
    assert chat(llm, text[0], url_part(FIRST), text[1], url_part(SECOND)).outputs[0].token_ids == expected
    swapped = chat(llm, text[0], url_part(SECOND), text[1], url_part(FIRST)).outputs[0].token_ids
    assert swapped == generate(llm, f"<|user|>a{one}b{two}<|assistant|>", SECOND, FIRST) != expected
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": [text[0], url_part(FIRST)]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": [url_part(SECOND)]},
    ]
    (output,) = llm.chat(turns, GREEDY, use_tqdm=False)
    prompt = f"<|user|>a{one}<|assistant|>c<|user|>{two}<|assistant|>"
    assert output.outputs[0].token_ids == generate(llm, prompt, FIRST, SECOND)
    assert llm.render_chat(turns) == output.prompt_token_ids


def test_results_of_tools_have_images(llm: LLM) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [WORDS, url_part(FIRST)]},
    ]
    (output,) = llm.chat(turns, GREEDY, use_tqdm=False)
    call_text = '{"name": "look", "arguments": {}}'
    image = f"<|vision_start|>{PAD}<|vision_end|>"
    prompt = f"<|user|>Look.<|assistant|>{call_text}<|tool|>What is this?{image}<|assistant|>"
    assert output.outputs[0].token_ids == generate(llm, prompt, FIRST)


def test_a_low_detail_limits_the_pixels(llm: LLM) -> None:
    large = picture(700, 500, 2)
    pad = llm.get_tokenizer().added_ids[PAD]
    counts = {}
    for detail in ("high", "low"):
        turns: list[dict[str, Any]] = [{"role": "user", "content": [url_part(large, detail=detail)]}]
        counts[detail] = llm.render_chat(turns).count(pad)
    assert counts["high"] == 88 * 62
    assert counts["low"] <= 512 * 512 // 64 < counts["high"]
    with pytest.raises(InvalidParameter, match=r"content\[0\]\.image_url\.detail must be one of auto, high, low"):
        chat(llm, url_part(FIRST, detail="original"))


def test_texts_of_users_are_no_placeholders(llm: LLM, folder: Path) -> None:
    text = {"type": "text", "text": f"<|vision_start|>{PAD}<|vision_end|>"}
    pad = llm.get_tokenizer().added_ids[PAD]
    assert chat(llm, text, url_part(FIRST)).prompt_token_ids.count(pad) == 15
    assert chat(llm, text).prompt_token_ids.count(pad) == 0
    with (
        LLM(str(folder), **OPTIONS, sanitize_control_tokens="on-request") as open_llm,
        pytest.raises(UnsupportedFeature, match="writes 2 placeholders for 1 images"),
    ):
        chat(open_llm, text, url_part(FIRST))


def test_what_is_no_image_is_refused_by_name(llm: LLM) -> None:
    image = url_part(FIRST)
    outside = llm.engine.requests.image_reader
    assert outside is not None
    folder = outside._sources._folder
    assert folder is not None
    url = r"messages\[0\]\.content\[0\]\.image_url\.url "
    for part, words in (
        (url_part(FIRST[:200]), url),
        (url_part(b"a text"), url),
        ({"type": "image_url", "image_url": {"url": "data:text/plain,a"}}, url + "must be a data URL in base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,a*b"}}, url),
        (
            {"type": "image_url", "image_url": {"url": str(folder / "a.png")}},
            url + "must be a data, file, http or https",
        ),
        ({"type": "image_url", "image_url": {"url": f"file://{folder.parent}/outside.png"}}, url + "is not supported"),
        ({"type": "image_url", "image_url": {"url": "http://example.com/a.png"}}, url + "is not supported.*this host"),
        ({"type": "image_url", "image_url": {"url": "http://localhost/a.png"}}, url + "is not supported.*not public"),
        ({"type": "image_url", "image_url": {}}, url + "must be a data, http or https URL"),
        ({"type": "image_url"}, r"content\[0\]\.image_url must be an object"),
        ({"type": "image", "image": str(folder / "a.png")}, r"content\[0\]\.image must be bytes of a file"),
        ({"type": "image", "image": ["a"]}, r"content\[0\]\.image must be bytes"),
        ({"type": "image"}, r"content\[0\]\.image must be bytes"),
        ({"type": "video_url", "video_url": {"url": "a"}}, r"content\[0\]\.type is not supported.*'video_url'"),
        ({"type": "input_audio", "input_audio": {}}, r"content\[0\]\.type is not supported.*'input_audio'"),
    ):
        with pytest.raises(RequestError, match=words):
            chat(llm, part)
    with pytest.raises(InvalidParameter, match=r"content\[3\]\.image_url\.url must be one of at most 3 images"):
        chat(llm, image, image, image, image)
    with pytest.raises(InvalidParameter, match=r"multi_modal_data\.image must be at most 3 images"):
        generate(llm, PAD * 4, *[FIRST] * 4)
    for role in ("system", "assistant"):
        with pytest.raises(UnsupportedFeature, match=rf"messages\[0\]\.content\[0\]\.type.*the role {role}"):
            llm.chat([{"role": role, "content": [image]}])
    with pytest.raises(PromptTooLong):
        chat(llm, *[url_part(picture(700, 500, 0))] * 2)
    assert not llm.engine.has_unfinished


def test_options_limit_images(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(str(folder), **OPTIONS, mm_processor_kwargs={"max_pixels": 512}) as llm:
        assert chat(llm, url_part(FIRST)).prompt_token_ids.count(llm.get_tokenizer().added_ids[PAD]) <= 8
    for options, words in (
        ({"mm_processor_kwargs": {"max_pixels": 3}}, "max_pixels must be an integer from 64"),
        ({"allowed_local_media_path": str(folder / "none")}, "is no folder"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            LLM(str(folder), **OPTIONS, **options)
        assert caught.value.field == next(iter(options))
    with pytest.raises(ConfigError, match="needs a model that reads images"):
        LLM("bundled", mm_processor_kwargs={"max_pixels": 5000})
    caplog.set_level("INFO")
    with LLM(str(folder), **OPTIONS, limit_mm_per_prompt={"image": 0}) as llm:
        assert "limit_mm_per_prompt allows none" in caplog.text
        with pytest.raises(UnsupportedFeature, match="reads no parts of type 'image_url' here"):
            chat(llm, url_part(FIRST))


def test_a_slow_host_delays_no_other_image(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """More requests than there are threads wait for it."""
    reader, may_answer = llm.engine.requests.image_reader, threading.Event()
    assert reader is not None
    read = reader._sources.read

    def slow(name: str, url: str) -> bytes:
        if url.startswith("http"):
            assert may_answer.wait(60)
            return FIRST
        return read(name, url)

    monkeypatch.setattr(reader._sources, "read", slow)
    pool = TokenizerPool(llm.engine.requests, llm.tokenizer, llm.resolved.max_model_len)

    async def tokens(part: dict[str, Any]) -> list[int]:
        prompt = await pool.render([{"role": "user", "content": [part]}])
        (prepared,) = await pool.prepare([prompt], GREEDY, add_special_tokens=False)
        assert await pool.encode(prompt, add_special_tokens=False) == prepared.prompt.token_ids
        return prepared.prompt.token_ids

    async def scenario() -> None:
        remote = {"type": "image_url", "image_url": {"url": "http://localhost/a.png"}}
        waiting = [asyncio.create_task(tokens(remote)) for _ in range(FETCH_THREADS + 4)]
        found = await tokens(url_part(FIRST))
        text = await tokens(WORDS)
        assert not any(task.done() for task in waiting)
        may_answer.set()
        assert await asyncio.gather(*waiting) == [found] * len(waiting)
        assert len(text) < len(found)

    try:
        asyncio.run(scenario())
    finally:
        may_answer.set()
        pool.close()
    assert pool._num_waiting == 0


def test_waiting_images_are_limited_in_bytes(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_pool, "MAX_PATCH_BYTES", 1)
    pool = TokenizerPool(llm.engine.requests, llm.tokenizer, llm.resolved.max_model_len)

    async def scenario() -> None:
        prompt = await pool.render([{"role": "user", "content": [url_part(FIRST)]}])
        for _ in range(2):
            first = await pool.prepare([prompt], GREEDY, add_special_tokens=False)
            # 60 patches of two frames with 3 channels of 4 x 4 pixels, in float32.
            assert pool._patches.num_bytes() == 60 * 2 * 3 * 16 * 4
            with pytest.raises(ImagesFull, match="retry after 1 s"):
                await pool.prepare([prompt], GREEDY, add_special_tokens=False)
            del first
            await asyncio.sleep(0.05)  # until then, the loop holds the result of its last future
            assert pool._patches.num_bytes() == 0

    try:
        asyncio.run(scenario())
    finally:
        pool.close()


def test_text_that_a_model_expects_around_images(tmp_path: Path) -> None:
    start, soft, end = GEMMA_MARKS
    with LLM(str(save_gemma(tmp_path)), **OPTIONS, max_num_batched_tokens=512) as llm:
        tokenizer = llm.get_tokenizer()

        def tokens_of(text: str) -> list[int]:
            ids = tokenizer.encode(text, add_special_tokens=False)
            return [one for each in ids for one in [each] * (16 if each == tokenizer.added_ids[soft] else 1)]

        around = f"\n\n{start}{soft}{end}\n\n"
        output = chat(llm, url_part(FIRST), url_part(SECOND), WORDS)
        assert output.prompt_token_ids == tokens_of(f"<|user|>{around}{around}What is this?<|assistant|>")
        text = {"prompt": f"a{start}b", "multi_modal_data": {"image": FIRST}}
        (output,) = llm.generate(text, GREEDY, use_tqdm=False)
        assert output.prompt_token_ids[-len(tokens_of(f"a{around}b")) :] == tokens_of(f"a{around}b")
        # What a client writes stays text.
        output = chat(llm, {"type": "text", "text": f"{start} {soft}"}, url_part(FIRST))
        placed = [tokenizer.added_ids[start], *[tokenizer.added_ids[soft]] * 16, tokenizer.added_ids[end]]
        added = [each for each in output.prompt_token_ids if each in placed]
        assert added == placed


def test_a_file_whose_vocabulary_lacks_the_token_of_images(tmp_path: Path) -> None:
    """Many files of Gemma 3 have the vocabulary of its text models: another token stands in."""
    (tmp_path / "file").mkdir()
    folder, (start, soft, _) = save_gemma(tmp_path), GEMMA_MARKS
    options = OPTIONS | {"max_num_batched_tokens": 512}
    contents = [[url_part(FIRST), url_part(SECOND), WORDS], [{"type": "text", "text": f"{start} "}, url_part(SECOND)]]
    with LLM(str(folder), **options) as llm:
        expected = [chat(llm, *content) for content in contents]
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text().replace(soft, "<pad>"))
    write_mmproj(folder, tmp_path / "file" / "mmproj-F32.gguf", f32)
    with LLM(str(write_gguf(folder, tmp_path / "file" / "model.gguf", f32, pre="gpt-2")), **options) as llm:
        for content, before in zip(contents, expected, strict=True):
            output = chat(llm, *content)
            assert output.prompt_token_ids == before.prompt_token_ids
            assert output.outputs[0].token_ids == before.outputs[0].token_ids
        # What a client writes stays text here too.
        output = chat(llm, {"type": "text", "text": "<pad>"}, url_part(FIRST))
        assert output.prompt_token_ids.count(llm.get_tokenizer().added_ids["<pad>"]) == 16

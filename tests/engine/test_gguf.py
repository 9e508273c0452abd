"""A GGUF file, served: text in, text out, with all that a folder of the same model has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from quire import LLM, SamplingParams
from quire.errors import CheckpointError
from quire.models.checkpoints.checkpoint import locate
from tests.models.gguf.writer import f32, write_gguf

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPTS = ["Once upon a time, a small fox", "Tom", "The old sailor had a boat, and every day he"]


def small(name: str, shape: tuple[int, ...]) -> Type:
    """Types as a small file has them; rows that are no multiple of 256 need types of smaller blocks."""
    if "attn_v" in name or name.startswith("token_embd"):
        return Type.Q8_0
    return Type.Q5_0 if shape[-1] % 256 else Type.Q5_1


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bundled model in float32."""
    return write_gguf(locate("bundled"), tmp_path_factory.mktemp("gguf") / "exact.gguf", f32, pre="gpt-2")


def texts(model: str, **options: object) -> list[str]:
    with LLM(model, num_kv_blocks=64, **options) as llm:  # type: ignore[arg-type]
        return [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_the_same_texts_as_of_the_folder(exact: Path) -> None:
    assert texts(str(exact)) == texts("bundled", dtype="float32")


def test_a_folder_with_one_file_and_its_parts_is_the_file(exact: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tale.gguf").symlink_to(exact)
    (folder / "mmproj-tale.gguf").write_bytes(b"")
    assert texts(str(folder)) == texts(str(exact))
    (folder / "other.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"found other\.gguf, tale\.gguf: name the file"):
        LLM(str(folder))


def test_quantised_alone_and_together_and_chats(tmp_path: Path) -> None:
    """A row gets the same bits in every batch, so every history of a prompt ends alike."""
    path = write_gguf(locate("bundled"), tmp_path / "small.gguf", small, pre="gpt-2")
    assert path.stat().st_size < 3_000_000
    with LLM(str(path), num_kv_blocks=64, max_num_batched_tokens=16, max_num_seqs=8) as llm:
        alone = [llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].text for prompt in PROMPTS]
        assert [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == alone
        assert all(len(text.split()) > 5 for text in alone)
        (chat,) = llm.chat([{"role": "user", "content": "Tell me a story."}], GREEDY, use_tqdm=False)
        assert chat.outputs[0].text
    assert torch.get_num_threads() >= 1

"""Writes a checkpoint's language model as a GGUF file, as llama.cpp's own converter does, with a vocabulary of no text.

`python -m tests.published.converter LLAMA_CPP FOLDER FILE [--fuse-qkv]`: a program of its own, since llama.cpp's
folder has a version of the `gguf` package that other tests do not import.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any


def main(llama_cpp: str, folder: str, file: str, *options: str) -> None:
    """Convert a checkpoint."""
    sys.path[:0] = [str(Path(llama_cpp) / "gguf-py"), llama_cpp]
    conversion, gguf = import_module("conversion"), import_module("gguf")
    fields = conversion.ModelBase.load_hparams(Path(folder), False)
    kind = conversion.get_model_class(conversion.get_model_architecture(fields, conversion.ModelType.TEXT))
    # A model may be written by the class of another one.
    for one in _with_subclasses(conversion.ModelBase):
        one.set_vocab = _add_vocabulary
    # Of Qwen's models, those without layers of multi-token prediction.
    kind.no_mtp = True
    fuses = {"fuse_qkv": True} if options else {}
    with import_module("torch").inference_mode():
        kind(Path(folder), gguf.LlamaFileType.ALL_F32, Path(file), **fuses).write()


def _with_subclasses(kind: Any) -> Iterator[Any]:
    yield kind
    for one in kind.__subclasses__():
        yield from _with_subclasses(one)


def _add_vocabulary(self: Any) -> None:
    count = self.hparams.get("vocab_size") or self.hparams["text_config"]["vocab_size"]
    self.gguf_writer.add_tokenizer_model("gpt2")
    self.gguf_writer.add_tokenizer_pre("llama-bpe")
    self.gguf_writer.add_token_list([f"token {number}" for number in range(count)])
    self.gguf_writer.add_token_types([1] * count)


if __name__ == "__main__":
    main(*sys.argv[1:])

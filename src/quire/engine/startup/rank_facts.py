"""The comparison of ranks when they join, before any of them loads weights: versions, options and files.

```
 each rank   versions, options, digests of files --.
 rank 0                                            '-> all equal? -- yes --> the ranks connect, and load
                                                              '-- no: RanksDiffer on every rank
```

Ranks of other weights would compute nonsense without an error: the shapes are the same. All options are compared but
those whose declaration says otherwise, so that an option that is added later is compared too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from quire.config import EngineConfig, ModelConfig
from quire.distributed.links import LEADER, RankLinks
from quire.errors import RanksDiffer, shown
from quire.models.adapters.peft_config import CONFIG_FILE
from quire.models.adapters.peft_folder import TENSORS_FILE
from quire.models.checkpoints.checkpoint import Checkpoint, locate
from quire.models.loading.weight_samples import sample_weights
from quire.ops import choose_kernels
from quire.ops.cpu.native_library import MAX_LEVEL_VARIABLE, find_library
from quire.platform.bounded.files import open_file, user_path
from quire.platform.host_probe import pick_device
from quire.text.tokenizers.tokenizer_files import NAMES

# Time for all ranks to read their files; that of a slow file system, for models of many tensors.
FACTS_TIMEOUT_S: Final = 300.0
PACKAGE: Final = Path(__file__).parents[2]


class RankFact(NamedTuple):
    """Something that must be equal on all ranks.

    Args:
        field: option that it belongs to, for the error; None for a version.
        value: its value, or a digest; a JSON value.
    """

    field: str | None
    value: Any


def compare_ranks(links: RankLinks, config: EngineConfig) -> None:
    """Compare this rank with the others; all ranks of a model call this before they load it.

    Raises:
        RanksDiffer: a rank differs from rank 0; on every rank.
        ConfigError: a checkpoint cannot be read here, or on another rank.
        WorkerError: a rank has failed.
    """
    links.agree(rank_facts(config), check_equal, FACTS_TIMEOUT_S)


def rank_facts(config: EngineConfig) -> dict[str, RankFact]:
    """Return what this rank compares with the others, by a description of it; the most general differences first."""
    facts = {
        "the version of Quire": RankFact(None, code_digest()),
        "the version of PyTorch": RankFact(None, torch.__version__.partition("+")[0]),
    }
    facts |= {name: RankFact(name, value) for name, value in config.options_of_ranks().items()}
    if config.parallel.tensor_parallel_size > 1:
        # Each rank of a layer computes norms and routers itself, so other rounding would lead to other experts.
        name = f"the kernels and their level ({MAX_LEVEL_VARIABLE}, ATEN_CPU_CAPABILITY)"
        facts[name] = RankFact("kernels", _kernels(config.model))
    checkpoint = Checkpoint.open(config.model.model, config.model.revision)
    facts |= _checkpoint_facts("model", checkpoint)
    facts |= _tokenizer_facts(config, checkpoint)
    if config.speculative.draft_model is not None:
        facts |= _checkpoint_facts("draft_model", Checkpoint.open(config.speculative.draft_model))
    for name, path in config.lora.adapters.items():
        facts |= _adapter_facts(name, user_path(path))
    return facts


def check_equal(ranks: Sequence[Mapping[str, Sequence[Any]]]) -> None:
    """Refuse ranks whose facts differ.

    Args:
        ranks: `rank_facts` of each rank as JSON values, by the number of the rank.
    """
    first, *others = ranks
    for rank, facts in enumerate(others, LEADER + 1):
        for what in (*first, *(name for name in facts if name not in first)):
            (field, value), (_, other) = (each.get(what, (None, None)) for each in (first, facts))
            if value != other:
                name = field or facts.get(what, (None,))[0]
                raise RanksDiffer(
                    f"{what} must be the same on all ranks: {_described(value)} on rank {LEADER}, "
                    f"{_described(other)} on rank {rank}",
                    field=name,
                )


def _described(value: Any) -> str:
    """Return a value for an error; digests are shown as such, as they tell a user nothing else."""
    return "absent" if value is None else shown(value)


def _checkpoint_facts(option: str, checkpoint: Checkpoint) -> Iterator[tuple[str, RankFact]]:
    """Yield the facts of a checkpoint: configurations, the header of a GGUF file, and samples of all tensors."""
    configs = {"config.json": checkpoint.config, "generation_config.json": checkpoint.generation_config}
    for name, content in configs.items():
        text = json.dumps(dict(content), sort_keys=True, default=str)
        yield f"{name} of {option}", RankFact(option, _digest(text.encode()))
    if checkpoint.gguf_path is not None:  # its tokenizer, too
        start = min(tensor.offset for tensor in checkpoint.tensors.values() if tensor.path == checkpoint.gguf_path)
        with open_file(checkpoint.gguf_path) as file:
            yield f"the header of {option}", RankFact(option, _digest(file.read(start)))
    for name, digest in sample_weights(checkpoint.tensors).items():
        yield f"the tensor {shown(name)} of {option}", RankFact(option, digest)


def _tokenizer_facts(config: EngineConfig, checkpoint: Checkpoint) -> Iterator[tuple[str, RankFact]]:
    """Yield the digests of the files of the tokenizer, and of the chat template that an option names."""
    options = config.model
    if options.skip_tokenizer_init:
        return
    if options.tokenizer is not None or checkpoint.gguf_path is None:
        folder = checkpoint.folder if options.tokenizer is None else locate(options.tokenizer)
        for name in NAMES:
            yield f"{name} of the tokenizer", RankFact("tokenizer", _digest_of(folder / name))
    if options.chat_template is not None:
        yield "the file of chat_template", RankFact("chat_template", _digest_of(Path(options.chat_template)))


def _adapter_facts(name: str, folder: Path) -> Iterator[tuple[str, RankFact]]:
    """Yield the digests of the files of an adapter."""
    for file in (CONFIG_FILE, TENSORS_FILE):
        yield f"{file} of the adapter {shown(name)}", RankFact("lora_modules", _digest_of(folder / file))


def _digest(content: bytes) -> str:
    return blake2b(content, digest_size=8).hexdigest()


def _digest_of(path: Path) -> str | None:
    """Return the digest of a file; None for one that cannot be read, which is refused later if it is needed."""
    try:
        with open_file(user_path(str(path))) as opened:
            file: Any = opened  # the types of `file_digest` want a reader of more methods than `BinaryIO` declares
            return file_digest(file, "sha256").hexdigest()[:16]
    except (OSError, ValueError):  # a null character
        return None


def code_digest(folder: Path = PACKAGE) -> str:
    """Return the digest of Quire's modules, since versions from its repository share a number."""
    state = blake2b(digest_size=8)
    for path in sorted(folder.rglob("*.py")):
        state.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return state.hexdigest()


def _kernels(options: ModelConfig) -> str:
    device = pick_device(options.device)
    chosen = choose_kernels(torch.device(device), options.kernels)
    if device != "cpu":
        return chosen
    library = find_library()
    if chosen in ("auto", "native"):
        chosen = "torch" if isinstance(library, str) else f"native {library.level}"
    return f"{chosen}, {torch.backends.cpu.get_cpu_capability()}"

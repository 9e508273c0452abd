"""Hints for well-known names of vLLM, transformers and OpenAI that do not exist here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Final

_ONE_DEVICE: Final = "an engine runs in one process, on one device"
_NO_GRAPHS: Final = "there are no CUDA graphs and no compilation to configure"
_CHUNKS: Final = "prompts are always computed in chunks; use max_num_batched_tokens and max_inter_token_ms"
_NO_CODE: Final = "no code of a checkpoint is run; the architectures that run are built in"
_NO_LORA: Final = "adapters are not supported; merge them into the checkpoint"
_GRAMMARS: Final = "llguidance compiles all structured outputs; use grammar_timeout_s and grammar_memory_bytes"
_POOLS: Final = "every engine generates, embeds and scores; leave it out"
_TEXT_ONLY: Final = "prompts are text or token ids, with embeddings of media at most"

OPTION_HINTS: Final[Mapping[str, str]] = {
    "trust_remote_code": _NO_CODE,
    "hf_overrides": "a config.json is used as it is; change it in a copy of the folder",
    "hf_token": "set HF_TOKEN in the environment",
    "download_dir": "set HF_HOME in the environment",
    "load_format": "weights are read from safetensors files",
    "tokenizer_mode": "there is one kind of tokenizer, that of tokenizer.json",
    "tokenizer_revision": "revision is the model's; give a local folder for another version of a tokenizer",
    "code_revision": _NO_CODE,
    "runner": _POOLS,
    "task": _POOLS,
    "generation_config": "the model's own is read where it exists; give SamplingParams to override it",
    "override_generation_config": "give SamplingParams to each request",
    "enforce_eager": _NO_GRAPHS,
    "compilation_config": _NO_GRAPHS,
    "max_seq_len_to_capture": _NO_GRAPHS,
    "tensor_parallel_size": _ONE_DEVICE,
    "pipeline_parallel_size": _ONE_DEVICE,
    "data_parallel_size": _ONE_DEVICE,
    "enable_expert_parallel": _ONE_DEVICE,
    "distributed_executor_backend": _ONE_DEVICE,
    "disable_custom_all_reduce": _ONE_DEVICE,
    "num_gpu_blocks_override": "use num_kv_blocks",
    "cpu_offload_gb": "weights stay on the device; quantization makes them smaller",
    "kv_offloading_size": "use swap_space, which also keeps evicted prefixes",
    "calculate_kv_scales": "an fp8 cache has no scales; int8 has one for each token and head",
    "prefix_caching_hash_algo": "prefixes are found in a tree of tokens, without hashes",
    "disable_sliding_window": "windows are part of the model",
    "disable_log_stats": "only the server logs statistics; use --log-interval",
    "enable_log_requests": "the server's --log-level decides what is logged",
    "enable_chunked_prefill": _CHUNKS,
    "max_num_partial_prefills": _CHUNKS,
    "max_long_partial_prefills": _CHUNKS,
    "long_prefill_token_threshold": _CHUNKS,
    "async_scheduling": "steps are planned one after the other",
    "max_logprobs": "a request may ask for 64; the server's --max-request-logprobs bounds an answer",
    "enable_lora": _NO_LORA,
    "max_loras": _NO_LORA,
    "max_lora_rank": _NO_LORA,
    "guided_decoding_backend": _GRAMMARS,
    "structured_outputs_config": _GRAMMARS,
    "limit_mm_per_prompt": _TEXT_ONLY,
    "mm_processor_kwargs": _TEXT_ONLY,
    "logits_processors": "give them to SamplingParams",
}

SAMPLING_HINTS: Final[Mapping[str, str]] = {
    "truncate_prompt_tokens": "truncate the prompt before the request, as token ids for instance",
    "spaces_between_special_tokens": "special tokens are written as they are",
    "guided_decoding": "use structured_outputs",
    "response_format": "use structured_outputs",
    "extra_args": "it belongs to extensions of another engine",
    "flat_logprobs": "log probabilities are always held in flat arrays",
    "skip_reading_prefix_cache": "use a unique cache_salt for the request",
    "use_beam_search": "use beam_width",
    "num_beams": "use beam_width",
    "num_return_sequences": "use n",
    "do_sample": "use temperature, 0 for the likeliest tokens",
    "max_new_tokens": "use max_tokens",
    "max_completion_tokens": "use max_tokens",
    "top_logprobs": "use logprobs",
}


def hint_for(name: str, hints: Mapping[str, str], known: Collection[str]) -> str:
    """Return advice on a name that does not exist here, with a leading semicolon; "" where there is none.

    Args:
        name: option or parameter as the user wrote it.
        hints: advice on well-known names.
        known: names that exist.
    """
    if name in hints:
        return f"; {hints[name]}"
    similar = get_close_matches(name, known, n=1)
    return f"; did you mean {similar[0]}?" if similar else ""

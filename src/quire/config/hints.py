"""Names of other projects, and removed names: their neutral values, and hints for other values."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Final

from quire.errors import ConfigError, InvalidParameter, shown

logger = logging.getLogger(__name__)

# The neutral values of a name, which have no effect and are ignored, and the reason why other values are refused. None
# is always neutral. If None stands for the neutral values, all values are neutral: they affect speed or logs at most.
Foreign = tuple[Iterable[Any] | None, str]

_FLAGS: Final = (False, True)
_ONE_DEVICE: Final = "an engine runs on one device; tensor_parallel_size shares its model among several processes"
_NO_GRAPHS: Final = "nothing is compiled; CUDA graphs have cudagraph_mode, cudagraph_capture_sizes and enforce_eager"
_CHUNKS: Final = "prompts are always computed in chunks; use max_num_batched_tokens and max_inter_token_ms"
_NO_CODE: Final = "no code of a checkpoint is run; the architectures that run are built in"
_GRAMMARS: Final = "llguidance compiles all structured outputs; use grammar_timeout_s and grammar_memory_bytes"
_POOLS: Final = "every engine generates, embeds and scores; leave it out"
_MEDIA: Final = "prompts are text or token ids, with images, or with embeddings of media from Python"
_FILES: Final = "weights are read from the folder or file of the model, in the formats of docs/checkpoints.md"
_LOGS: Final = "the server's --log-level and --log-interval decide what is logged"
_TEMPLATE: Final = "the template comes with the model; LLM.chat takes another one"
_OF_SERVE: Final = "it is an option of `quire serve`"
_PROXY: Final = "a proxy before the server does that"
_PARSER: Final = "it is an option of `quire serve` and an argument of LLM.chat"
_METRICS: Final = "/metrics has all metrics, and --otlp-traces-endpoint sends spans"
_ORIGINS: Final = "an origin of --allow-origin may send GET and POST with every header, and a key is no cookie"
_STATES: Final = "states of recurrent layers have one dtype, and state_snapshot_interval decides which are kept"

# Options of earlier versions, refused with the reason for a release.
REMOVED: Final[Mapping[str, Foreign]] = {
    "num_speculative_branches": (
        (1,),
        "alternative drafts were removed, since they were no faster; leave it out, and set num_speculative_tokens for "
        "longer drafts",
    ),
    "api_server_count": (
        (0, 1),
        "front processes were removed, since one process serves HTTP about as fast; start `quire serve --replicas N` "
        "for more engines behind one address",
    ),
}

OPTION_HINTS: Final[Mapping[str, Foreign]] = {
    **REMOVED,
    # Neither value runs code: a model either has a built-in architecture or is refused.
    "trust_remote_code": (_FLAGS, _NO_CODE),
    "code_revision": ((), _NO_CODE),
    "hf_overrides": (({},), "a config.json is used as it is; change it in a copy of the folder"),
    "hf_config_path": ((), "config.json is read from the model's folder"),
    "hf_token": ((), "set HF_TOKEN in the environment"),
    "download_dir": ((), "set HF_HOME in the environment"),
    "load_format": (("auto", "safetensors", "gguf"), _FILES),
    "config_format": (("auto", "hf"), _FILES),
    "model_loader_extra_config": (({},), _FILES),
    "ignore_patterns": (([],), _FILES),
    "safetensors_load_strategy": (("lazy",), _FILES),
    "pt_load_map_location": (("cpu",), _FILES),
    "max_parallel_loading_workers": (None, _FILES),
    "rope_scaling": (({},), "a config.json is used as it is; change it in a copy of the folder"),
    "rope_theta": ((), "a config.json is used as it is; change it in a copy of the folder"),
    "use_tqdm_on_load": (_FLAGS, "loading shows no progress bar"),
    "tokenizer_mode": (("auto", "hf", "slow", "fast"), "there is one kind of tokenizer, that of tokenizer.json"),
    "tokenizer_revision": ((), "revision is the model's; give a local folder for another version of a tokenizer"),
    "skip_mm_profiling": (_FLAGS, _MEDIA),
    "runner": (("auto", "generate", "pooling"), _POOLS),
    "convert": (("auto", "none", "embed"), _POOLS),
    "task": (("auto", "generate", "embed", "score"), _POOLS),
    "pooler_config": ((), _POOLS),
    "override_generation_config": (({},), "give SamplingParams to each request"),
    "chat_template_content_format": (("auto", "string"), "a template gets the form of content that it reads, by role"),
    "trust_request_chat_template": ((False,), _TEMPLATE),
    "default_chat_template_kwargs": (({},), "it is an option of `quire serve`; LLM.chat takes chat_template_kwargs"),
    "response_role": (("assistant",), "answers have the role assistant"),
    "enable_auto_tool_choice": (_FLAGS, "calls are allowed wherever the model's template knows tools"),
    "tool_call_parser": (("auto",), _PARSER),
    "tool_parser_plugin": (("",), "the formats of tool calls are built in"),
    "reasoning_parser": (("auto",), _PARSER),
    "enable_reasoning": (_FLAGS, "reasoning is split off wherever the model's template shows its marks"),
    "exclude_tools_when_tool_choice_none": ((False,), "tools stay in the prompt, so that its prefix stays cached"),
    "compilation_config": (None, _NO_GRAPHS),
    "optimization_level": (None, _NO_GRAPHS),
    "performance_mode": (None, _NO_GRAPHS),
    "max_seq_len_to_capture": (None, _NO_GRAPHS),
    "max_cudagraph_capture_size": (None, _NO_GRAPHS),
    "data_parallel_size": ((1,), _ONE_DEVICE),
    "data_parallel_size_local": ((1,), _ONE_DEVICE),
    "data_parallel_backend": (("mp",), _ONE_DEVICE),
    "data_parallel_hybrid_lb": ((False,), _ONE_DEVICE),
    "data_parallel_external_lb": ((False,), _ONE_DEVICE),
    "decode_context_parallel_size": ((1,), _ONE_DEVICE),
    "prefill_context_parallel_size": ((1,), _ONE_DEVICE),
    "nnodes": ((1,), _ONE_DEVICE),
    "node_rank": ((0,), _ONE_DEVICE),
    "enable_eplb": ((False,), _ONE_DEVICE),
    "headless": ((False,), _ONE_DEVICE),
    "distributed_executor_backend": (("uni", "mp"), _ONE_DEVICE),
    "worker_cls": (("auto",), _ONE_DEVICE),
    "worker_extension_cls": (("",), _ONE_DEVICE),
    "ray_workers_use_nsight": ((False,), _ONE_DEVICE),
    "all2all_backend": (None, _ONE_DEVICE),
    "enable_dbo": (_FLAGS, _ONE_DEVICE),
    "disable_custom_all_reduce": (_FLAGS, _ONE_DEVICE),
    "disable_frontend_multiprocessing": (_FLAGS, _ONE_DEVICE),
    "num_gpu_blocks_override": ((), "use num_kv_blocks"),
    "cpu_offload_gb": ((0, 0.0), "weights stay on the device; quantization makes them smaller"),
    "kv_offloading_size": ((0, 0.0), "use swap_space, which also keeps evicted prefixes"),
    "kv_offloading_backend": (("native",), "use swap_space, which also keeps evicted prefixes"),
    "use_v2_block_manager": (_FLAGS, "there is one memory manager"),
    "disable_hybrid_kv_cache_manager": (_FLAGS, "one arena has the blocks of all kinds of layers"),
    "kv_sharing_fast_prefill": (_FLAGS, "layers after the last cache compute the rows that are needed only"),
    "mamba_cache_dtype": (("auto",), _STATES),
    "mamba_ssm_cache_dtype": (("auto",), _STATES),
    "mamba_block_size": (None, _STATES),
    "mamba_cache_mode": (None, _STATES),
    "calculate_kv_scales": ((False,), "an fp8 cache has no scales; int8 has one for each token and head"),
    "prefix_caching_hash_algo": (None, "prefixes are found in a tree of tokens, without hashes"),
    "disable_sliding_window": ((False,), "windows are part of the model"),
    "disable_cascade_attn": (_FLAGS, "the attention kernels read shared blocks once where that is faster"),
    "attention_backend": (("auto",), "use kernels"),
    "moe_backend": (("auto",), "use kernels"),
    "attention_config": (({},), "use kernels"),
    "kernel_config": (({},), "use kernels"),
    "enable_flashinfer_autotune": (_FLAGS, "use kernels"),
    "disable_log_stats": (_FLAGS, _LOGS),
    "disable_log_requests": (_FLAGS, _LOGS),
    "enable_log_outputs": ((False,), _LOGS),
    "enable_log_deltas": (_FLAGS, _LOGS),
    "disable_access_log_for_endpoints": (None, _LOGS),
    "log_config_file": ((), _LOGS),
    "log_error_stack": (_FLAGS, _LOGS),
    "max_log_len": (None, _LOGS),
    "disable_uvicorn_access_log": (_FLAGS, _LOGS),
    "uvicorn_log_level": (None, _LOGS),
    "aggregate_engine_logging": (_FLAGS, _LOGS),
    "show_hidden_metrics_for_version": (None, _METRICS),
    "collect_detailed_traces": ((), _METRICS),
    "kv_cache_metrics": (_FLAGS, "use kv_cache_metrics_sample"),
    "cudagraph_metrics": ((False,), _METRICS),
    "enable_mfu_metrics": ((False,), _METRICS),
    "enable_prompt_tokens_details": (_FLAGS, "usage always has the cached tokens"),
    "enable_server_load_tracking": (_FLAGS, "/load always answers"),
    "enable_tokenizer_info_endpoint": (_FLAGS, "/tokenizer_info always answers"),
    "disable_fastapi_docs": (_FLAGS, "the server has no such pages"),
    "enable_offline_docs": ((False,), "the server has no such pages"),
    "enable_request_id_headers": (_FLAGS, "every answer has its x-request-id"),
    "enable_force_include_usage": ((False,), "a client asks for it with stream_options.include_usage"),
    "return_tokens_as_token_ids": ((False,), "a request asks for it"),
    "enable_chunked_prefill": ((True,), _CHUNKS),
    "max_num_partial_prefills": (None, _CHUNKS),
    "max_long_partial_prefills": (None, _CHUNKS),
    "long_prefill_token_threshold": ((0,), _CHUNKS),
    "disable_chunked_mm_input": ((False,), _CHUNKS),
    "num_scheduler_steps": ((1,), "async_scheduling launches a step before the tokens of the last one are read"),
    "num_lookahead_slots": ((0,), "use num_speculative_tokens"),
    "scheduler_cls": ((), "use scheduling_policy"),
    "stream_interval": ((1,), "each step's tokens are sent at once"),
    "max_logprobs": (range(65), "a request may ask for 64; the server's --max-request-logprobs bounds an answer"),
    "logprobs_mode": (("raw_logprobs",), "log probabilities are those of the model, before temperature and masks"),
    "max_loras": (None, "all loaded adapters may be in one step; max_cpu_loras bounds their number"),
    "fully_sharded_loras": ((False,), _ONE_DEVICE),
    "lora_dtype": (("auto",), "adapters are computed in the dtype of the model"),
    "guided_decoding_backend": (("auto", "guidance", "xgrammar", "outlines"), _GRAMMARS),
    "structured_outputs_config": (({}, {"backend": "auto"}, {"backend": "guidance"}), _GRAMMARS),
    "enable_mm_embeds": ((False,), _MEDIA),
    "interleave_mm_strings": ((False,), _MEDIA),
    "media_io_kwargs": (({},), _MEDIA),
    "mm_encoder_tp_mode": (None, _MEDIA),
    "mm_processor_cache_type": (None, _MEDIA),
    "mm_processor_cache_gb": (None, _MEDIA),
    "disable_mm_preprocessor_cache": (_FLAGS, _MEDIA),
    "enable_prompt_embeds": ((False,), _MEDIA),
    "logits_processors": (([],), "give them to SamplingParams"),
    "enable_sleep_mode": ((False,), "an engine frees its memory when it is closed"),
    "fail_on_environ_validation": (_FLAGS, "variables of vLLM's are not read"),
    "additional_config": (({},), "it belongs to extensions of another engine"),
    "middleware": (([],), _PROXY),
    "root_path": (("",), _PROXY),
    "ssl_keyfile": ((), _OF_SERVE),
    "ssl_certfile": ((), _OF_SERVE),
    "ssl_ca_certs": ((), _PROXY),
    "ssl_cert_reqs": ((0,), _PROXY),
    "enable_ssl_refresh": ((False,), "a certificate is read when the server starts"),
    "uds": ((), _OF_SERVE),
    "allowed_origins": (([],), _OF_SERVE),
    "allow_credentials": (_FLAGS, _ORIGINS),
    "allowed_methods": ((["*"],), _ORIGINS),
    "allowed_headers": ((["*"],), _ORIGINS),
}

SAMPLING_HINTS: Final[Mapping[str, str]] = {
    "truncate_prompt_tokens": "truncate the prompt before the request, as token ids for instance",
    "spaces_between_special_tokens": "special tokens are written as they are",
    "guided_decoding": "use structured_outputs",
    "response_format": "use structured_outputs",
    "flat_logprobs": "log probabilities are always held in flat arrays",
    "skip_reading_prefix_cache": "use a unique cache_salt for the request",
    "use_beam_search": "use beam_width",
    "num_beams": "use beam_width",
    "num_return_sequences": "use n",
    "do_sample": "use temperature, 0 for the likeliest tokens",
    "max_new_tokens": "use max_tokens",
    "num_predict": "use max_tokens",
    "max_completion_tokens": "use max_tokens",
    "top_logprobs": "use logprobs",
}

# vLLM's names of parsers whose format has another name in Quire.
PARSER_ALIASES: Final[Mapping[str, Mapping[str, str]]] = {
    "tool_call_parser": {
        "cohere_command3": "cohere",
        "cohere_command4": "cohere",
        "deepseek_v3": "deepseek",
        "deepseek_v31": "deepseek",
        "ernie45": "hermes",
        "glm45": "glm",
        "glm47": "glm",
        "granite-20b-fc": "granite_20b",
        "granite4": "hermes",
        "hunyuan_a13b": "hunyuan",
        "jamba": "hunyuan",
        "llama3_json": "llama3",
        "llama4_json": "llama3",
        "llama4_pythonic": "pythonic",
        "minimax": "hunyuan",
        "mimo": "qwen3_xml",
        "openai": "harmony",
        "phi4_mini_json": "phi4_mini",
        "poolside_v1": "glm",
        "qwen3_coder": "qwen3_xml",
        "step3p5": "qwen3_xml",
    },
    "reasoning_parser": {
        "cohere_command3": "cohere",
        "cohere_command4": "cohere",
        "deepseek_r1": "think",
        "deepseek_v3": "think",
        "deepseek_v4": "think",
        "deepseek_v41": "think",
        "ernie45": "think_answer",
        "glm45": "think",
        "glm47": "think",
        "holo2": "think",
        "hunyuan_a13b": "think_answer",
        "hy_v3": "think",
        "kimi_k2": "think",
        "mimo": "think",
        "minimax_m2": "think",
        "nemotron_v3": "think",
        "olmo3": "think",
        "openai_gptoss": "harmony",
        "poolside_v1": "think",
        "qwen3": "think",
        "step3": "think",
        "step3p5": "think",
    },
}


def find_parser(option: str, name: object, parsers: Collection[str]) -> str:
    """Return Quire's name of a format of tool calls or of reasoning.

    Args:
        option: "tool_call_parser" or "reasoning_parser".
        name: name of the format, in Quire or in vLLM.
        parsers: names that exist in Quire.

    Raises:
        InvalidParameter: the name is unknown.
    """
    others = PARSER_ALIASES[option]
    if isinstance(name, str) and (parser := others.get(name, name)) in parsers:
        return parser
    aliases = ", ".join(f"{theirs} ({ours})" for theirs, ours in others.items())
    allowed = f"one of {', '.join(parsers)}, or of vLLM's names {aliases}; auto finds the format in the chat template"
    raise InvalidParameter(option, name, allowed)


def is_neutral(value: object, row: Foreign) -> bool:
    """Return whether a value of a name that does not exist in Quire is neutral."""
    neutral, _ = row
    # The type counts too: 0 and False are equal in Python.
    return value is None or neutral is None or any(type(value) is type(one) and value == one for one in neutral)


def drop_neutral(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without neutral ones of `OPTION_HINTS`; log one warning that names the dropped options.

    Args:
        options: options by name.

    Raises:
        ConfigError: a name of `OPTION_HINTS` has another value.
    """
    foreign = [name for name in options if name in OPTION_HINTS]
    for name in foreign:
        neutral, hint = OPTION_HINTS[name]
        if not is_neutral(options[name], OPTION_HINTS[name]):
            allowed = " or ".join([*map(shown, [*(neutral or ())][:4]), "absent"])
            raise ConfigError(f"{name} must be {allowed}, got {shown(options[name])}: {hint}", field=name)
    if foreign:
        logger.warning("ignored options that change nothing here: %s", ", ".join(sorted(foreign)))
    return {name: value for name, value in options.items() if name not in OPTION_HINTS}


def hint_for(name: str, hints: Mapping[str, str], names: Collection[str]) -> str:
    """Return advice on a name that does not exist in Quire, with a leading semicolon; "" without advice.

    Args:
        name: option or parameter as the user wrote it.
        hints: advice on well-known names.
        names: names that exist.
    """
    if name in hints:
        return f"; {hints[name]}"
    # Names that are less similar mean something else: `stop` is not `top_p`.
    similar = get_close_matches(name, names, n=1, cutoff=0.75)
    return f"; did you mean {similar[0]}?" if similar else ""

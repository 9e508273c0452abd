"""Adapters of single experts: beside PEFT's own model, beside checkpoints with their sums, and many in one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire import LLM, LoRARequest, SamplingParams
from quire.distributed.rank_group import RankGroup
from quire.models.checkpoints.checkpoint import Checkpoint
from tests.conformance.checkpoints import FAMILIES, save_checkpoint
from tests.distributed.in_threads import native_library, run_groups, run_ranks
from tests.distributed.test_pipeline import make_stages
from tests.models.adapters.expert_folders import linear_adapter, merged_checkpoint
from tests.models.adapters.test_ranks import World, adapted_steps
from tests.models.family_cases import EXPERT_CASES
from tests.models.test_sharding import assert_near
from tests.models.test_stages import assert_equal
from tests.ops.backends import LIBRARIES

PROMPT = [idx * 7 % 190 + 5 for idx in range(37)]
MEASURED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "num_threads": 1, "max_model_len": 128}
OPTIONS |= {"num_kv_blocks": 400, "block_size": 8}
NAMES = ("gpt-oss", "qwen3.5-moe", "gemma4-moe", "llama4", "lfm2-moe", "granite4-moe", "qwen3-moe", "mixtral")
SLOW_FAMILIES = [pytest.param(name, marks=pytest.mark.slow) for name in NAMES]


def save(family: str, folder: Path) -> Path:
    """Write a random checkpoint of a family with experts."""
    if family in FAMILIES:
        return save_checkpoint(family, folder)
    config_class, model_class, options = EXPERT_CASES[family]
    torch.manual_seed(20)
    sizes = {"vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"max_position_embeddings": 256}
    model_class(config_class(**{**sizes, "initializer_range": 0.2, **options})).save_pretrained(folder)
    return folder


def measured(llm: LLM, adapter: LoRARequest | None = None, prompt: list[int] = PROMPT) -> torch.Tensor:
    """Return the log probability of each token of a prompt but the first."""
    (output,) = llm.generate([prompt], MEASURED, lora_request=adapter, use_tqdm=False)
    known: Any = output.prompt_logprobs
    return torch.tensor([known[at][token].logprob for at, token in enumerate(prompt) if at])


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", SLOW_FAMILIES)
def test_log_probabilities_are_those_of_peft(family: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = save(family, tmp_path / "model")
    base: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    names = {name for name, each in base.named_parameters() if each.dim() == 3 and ".experts." in name}
    routers = {name for name in base.state_dict() if name.endswith((".gate.weight", ".router.weight"))}
    targets = {".".join(name.split(".")[-3:]) for name in names | (set() if family == "llama4" else routers)}
    options = {
        "r": 3,
        "lora_alpha": 5,
        "rank_pattern": {"experts.down_proj": 4},
        "alpha_pattern": {".*gate_up_proj": 7},
    }
    torch.manual_seed(3)
    adapted = peft.get_peft_model(
        base, peft.LoraConfig(**options, target_modules=["q_proj", "o_proj"], target_parameters=sorted(targets))
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
        adapted.save_pretrained(tmp_path / "adapter")
        logits = adapted(torch.tensor([PROMPT])).logits[0].float().log_softmax(-1)
    expected = logits[torch.arange(len(PROMPT) - 1), PROMPT[1:]]
    with LLM(str(model), enable_lora=True, **OPTIONS) as llm:
        adapter = LoRARequest("a", 1, str(tmp_path / "adapter"))
        assert_close(measured(llm, adapter), expected)
        assert (measured(llm) - expected).abs().max() > 0.1
    with LLM(str(model), merge_lora=True, lora_modules={"a": str(tmp_path / "adapter")}, **OPTIONS) as llm:
        assert_close(measured(llm), expected)


@pytest.mark.parametrize("family", SLOW_FAMILIES)
def test_linear_layers_of_experts_give_what_their_sums_give(family: str, tmp_path: Path) -> None:
    model = save(family, tmp_path / "model")
    adapter = linear_adapter(model, tmp_path / "adapter")
    with LLM(str(merged_checkpoint(model, adapter, tmp_path / "sums")), **OPTIONS) as llm:
        expected = measured(llm)
    with LLM(str(model), enable_lora=True, **OPTIONS) as llm:
        assert_close(measured(llm, LoRARequest("a", 1, str(adapter))), expected)
        assert (measured(llm) - expected).abs().max() > 0.1
    with LLM(str(model), merge_lora=True, lora_modules={"a": str(adapter)}, **OPTIONS) as llm:
        assert_close(measured(llm), expected)


@pytest.mark.parametrize("family", ["gpt-oss", pytest.param("qwen3-moe", marks=pytest.mark.slow)])
def test_rows_of_a_batch_get_their_own_adapters(family: str, tmp_path: Path) -> None:
    """Alone, beside others and none, and from the prefix cache, whose blocks are of one adapter."""
    model = save(family, tmp_path / "model")
    adapters = [str(linear_adapter(model, tmp_path / f"a{seed}", seed, rank=2 + seed)) for seed in range(2)]
    requests = [LoRARequest("a0", 1, adapters[0]), None, LoRARequest("a1", 2, adapters[1]), LoRARequest("a0")]
    prompts = [PROMPT[: 20 + 4 * idx] for idx in range(3)] + [PROMPT[:20]]
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=1)

    def logprobs(llm: LLM, *which: int) -> list[list[float]]:
        asked = [prompts[idx] for idx in which], params
        outputs = llm.generate(*asked, lora_request=[requests[idx] for idx in which], use_tqdm=False)
        return [[output.outputs[0].cumulative_logprob, *output.outputs[0].token_ids] for output in outputs]  # type: ignore[list-item]

    with LLM(str(model), enable_lora=True, enable_prefix_caching=True, **OPTIONS) as llm:
        alone = [logprobs(llm, idx)[0] for idx in range(3)]
        llm.reset_prefix_cache()
        together = logprobs(llm, 0, 1, 2, 3)
        cached = logprobs(llm, 0, 1, 2, 3)
    for found in (together, cached):
        torch.testing.assert_close(torch.tensor(found[:3]), torch.tensor(alone), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(torch.tensor(found[3]), torch.tensor(alone[0]), rtol=1e-4, atol=1e-4)
    assert len({tuple(each) for each in alone}) == 3


@pytest.mark.skipif("avx2" not in LIBRARIES, reason="deterministic engines need native kernels")
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow) for name in ("gpt-oss", "qwen3-moe", "mixtral")]
)
def test_a_deterministic_engine_gives_the_same_bits_beside_other_adapters(family: str, tmp_path: Path) -> None:
    model = save(family, tmp_path / "model")
    adapter = LoRARequest("a", 1, str(linear_adapter(model, tmp_path / "adapter")))
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=2)
    options: dict[str, Any] = OPTIONS | {"dtype": "bfloat16", "deterministic": True, "enable_prefix_caching": False}

    def bits(llm: LLM, prompts: list[list[int]], adapters: list[LoRARequest | None]) -> list[Any]:
        outputs = llm.generate(prompts, params, lora_request=adapters, use_tqdm=False)
        return [[*map(repr, output.outputs[0].logprobs or ())] for output in outputs]

    with LLM(str(model), enable_lora=True, **options) as llm:
        for start in range(4):
            prompts, adapters = [PROMPT[start:], PROMPT[start + 3 :], PROMPT[5:]], [None, adapter, None]
            together = bits(llm, prompts, adapters)
            assert together == [bits(llm, [prompts[idx]], [adapters[idx]])[0] for idx in range(3)]


@pytest.mark.slow
@pytest.mark.skipif("avx2" not in LIBRARIES, reason="native kernels are compared with torch's")
@pytest.mark.parametrize(
    ("family", "quantization"),
    [("qwen3-moe", "int8"), ("qwen3-moe", "int4"), *((name, None) for name in NAMES)],
)
def test_native_calls_give_what_torch_gives(family: str, quantization: Any, tmp_path: Path) -> None:
    """A prompt of more rows than fused layers take, and one of fewer."""
    model = save(family, tmp_path / "model")
    adapters = [
        LoRARequest(name, 1, str(linear_adapter(model, tmp_path / name, seed))) for seed, name in enumerate("ab")
    ]
    options = OPTIONS | {"quantization": quantization, "dtype": "bfloat16" if quantization is None else "float32"}
    found = {}
    for kernels in ("auto", "torch"):
        with LLM(str(model), enable_lora=True, kernels=kernels, **options) as llm:
            found[kernels], without = (
                torch.cat([measured(llm, adapters[0]), measured(llm, adapters[1], PROMPT[:20])]),
                torch.cat([measured(llm), measured(llm, None, PROMPT[:20])]),
            )
    assert (found["auto"] - found["torch"]).std() < 0.3 * (found["auto"] - without).std()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt-oss", "qwen3.5-moe", "llama4", "granite4-moe"])
@pytest.mark.parametrize("by_expert", [False, True])
def test_ranks_have_their_parts_of_experts(family: str, by_expert: bool, tmp_path: Path) -> None:
    native_library()
    model = save(family, tmp_path / "model")
    world = World(Checkpoint.open(str(model)), linear_adapter(model, tmp_path / "adapter"))
    whole = adapted_steps(world)

    def steps(group: RankGroup) -> list[torch.Tensor]:
        return adapted_steps(world, RankGroup(group.transport, divides_experts=by_expert))

    assert_near(run_ranks(2, steps)[0], whole, 1e-4)
    assert not torch.allclose(whole[-1], adapted_steps(world, is_on=False)[-1], atol=0.1)


@pytest.mark.parametrize(
    ("family", "by_expert"),
    [
        pytest.param("gpt-oss", True, marks=pytest.mark.slow),
        *(
            pytest.param(family, by_expert, marks=pytest.mark.exhaustive)
            for family in ("gpt-oss", "qwen3.5-moe", "llama4", "granite4-moe")
            for by_expert in (False, True)
            if (family, by_expert) != ("gpt-oss", True)
        ),
    ],
)
def test_stages_have_the_experts_of_their_layers(family: str, by_expert: bool, tmp_path: Path) -> None:
    native_library()
    model = save(family, tmp_path / "model")
    world = World(Checkpoint.open(str(model)), linear_adapter(model, tmp_path / "adapter"))

    def steps(group: RankGroup) -> list[torch.Tensor]:
        return adapted_steps(world, RankGroup(group.transport, divides_experts=by_expert))

    stages = make_stages(2, tensor_parallel_size=2, enable_expert_parallel=by_expert)
    found = run_groups(stages, lambda group: adapted_steps(world, group))[0]
    assert_equal(found, run_ranks(2, steps)[0])
    assert_equal(run_groups(make_stages(2), lambda group: adapted_steps(world, group))[0], adapted_steps(world))

"""Tiny random checkpoints of every family, and a way to run ours beside transformers' on paged memory."""

from __future__ import annotations

import json
import random
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from quire.execution.step.batch import BatchBuilder
from quire.execution.step.kv_storage import make_storages
from quire.memory.results import NO_OPS
from quire.models.checkpoints.columns import STORED_BY_COLUMNS
from quire.models.families import build
from quire.models.families.expert_layout import LINEAR_EXPERTS, has_linear_experts
from quire.models.modules.causal_model import CausalModel
from quire.models.modules.decoder import Decoder
from quire.models.specs.spec import StateCacheShape, TokenCacheShape, WeightMap
from quire.ops import make_ops
from quire.ops.interface.lora import LoraRows
from quire.scheduling.plan import NewSequence, ScheduledSequence, StepPlan, TableDelta
from quire.sequences.params import SamplingParams
from tests.models.family_cases import EXPERT_CASES, FALCON_CASES, GEMMA_CASES, PHI3_CASES, QWEN3_5_CASES
from tests.models.llama_layout_cases import LLAMA_LAYOUT_CASES
from tests.models.stored_tensors import stored_buffers, stored_tensors

SHAPE: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "attn_implementation": "eager",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
NEMOTRON_H = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
}
# Name -> classes and what differs from SHAPE. Groups of 1, 2 and 4 query heads; tied and not; every option of a family;
# windows shorter than the prompts of the tests, some of them no multiple of a block.
CASES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"num_attention_heads": 4, "num_key_value_heads": 4}),
    "llama3-rope": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "rope_parameters": LLAMA3_ROPE,
            "tie_word_embeddings": True,
        },
    ),
    "llama-linear-rope-biases": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
        },
    ),
    "mistral-head-dim": (
        MistralConfig,
        MistralForCausalLM,
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "sliding_window": None},
    ),
    "mistral-window": (
        MistralConfig,
        MistralForCausalLM,
        {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 13},
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"num_attention_heads": 4, "num_key_value_heads": 1}),
    "qwen2-window": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
        },
    ),
    "qwen3": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True},
    ),
    "qwen3-yarn": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "rope_parameters": YARN_ROPE},
    ),
    "qwen3-window": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_hidden_layers": 7,
            "sliding_window": 9,
        },
    ),
    "gemma3-options": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "sliding_window": 16,
            "query_pre_attn_scalar": 20,
            "attention_bias": True,
            "final_logit_softcapping": 6.0,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
            },
        },
    ),
}

CASES |= LLAMA_LAYOUT_CASES | GEMMA_CASES | FALCON_CASES | QWEN3_5_CASES | EXPERT_CASES | PHI3_CASES
CASES |= {
    # Matrices that are stored by columns.
    "gpt2": (GPT2Config, GPT2LMHeadModel, {"num_attention_heads": 4}),
    "gpt2-options": (
        GPT2Config,
        GPT2LMHeadModel,
        {
            "num_attention_heads": 2,
            "num_hidden_layers": 3,
            "n_inner": 72,
            "activation_function": "gelu",
            "scale_attn_weights": False,
            "scale_attn_by_inverse_layer_idx": True,
            "reorder_and_upcast_attn": True,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2": (
        Lfm2Config,
        Lfm2ForCausalLM,
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 5,
            "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
            "block_multiple_of": 8,
        },
    ),
    "lfm2-options": (
        Lfm2Config,
        Lfm2ForCausalLM,
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "num_hidden_layers": 3,
            "full_attn_idxs": [1],
            "conv_bias": True,
            "conv_L_cache": 5,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
    ),
    "granite4": (
        GraniteMoeHybridConfig,
        GraniteMoeHybridForCausalLM,
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 80,
            "mamba_n_heads": 8,
            "mamba_d_state": 16,
            "embedding_multiplier": 12.0,
            "logits_scaling": 3.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "tie_word_embeddings": True,
        },
    ),
    "granite4-options": (
        GraniteMoeHybridConfig,
        GraniteMoeHybridForCausalLM,
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "mamba_n_heads": 4,
            "mamba_n_groups": 2,
            "mamba_d_state": 24,
            "mamba_d_conv": 3,
            "mamba_expand": 1,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "attention_bias": True,
            "position_embedding_type": "rope",
        },
    ),
    "bamba": (
        BambaConfig,
        BambaForCausalLM,
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 4,
            "attn_layer_indices": [1, 2],
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 16,
        },
    ),
    # A half of a layer each; two MLPs after one another.
    "nemotron-h": (
        NemotronHConfig,
        NemotronHForCausalLM,
        NEMOTRON_H
        | {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention", "mlp"],
            "mlp_bias": True,
            "use_bias": True,
        },
    ),
    "nemotron-h-moe": (
        NemotronHConfig,
        NemotronHForCausalLM,
        NEMOTRON_H
        | {
            "layers_block_type": ["moe", "linear_attention", "moe", "moe", "full_attention"],
            "use_conv_bias": False,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "routed_scaling_factor": 2.5,
        },
    ),
    "granite4-attention": (
        GraniteMoeHybridConfig,
        GraniteMoeHybridForCausalLM,
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "layer_types": ["full_attention"] * 2,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
        },
    ),
}


class Tiny(NamedTuple):
    """A random model of transformers, and ours with the same weights."""

    reference: PreTrainedModel
    config: dict[str, Any]
    weight_map: WeightMap
    decoder: Decoder


@cache
def make_tiny(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tiny:
    """Make a model whose every weight, norms and biases included, is random."""
    config_class, model_class, changes = CASES[name]
    torch.manual_seed(len(name))
    reference = model_class(config_class(**SHAPE | changes)).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.15 if parameter.dim() > 1 else 0.4))
            if parameter.dim() == 1:
                parameter.add_(1.0)
        for learned in stored_buffers(reference).values():
            learned.copy_(1.0 + torch.randn_like(learned) * 0.4)
    reference.config.architectures = [model_class.__name__]
    config = json.loads(reference.config.to_json_string())
    tensors = with_rows_of_columns(model_class.__name__, stored_tensors(reference))
    if has_linear_experts(tensors):
        config[LINEAR_EXPERTS] = True
    spec, weight_map = build(config)
    decoder = Decoder(spec, ops=make_ops(torch.device(device)), dtype=dtype, device=torch.device(device))
    fill(decoder, weight_map, tensors)
    return Tiny(reference.to(device), config, weight_map, decoder)


def with_rows_of_columns(architecture: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint with matrices that are stored by columns as [out, in]."""
    endings = STORED_BY_COLUMNS.get(architecture, ())
    return {name: values.T if name.endswith(endings) else values for name, values in tensors.items()}


def fill(decoder: Decoder, weight_map: WeightMap, tensors: dict[str, torch.Tensor]) -> None:
    """Load every weight through the map."""
    for name, shape in decoder.weights.shapes().items():
        joined = torch.cat([tensors[source] for source in weight_map[name]]).view(shape)
        decoder.weights.load(name, joined.to(decoder.weights.dtype(name)))


class PagedRun:
    """Runs token lists through a decoder, on shuffled blocks of poisoned memory.

    Blocks that have left a window or chunk are poisoned again, and the tables name the null block in their place.
    """

    def __init__(
        self, decoder: CausalModel, *, block_size: int = 4, num_blocks: int = 256, device: str = "cpu"
    ) -> None:
        self._decoder = decoder
        self._block_size = block_size
        groups = decoder.cache_groups
        # Each group has memory of its own here: the tables of all name the same ids.
        self._storages = [
            make_storages([group], [num_blocks], block_size, decoder.dtype, device)[0] for group in groups
        ]
        for storage in self._storages:
            storage.data.view(torch.uint8).fill_(0xFF)  # NaN in every dtype
        self._kept = [group.cache for group in groups]
        self._builder = BatchBuilder(block_size, device, self._kept)
        self._free = list(range(1, num_blocks))
        random.Random(7).shuffle(self._free)
        self._lengths: dict[int, int] = {}
        self._tables: dict[int, list[list[int]]] = {}
        self._tick = 0
        self.adapter: int | None = None  # slot of the adapter of all rows

    @torch.inference_mode()
    def step(self, rows: dict[int, list[int]], read: dict[int, int] | None = None) -> dict[int, torch.Tensor]:
        """Run each sequence's next tokens; return each one's logits, [rows, V].

        Args:
            rows: of each sequence.
            read: how many of its last rows are read; None for all rows.
        """
        items = tuple(self._item(seq_id, token_ids) for seq_id, token_ids in rows.items())
        self._tick += 1
        batch = self._builder.build(StepPlan(self._tick, items, NO_OPS, ()))
        lengths = [len(item.token_ids) for item in items]
        counts = lengths if read is None else [read[item.seq_id] for item in items]
        ends_read = self._builder.lay_out_ends(items, counts)
        of_all, of_read = (LoraRows.of([self.adapter] * len(items), each) for each in (lengths, counts))
        adapters = None if of_all is None else (of_all, of_read)
        inputs = batch.input_ids, batch.positions, batch.groups, self._storages
        hidden = self._decoder(*inputs, output_rows=ends_read, adapters=adapters)
        logits = self._decoder.logits(hidden)
        ends = pairwise(accumulate(counts, initial=0))
        return {seq_id: logits[start:end].cpu() for seq_id, (start, end) in zip(rows, ends, strict=True)}

    def _item(self, seq_id: int, token_ids: list[int]) -> ScheduledSequence:
        start = self._lengths.get(seq_id, 0)
        self._lengths[seq_id] = start + len(token_ids)
        # One block more than needed now and then, as lookahead slots would have it.
        needed = -(-(start + len(token_ids)) // self._block_size) + seq_id % 2
        new_sequence = None
        if start == 0:
            new_sequence = NewSequence(SamplingParams(), 0, 0, len(token_ids), tuple(token_ids), ())
        tables = self._tables.setdefault(seq_id, [[] for _ in self._kept])
        deltas = []
        for group_idx, table in enumerate(tables):
            before = table.copy()
            match self._kept[group_idx]:
                case TokenCacheShape() as cache:
                    self._drop_what_is_out_of_sight(group_idx, table, start, cache)
                    table += [self._free.pop() for _ in range(needed - len(table))]
                case StateCacheShape():
                    self._carry_state(group_idx, table, -(-(start + len(token_ids)) // self._block_size))
            if table != before:
                first = next((idx for idx, old in enumerate(before) if table[idx] != old), len(before))
                deltas.append(TableDelta(group_idx, first, tuple(table[first:])))
        return ScheduledSequence(seq_id, start, token_ids, tuple(deltas), 1, new_sequence)

    def _drop_what_is_out_of_sight(self, group_idx: int, table: list[int], start: int, cache: TokenCacheShape) -> None:
        """Null and poison the blocks of which no row from position `start` on sees a token."""
        first = 0 if cache.window is None else max(0, start + 1 - cache.window)
        if cache.chunk is not None:
            first = start // cache.chunk * cache.chunk
        for block_idx in range(first // self._block_size):
            self._storages[group_idx].data[table[block_idx]] = float("nan")
            table[block_idx] = 0

    def _carry_state(self, group_idx: int, table: list[int], length: int) -> None:
        """Move the state to a block of its own at the end of the table, and poison where it was.

        Within its table entry the state stays where it is, or else would be a copy that was not asked for.
        """
        if length == len(table):
            return
        data, block_id = self._storages[group_idx].data, self._free.pop()
        if table:
            data[block_id] = data[table[-1]]
            data[table[-1]] = 0xFF
        table[:] = [0] * (length - 1) + [block_id]


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Return transformers' logits [T, V]."""
    logits: torch.Tensor = model(torch.tensor([token_ids], device=model.device)).logits
    return logits[0].float().cpu()


def random_tokens(length: int, seed: int = 0) -> list[int]:
    """Return token ids of the tiny vocabulary."""
    return random.Random(seed).choices(range(SHAPE["vocab_size"]), k=length)

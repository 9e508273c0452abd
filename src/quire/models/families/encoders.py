"""The families of encoders, and the table of their architectures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from quire.errors import CheckpointError
from quire.models.families.bert import bert, bert_classifier, bert_of_masked_words, bert_token_classifier
from quire.models.families.bidirectional import embedding_gemma, eurobert
from quire.models.families.dense_layers import read_dense
from quire.models.families.distilbert import (
    distilbert,
    distilbert_classifier,
    distilbert_of_masked_words,
    distilbert_token_classifier,
)
from quire.models.families.hf_config import HFConfig
from quire.models.families.modernbert import modernbert, modernbert_classifier, modernbert_of_masked_words
from quire.models.families.mpnet import mpnet, mpnet_classifier, mpnet_of_masked_words
from quire.models.families.nomic_bert import nomic_bert, nomic_bert_classifier, nomic_bert_of_masked_words
from quire.models.families.roberta import roberta, roberta_classifier, roberta_of_masked_words, roberta_token_classifier
from quire.models.specs.encoder_spec import EncoderSpec
from quire.models.specs.spec import WeightMap

# Name under "architectures" in a checkpoint's config.json -> reader of the configuration.
ENCODERS: Final[dict[str, Callable[[HFConfig], tuple[EncoderSpec, WeightMap]]]] = {
    "BertForMaskedLM": bert_of_masked_words,
    "BertForSequenceClassification": bert_classifier,
    "BertForTokenClassification": bert_token_classifier,
    "BertModel": bert,
    "DistilBertForMaskedLM": distilbert_of_masked_words,
    "DistilBertForSequenceClassification": distilbert_classifier,
    "DistilBertForTokenClassification": distilbert_token_classifier,
    "DistilBertModel": distilbert,
    "EuroBertForMaskedLM": eurobert,
    "EuroBertModel": eurobert,
    "MPNetForMaskedLM": mpnet_of_masked_words,
    "MPNetForSequenceClassification": mpnet_classifier,
    "MPNetModel": mpnet,
    "ModernBertForMaskedLM": modernbert_of_masked_words,
    "ModernBertForSequenceClassification": modernbert_classifier,
    "ModernBertModel": modernbert,
    "NomicBertForMaskedLM": nomic_bert_of_masked_words,
    "NomicBertForSequenceClassification": nomic_bert_classifier,
    "NomicBertModel": nomic_bert,
    "RobertaForMaskedLM": roberta_of_masked_words,
    "RobertaForSequenceClassification": roberta_classifier,
    "RobertaForTokenClassification": roberta_token_classifier,
    "RobertaModel": roberta,
    "XLMRobertaForMaskedLM": roberta_of_masked_words,
    "XLMRobertaForSequenceClassification": roberta_classifier,
    "XLMRobertaForTokenClassification": roberta_token_classifier,
    "XLMRobertaModel": roberta,
}
# The same for architectures that are encoders only where `use_bidirectional_attention` is true.
BIDIRECTIONAL: Final[dict[str, Callable[[HFConfig], tuple[EncoderSpec, WeightMap]]]] = {
    "Gemma3TextModel": embedding_gemma
}
# Tokens of the longest text of any encoder: without learned positions no stored tensor limits it, and a step has slots
# for it.
MAX_POSITION: Final = 1 << 20


def build_encoder(config: Mapping[str, Any]) -> tuple[EncoderSpec, WeightMap]:
    """Read the configuration of an encoder.

    Raises:
        UnsupportedModel: a value of a field is not implemented.
        CheckpointError: a field is missing, of the wrong type or absurd.
    """
    name = find_encoder(config)
    assert name is not None, "the configuration of an encoder"
    fields = HFConfig(config)
    fields.require("attn_logit_softcapping", None)
    spec, weights = (ENCODERS.get(name) or BIDIRECTIONAL[name])(fields)
    if spec.max_position > MAX_POSITION:
        raise CheckpointError(
            f"config.json: max_position_embeddings must be at most {MAX_POSITION:,} for an encoder, which computes a "
            f"text in one step, got {spec.max_position:,}",
            field="max_position_embeddings",
        )
    dense, dense_weights = read_dense(fields)
    return replace(spec, dense=dense), weights | dense_weights


def find_encoder(config: Mapping[str, Any]) -> str | None:
    """Return the architecture of a configuration if it is an encoder, else None."""
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    if not isinstance(first, str):
        return None
    is_bidirectional = config.get("use_bidirectional_attention") is True
    return first if first in ENCODERS or (is_bidirectional and first in BIDIRECTIONAL) else None

"""BERT: learned positions, two token types, norms after each residual, a head over the first token's pooler."""

from __future__ import annotations

from quire.models.families.encoder_layout import read_bert_layout, with_classifier, with_token_classifier
from quire.models.families.hf_config import HFConfig
from quire.models.specs.encoder_spec import EncoderSpec
from quire.models.specs.spec import WeightMap


def bert(config: HFConfig) -> tuple[EncoderSpec, WeightMap]:
    """Read a `BertModel` without its pooler, which embeddings do not use."""
    return read_bert_layout(config, "")


def bert_of_masked_words(config: HFConfig) -> tuple[EncoderSpec, WeightMap]:
    """Read a `BertForMaskedLM` without its head."""
    return read_bert_layout(config, "bert.")


def bert_classifier(config: HFConfig) -> tuple[EncoderSpec, WeightMap]:
    """Read a `BertForSequenceClassification`."""
    spec, names = read_bert_layout(config, "bert.")
    return with_classifier(config, spec, names, "tanh", "bert.pooler.dense", "classifier")


def bert_token_classifier(config: HFConfig) -> tuple[EncoderSpec, WeightMap]:
    """Read a `BertForTokenClassification`."""
    return with_token_classifier(config, *read_bert_layout(config, "bert."))

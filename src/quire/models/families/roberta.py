"""RoBERTa and XLM-RoBERTa: BERT with positions from `pad_token_id + 1` on, and another head."""

from __future__ import annotations

from quire.models.families.encoder_layout import read_bert_layout, with_classifier, with_token_classifier
from quire.models.families.hf_config import HFConfig
from quire.models.specs.encoder_spec import EncoderSpec
from quire.models.specs.spec import WeightMap


def roberta(config: HFConfig) -> tuple[EncoderSpec, WeightMap]:
    """Read a `RobertaModel` or `XLMRobertaModel`."""
    return _read(config, "")


def roberta_of_masked_words(config: HFConfig) -> tuple[EncoderSpec, WeightMap]:
    """Read a `RobertaForMaskedLM` or `XLMRobertaForMaskedLM` without its head."""
    return _read(config, "roberta.")


def roberta_classifier(config: HFConfig) -> tuple[EncoderSpec, WeightMap]:
    """Read a `RobertaForSequenceClassification` or `XLMRobertaForSequenceClassification`."""
    spec, names = _read(config, "roberta.")
    return with_classifier(config, spec, names, "tanh", "classifier.dense", "classifier.out_proj")


def roberta_token_classifier(config: HFConfig) -> tuple[EncoderSpec, WeightMap]:
    """Read a `RobertaForTokenClassification` or `XLMRobertaForTokenClassification`."""
    return with_token_classifier(config, *_read(config, "roberta."))


def _read(config: HFConfig, prefix: str) -> tuple[EncoderSpec, WeightMap]:
    return read_bert_layout(config, prefix, config.count("pad_token_id", 1) + 1)

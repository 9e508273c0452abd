"""RoBERTa and XLM-RoBERTa: BERT with positions from `pad_token_id + 1` on, and another head."""

from __future__ import annotations

from quire.models.families.encoder_layout import read_bert_layout, read_labels, read_scores
from quire.models.families.hf_config import HFConfig
from quire.models.families.llama_layout import map_modules
from quire.models.specs.encoder_spec import ClassifierHead, EncoderSpec
from quire.models.specs.spec import WeightMap


def roberta(config: HFConfig) -> tuple[EncoderSpec, WeightMap]:
    """Read a `RobertaModel` or `XLMRobertaModel`."""
    return _read(config, "")


def roberta_of_masked_words(config: HFConfig) -> tuple[EncoderSpec, WeightMap]:
    """Read a `RobertaForMaskedLM` or `XLMRobertaForMaskedLM` without its head."""
    return _read(config, "roberta.")


def roberta_classifier(config: HFConfig) -> tuple[EncoderSpec, WeightMap]:
    """Read a `RobertaForSequenceClassification` or `XLMRobertaForSequenceClassification`."""
    labels = read_labels(config)
    head = ClassifierHead(labels, "cls", "tanh", bias=True, norm=None, scores=read_scores(config, len(labels)))
    spec, names = _read(config, "roberta.", head)
    modules = {"dense": ("dense",), "output": ("out_proj",)}
    return spec, names | map_modules("head", "classifier", modules, has_bias=True)


def _read(config: HFConfig, prefix: str, head: ClassifierHead | None = None) -> tuple[EncoderSpec, WeightMap]:
    return read_bert_layout(config, prefix, config.count("pad_token_id", 1) + 1, head)

"""BERT with a classifier, as a FastSpeed user writes it: an nn.Module whose forward takes a dict."""

from pathlib import Path

from torch import Tensor, nn
from transformers import BertConfig, BertModel

__all__ = ["BertClassifier"]


class BertClassifier(nn.Module):
    """Logits of six classes."""

    def __init__(self, config_file: str, dropout: float = 0.1) -> None:
        super().__init__()
        config = BertConfig.from_json_file(Path(__file__).with_name(config_file))
        self.bert = BertModel(config)
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(config.hidden_size, 6)

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        """[b, 6] from `input_ids` and `attention_mask`, int64 [b, t]."""
        found = self.bert(input_ids=given["input_ids"], attention_mask=given["attention_mask"])
        return self.linear(self.dropout(found.pooler_output))

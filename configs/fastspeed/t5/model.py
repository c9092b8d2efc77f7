"""T5 as a FastSpeed user writes it, an nn.Module whose forward takes a dict; but it returns logits, not its own loss, so that
the loss is the mean over the tokens of all devices."""

from pathlib import Path

from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

__all__ = ["T5base"]


class T5base(nn.Module):
    """Logits of the next token."""

    def __init__(self, config_file: str) -> None:
        super().__init__()
        self.t5 = T5ForConditionalGeneration(T5Config.from_json_file(Path(__file__).with_name(config_file)))

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        """[b, t, words] from `source_ids`, `source_mask`, int64 [b, s], and `target_ids` [b, t], which the decoder reads."""
        return self.t5(
            input_ids=given["source_ids"],
            attention_mask=given["source_mask"],
            decoder_input_ids=given["target_ids"],
            use_cache=False,
        ).logits

"""BERT of transformers with a classifier (`BertForSequenceClassification`) as a chain of layers: int64 [b, t] tokens, or (tokens,
mask), or (tokens, mask, token types), to logits [b, num_labels]. Its description is `hetpipe/hf/families/bert.py`."""

from hetpipe.hf.build import builder

build = builder("bert")

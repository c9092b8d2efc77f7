"""BERT with a classifier."""

from hetpipe.hf.family import Family

FAMILY = Family(
    model="BertForSequenceClassification",
    kind="bert",
    sizes={
        "bert-base": {},  # BertConfig's own defaults
        "bert-large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    },
    embed={"embeddings": "bert.embeddings"},
    token_types=True,
    layers="bert.encoder.layer",
    causal=False,
    head={"pooler": "bert.pooler", "dropout": "dropout", "classifier": "classifier"},
    refused={"is_decoder": "this is the encoder with a classifier"},
    new=("bert.pooler.", "classifier."),
)

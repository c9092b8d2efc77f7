"""Which causal language models of transformers are chains of layers, and the same bits."""

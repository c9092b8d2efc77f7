"""Adapters: predicted against measured memory and steps, and what ranks hold of a model whose base is in 4 bits."""

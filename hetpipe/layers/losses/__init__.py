"""Losses of large vocabularies, whose logits are never in memory at once. Read in this order:

chunked (the loss of each token, of what goes into a model's head), fused (a loss of such losses).
"""

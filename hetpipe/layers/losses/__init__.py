"""Losses of language models. Read in this order:

chunked (the loss of each token, of what goes into a model's head), fused (a loss of such losses, whose logits
are never in memory at once), preference (of a better and a worse answer).
"""

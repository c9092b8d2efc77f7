"""Saving: how long steps wait for checkpoints."""

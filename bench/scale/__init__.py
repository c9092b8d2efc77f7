"""Seconds, memory and Python work as devices, layers and micro-batches grow."""

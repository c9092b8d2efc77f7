"""Adapters: predicted against measured memory and steps."""

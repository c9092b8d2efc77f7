"""Folders that are written for others. Read in this order:

beside (what lies there beside weights: the tokenizer and the template of the data, and what ends an answer), diffusion (a
transformer of diffusers), export (the weights of a checkpoint, as a model of transformers or of diffusers, as adapters of peft or
as plain files).
"""

"""Folders that are written for others. Read in this order:

beside (what lies there beside weights: the tokenizer and the template of the data, and what ends an answer), export (the weights
of a checkpoint, as a model of transformers, as adapters of peft or as plain files).
"""

"""Sections of a job that are files of their own. Read in this order:

adapter (what is added to a model that stays as it is), numbers (the scale of a loss, and the arithmetic of cards), torch_named
(classes of torch with their arguments), named (what is registered), loss, log, export (where trained weights go), evaluate
(samples that do not train), elastic (devices that are lost).
"""

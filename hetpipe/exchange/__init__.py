"""To and from other systems. Read in this order:

export (launch arguments of Megatron, DeepSpeed and torchrun), hf (weights of transformers), importers/ (published
profiles).
"""

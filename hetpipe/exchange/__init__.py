"""To and from other systems. Read in this order:

export/ (launch arguments of Megatron, DeepSpeed and torchrun), hf (folders of transformers), weights (of a checkpoint,
to such a folder or to plain files), importers/ (published profiles).
"""

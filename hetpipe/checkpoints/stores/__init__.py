"""Where checkpoints are kept, a file a store. Read in this order:

store (what every store does), shared (do all ranks see one folder?), layout (where tensors lie in a file), tensor_files (writing
and reading them), folder (the store that is used unless another is given).
"""

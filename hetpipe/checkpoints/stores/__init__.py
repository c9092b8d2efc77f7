"""Where checkpoints are kept, a file a store. Read in this order:

store (what every store does), shared (do all ranks see one folder?), tensor_files (tensors that all ranks write and read),
pieces (one of them after the other), folder (the store that is used unless another is given).
"""

"""Where checkpoints are kept. Read in this order:

store (what every store does), shared (do all ranks see one folder?), tensor_files (tensors that all ranks write and read),
pieces (one of them after the other), folder (the store that is used unless another is given). Another store is one file.
"""

"""Any model whose forward calls its blocks one after the other, as a chain: each layer of it runs the model's own forward, in
which the modules of the layers before give what was carried, and which ends where the next layer begins. Read in this order:

flow (of what each tensor of a forward is computed), given (what a model is called with, as tensors of samples), anatomy (which
modules are called when, and what must be carried from layer to layer), skeleton (the model without its modules), values (of
the layers, from files or drawn), layers (of the chain), numbered (what each tensor is, without its values), compare (of a chain
with the model itself), chain (from a model to both).
"""

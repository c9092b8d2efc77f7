"""A model as a chain of layers that can be cut anywhere. Read in this order:

trials/chain_check (is it a chain?), untouched/kinds (which layers compute the same), model (layers, sample, the loss and what it
weighs), losses/ (of large vocabularies), untouched/ (what is run here only to be looked at leaves all as it was), transforms
(what makes layers into others), weights (tensors by their names), adapters/ (matrices of low rank beside a frozen model),
replay/ (a model whose forward calls blocks, as a chain), batch_norm, numbers (number types), host/ (what is saved for backward,
in the host's memory), stage (layers as one module, recomputed, offloaded or neither), split (what must not be cut apart), shards/
(layers split over several devices), recipe (the one way to what a device runs), untouched/boundaries (what crosses each
boundary), ahead (what is imported before ranks are forked), device (pacing and metering), trials/ (do losses and layers do?).
"""

"""A model as a chain of layers that can be cut anywhere. Read in this order:

model (layers, sample, the loss and what it weighs), weights (tensors by their names), split (what crosses each
boundary), ahead (what ranks need before they are forked), batch_norm, loss_trial and loss_check (is the loss a mean?),
device (pacing and metering), layer_run (one layer, timed).
"""

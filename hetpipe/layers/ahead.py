"""Imported before ranks are forked: what torch itself imports with the first optimizer and the first trace of a process, three
seconds of processor time in each of them."""

from torch import nn, optim, zeros

from hetpipe.layers.untouched.boundaries import trace_boundaries

_layer = nn.Sequential(nn.Linear(1, 1))
optim.SGD(_layer.parameters())
trace_boundaries(_layer, zeros(1, 1))

"""Adapters: matrices of low rank that train beside a model that stays as it is. Read in this order:

quantised (linear layers that hold their matrices in 4 or 8 bits), names (what modules are called in a library's model), targets
(which layers get adapters), folder (of adapters, as peft writes it), fitting (whether its tensors are of this chain), given (the
adapters that go on from it), low_rank (the transform), adapt (of a chain of one's own), ahead (imported before ranks are forked).
"""

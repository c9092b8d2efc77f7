"""Saving beside the steps that follow. Read in this order:

copies (of this rank's tensors, in host memory), writing (them, in a thread of each rank).
"""

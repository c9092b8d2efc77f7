"""What a stage saves for backward, in the host's memory. Read in this order:

copies (between a device and its host), offload (of what autograd saves).
"""

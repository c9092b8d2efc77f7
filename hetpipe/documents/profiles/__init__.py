"""Parts of a profile. Read in this order:

measurement (seconds and bytes of all layers on a device type), lengths (of samples, by which steps differ), tie (a
parameter that layers share), overhead (of the framework), counted (what layers compute and keep, where nothing was measured).
"""

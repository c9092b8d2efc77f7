"""What a profile says beside its layers' bytes and seconds. Read in this order:

lengths (of samples, by which steps differ), tie (a parameter that layers share).
"""

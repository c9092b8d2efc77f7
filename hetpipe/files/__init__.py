"""What every file must keep, whatever is in it. Read in this order:

limits (the most a file may ask for), messages (InputError and its wording), units (24 GiB, 10 us), parsing (YAML and
JSON without code), writing (whole or not at all), formats (strict models that name every fault), folders (room, and
one run at a time), screen (a terminal that obeys no file), hub (a folder by its name on Hugging Face),
tensors (of safetensors files, one after the other).
"""

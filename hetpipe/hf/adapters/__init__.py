"""What comes of adapters that were trained. Read in this order:

bare (a chain without them, and without values), patterns (by which peft finds modules), peft_folder (as peft writes and reads
them), merged (added to the model's own matrices).
"""

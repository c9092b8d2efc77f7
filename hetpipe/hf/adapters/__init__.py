"""What comes of adapters that were trained. Read in this order:

names (of adapters in a model of transformers), peft_folder (as peft writes and reads them), merged (added to the model's own
matrices).
"""

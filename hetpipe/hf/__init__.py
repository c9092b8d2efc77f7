"""What is known of Hugging Face's transformers: their folders and configurations, and their models as chains of layers.
The first three need no torch. Read in this order:

sizes (of a config.json), known (sizes that have names, and what layers are like), hub (the folder of a name on Hugging Face),
folder (what `save_pretrained` wrote), stored (which of its tensors a model's are made of), configs (from a folder or named sizes
to an empty model), chain (layers and their values), masks (what travels beside the features of models that are written by hand),
replay/ (from any causal language model to a chain), adapters/ (what comes of adapters that were trained), exports/ (a
checkpoint's weights, as such a folder or as plain files).
"""

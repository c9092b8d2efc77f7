"""What is known of Hugging Face's transformers: their folders and configurations, and their models as chains of layers.
The first four need no torch. Read in this order:

sizes (of a config.json), family (what differs from one model to another),
families/ (one description a file: a new one is a model of its name, and has its sizes in `hetpipe what-if`), hub (the folder of a
name on Hugging Face), folder (what `save_pretrained` wrote), stored (which of its tensors a model's are made of), configs (from a
folder or a preset to an empty model), chain (layers and their values), masks (what travels beside the features), build (from a
description to a chain), replay/ (from any causal language model to a chain, without a description), adapters/ (what comes of
adapters that were trained), exports/ (a checkpoint's weights, as such a folder or as plain files).
"""

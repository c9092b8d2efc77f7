"""Data for language models: chats, pairs of a prompt and its completion, and plain text. Read in this order:

records (what files hold, with their lines), tokenizer (and what of a text is learned), turns (what of a chat), pairs (what of a
prompt and its completion), samples (of different lengths: padded, or packed into rows), reading (from records to samples),
documents (plain text in windows), conversations (what jobs name), apart (does a model tell samples in a row apart?).
"""

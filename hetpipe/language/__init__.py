"""Data for language models: chats, questions with their answers, and plain text. Read in this order:

records/ (what files hold), formats/ (the records that people have, as chats and pairs of one form), marked (a text, and what of
it is learned), tokenizer (the tokens of such), writing/ (from chats to texts by a template), packing (which samples share a
row), samples (of different lengths: padded, or packed into rows), preferred (two answers to a question), kept/ (tokens in a
file, once on a host), reading/ (from records to samples), documents (plain text in windows), conversations (what jobs name).
"""

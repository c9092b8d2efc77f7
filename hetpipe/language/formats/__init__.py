"""Readers of the records that people have, as chats and pairs of one form. Read in this order:

columns (what a data set calls its keys and roles), turns (one turn of a chat: what is said, and whether it is learned), chats
(records of turns), pairs (records of a question and its answer), preferences (a better and a worse answer), formats (any).
"""

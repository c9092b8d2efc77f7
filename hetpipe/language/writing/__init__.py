"""Writers make texts of chats by a template, and mark the part that is learned. Read in this order:

template (what it is given, and what it writes), forms (how it is handed turns, and whether it writes all of them), bounds (where
in its text an answer begins and ends), behind (what it writes behind an answer), answers (the samples of a chat).
"""

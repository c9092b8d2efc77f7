"""Plans and timelines for people; no torch. Read in this order:

terms (explained), words (what a study's numbers say), trace (Perfetto), report (texts and tables of a plan), tables (a profile, a
step), picture/ (SVG and PNG), text_picture (in a terminal), front_report (price against time), page/ (the report), draw (into a
file), command.
"""

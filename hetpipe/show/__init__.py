"""Plans and timelines for people; no torch. Read in this order:

scene (the numbers of a plan's picture), words (what they say), trace (Perfetto), report (texts and tables of a plan),
text_picture, picture/ (SVG and PNG), page/ (the report), draw (into a file), command; tables (a profile, a step), front_report.
"""

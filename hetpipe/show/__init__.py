"""Plans and timelines for people; no torch. Read in this order:

trace (Perfetto), report (texts and tables of a plan), canvas (SVG and PNG), draw (the page), tables (a profile),
front_report.
"""

"""The report: one page that needs no other file. Read in this order:

html (pieces), glossary, sections (one function each), report (the page).
"""

"""The report: one page that needs no other file. html (pieces), glossary, sections (one function each), report (the page)."""

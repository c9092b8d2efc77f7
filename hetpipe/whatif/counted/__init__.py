"""Models whose layers were counted (`hetpipe/measuring/precision/counted.py`), such as transformers for pictures. Read in this
order:

cells (a measured layer on all cards), profile (of counted layers, by what cards reach on measured ones), text (what is said).
"""

"""Pictures as SVG and PNG. Read in this order:

theme (colours and patterns), canvas (boxes, lines and words), file (SVG or PNG), axis (the scale of a partition), columns (many
stages), partition (who computes what), gantt (when), curves (memory over time), front (price against time), loss
(over a run).
"""

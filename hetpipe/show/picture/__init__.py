"""Pictures: theme (colours and patterns), canvas (boxes, lines and words as SVG and PNG), partition (who computes what), gantt
(when), curves (memory over time)."""

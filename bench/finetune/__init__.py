"""How many tokens a second does LoRA train on cards that are not alike, beside what people do with them today? `cards.py` (which
clusters, how fast and how large), `ways.py` (the plan of each way), `figures.py` (tables and the picture), `run.py`."""

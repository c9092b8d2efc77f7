"""Any causal language model of transformers as a chain: each layer of it replays transformers' own forward with the other layers
left out, so that masks, rotary angles, scales and caps are computed by transformers itself. Read in this order:

skeleton (a model whose layers are left out, and what its forward does in their place), trace (one run without values, and what
was seen in it), anatomy (what belongs where, or why a model cannot be cut), parallel (how transformers splits a layer over
devices), layers (the chain), tiny (a small configuration of the same kind), compare (of a chain with transformers' own model),
classes (of a model and its configuration), rows (does a model take a job's data as they lie?), build (from a folder or a type of
transformers to a chain).
"""

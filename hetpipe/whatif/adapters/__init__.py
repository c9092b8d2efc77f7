"""Fine-tuning with adapters of low rank over a base that does not train. Read in this order:

lora (the adapters, as they are asked for), base (bytes of the base that they are beside), trained (what a layer keeps for
backward, and what it takes beside its products), profile (a model's profile, with adapters).
"""

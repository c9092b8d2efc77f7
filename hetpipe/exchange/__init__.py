"""To and from other systems: export (Megatron, DeepSpeed, FairScale), hf (weights of transformers), importers (profiles)."""

"""To and from other systems. Read in this order:

export/ (launch arguments of Megatron, DeepSpeed and torchrun), importers/ (published profiles), configs/ (configurations of other
trainers), launch/ (files for SLURM, Kubernetes, Ray, SkyPilot and ssh that start a job).
"""

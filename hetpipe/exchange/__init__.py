"""To and from other systems. Read in this order:

grid/ (what every export takes of a plan), export/ (plans as other trainers read them), importers/ (published profiles), configs/
(configurations of other trainers), launch/ (files for SLURM, Kubernetes, Ray, SkyPilot and ssh that start a job).
"""

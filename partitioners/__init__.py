"""Planning algorithms, one a file, behind the `Partitioner` protocol of `hetpipe/planning/partition.py`."""

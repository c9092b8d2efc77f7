"""Planning algorithms, one a file, behind the `Partitioner` protocol of `hetpipe/planning/partition.py`. Folders are rooms that
they share; imports go down this list:

auto, chain, exhaustive
search, exact
pipelines, compositions
bound
cephalo, equal_parameters, even, even_data_parallel, even_pipelines, fasop, memory_layers, torchgpipe_balance, type_blind,
    uneven_data_parallel, zorse
rules
memory_fit
step_times
stage_kinds
"""

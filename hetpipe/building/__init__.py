"""From the names in a job to objects. Read in this order:

data (batches and their order), content (what data are, in a few numbers), streams/ (samples with no known end), feed (reads
batches ahead of the step), lengths (which sizes come how often), datasets and texts (what comes along), fused (labels beside
inputs, for a loss that the head computes), called (how a model is called with samples), evaluated (samples that do not train),
build (model, data, loss, optimizer, schedule).
"""

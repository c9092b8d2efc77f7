"""What a model would do on cards that one does not have yet; no torch. Read in this order:

cards (data sheets, in cards.yaml), shipped (measured layers, in zorse.json), models (sizes by name, some in popular.yaml),
adapters (fine-tuning over a base that does not train), shards (layers split over several cards), estimate (times of layers that
were not measured), order (no card is slower than one whose rates are lower), machine (the cards that were asked for, as a
cluster), precisions (at which each card computes), shared (profiles of others), counted (models whose layers were counted),
answer (the rows), table.
"""

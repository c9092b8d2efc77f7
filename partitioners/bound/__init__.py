"""A step that no plan is below; docs/planner.md proves it. Read in this order:

labels (of relaxed stages), relaxed (the cheapest pipeline of so many samples at given prices, compiled), demand (what it takes at
least, as arrays for that), nodes (what whole nodes can do, by what their adapters carry), lower (the linear program over such
pipelines, bisected over steps and numbers of replicas, from where `nodes` leaves it).
"""

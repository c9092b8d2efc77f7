"""What is known of a plan, in numbers, and what else could be: other rules, clusters and cuts; no torch. Read in this order:

scene (the numbers of a plan), study (all that is known of one), rules (other partitioners), clusters (what could change),
changes (plans of that), cuts (plans with one cut moved), make (`make_study`).
"""

"""By which plan a run goes on. Read in this order:

director (what a director is told and says), by_job (that of a job).
"""

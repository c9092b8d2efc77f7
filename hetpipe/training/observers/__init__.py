"""Who looks on at a run: loggers, the progress bar, notes. Read in this order:

records (what is told), observer (what an observer is), json_lines (the log), loggers (curves in other tools), watch
(`--watch`), screen (the bar, and notes on slow steps), attending (all of a run, those of other packages too, told one after the
other).
"""

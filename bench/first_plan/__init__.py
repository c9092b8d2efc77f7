"""How long does the first plan of an installation take? Read in this order: worker, run."""

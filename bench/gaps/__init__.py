"""How far from the best can the plans of `auto` be, as far as its bound shows? Read in this order: worker, run."""

"""The command `hetpipe`. Read in this order:

terminal (colours, bars), exits (codes, last words), guesses (what others call it), front (`plan --pareto`), exchange (`export`,
`import`), launch/, weights (`export-weights`), generate, convert/, pictures (models of these for
what_if), what_if, finetune/, commands (all others).
"""

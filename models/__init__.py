"""The zoo: one model a file, each with `build(**arguments) -> nn.Sequential`; README.md: how to add one."""

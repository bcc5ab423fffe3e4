"""Policy `auto`: what the callback plans with, read off a run that is about to begin.

`lengths` reads the largest batch off the data set, `live_step` the step off the training arguments, `skeleton` keeps
the model's shape, `budgets` tells how much memory there is, `asked` puts them together, `planning` makes the plans.
"""

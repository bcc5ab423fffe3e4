"""Policy `auto`: what the callback plans with, read off a run that is about to begin.

`largest_batch_in_data` reads the largest batch off the data set, `live_step` the step off the training arguments,
`budgets` the memory that there is; `auto` puts them together, and `replan` makes the plans.
"""

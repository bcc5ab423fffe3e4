"""Policy `auto`: what the callback plans with, read off a run that is about to begin.

`batch_of_forward` describes what the model is given, `live_step` the step off the training arguments,
`budgets` the memory that there is; `auto` puts them together, and `replan` makes the plans.
"""

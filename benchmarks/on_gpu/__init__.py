"""Everything that has to be measured on a GPU, as one programme that can be stopped at any moment and goes on.

`__main__` is the command. `programme` runs the stages one after the other, each in a process of its own; `stages` says
what there is to do and in which order; `results` is the file that holds what they found. `prepare` makes beforehand,
without a GPU, what would take its time: plans and predictions. `merge` files what came home.
"""

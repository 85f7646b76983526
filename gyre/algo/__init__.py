"""From rewards and log-probs to weights on tokens, and from rows to units of work.

Pure: standard library and numpy. What torch does with the weights is the trainer's.
"""

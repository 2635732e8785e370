"""How fast saves are here, ours and those of others, in one run. ``make bench``; see ``python -m benchmarks --help``.

A run starts a process for each contender and round, the rounds of all interleaved, so that what else the machine does
hits all of them. A process trains the same model with and without saves, in pairs. Nothing here is asserted by a test:
the figures are for people.
"""

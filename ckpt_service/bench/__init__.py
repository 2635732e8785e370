"""``ckpt-service bench``: what a disk and a host give, and what saves will cost the training there.

The figures are for people and for planning; nothing else in the project decides by them.
"""

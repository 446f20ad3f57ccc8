"""What trains in `benchmarks.versus` and `benchmarks.largest`: noria, plain PyTorch and the rivals, one file each.

Each runs in a process of its own (serve.py), in its own environment; so only the file of a system imports it, and what
they share (task.py) needs nothing but torch and numpy.
"""

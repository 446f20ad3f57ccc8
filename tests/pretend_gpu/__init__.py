"""A pretend GPU: torch's CPU build made to believe that it has CUDA. See README.md.

`vehicle.install()` comes before torch; `machine.machine()` sets what the device does to a test.
"""

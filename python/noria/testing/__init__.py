"""Helps tests and benchmarks of code that uses noria: machines with limits and hostility, twins, bit comparison.

with noria.testing.on_machine(limits={"fetch": (1.0, 0)}, hostility={"seed": 1, "max_delay_us": 500, "poison": True}):
    model, optimizer = noria.wrap(model, optimizer, device="cpu")
"""

from noria.testing._machine import Machine, on_machine
from noria.testing._waits import omit_wait
from noria.testing.twin import MasterTwin, assert_same_bits, first_difference, round_to_bfloat16

__all__ = [
    "Machine",
    "MasterTwin",
    "assert_same_bits",
    "first_difference",
    "omit_wait",
    "on_machine",
    "round_to_bfloat16",
]

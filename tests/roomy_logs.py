"""Gives undo logs room for all old values.

Tests train for a few steps. In these most blocks of an undo log have no room in its list (docs/drafts.md), so drafts
would leave them for `step()`, and few tests would show what an undo does. Both pytest and the ranks that tests start
import this.
"""

from noria.model import layout

PLANNED_SLOTS = 1 / 32  # as in layout.py
layout.SLOTS_PER_ELEMENT = 3.1

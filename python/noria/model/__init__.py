"""Describes a model and its optimizer before noria takes any memory.

`partition` finds the units, `update_rules` chooses the code that updates them, and `moment_formats` says how moments
are stored.
"""

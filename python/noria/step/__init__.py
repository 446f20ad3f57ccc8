"""Turns `step()` into updates of units, by noria's kernels or by the real torch optimizer.

Note [Separable]. AdamW updates one parameter from that parameter alone: its value, gradient and state. Such an
optimizer gives the same bits unit by unit as all at once. `update_rules.SEPARABLE` lists these classes. Any other
optimizer runs whole, inside `step()`, on the user's own object. Such an optimizer may count steps or keep other
attributes, so a separate worker object would drift from it.
"""

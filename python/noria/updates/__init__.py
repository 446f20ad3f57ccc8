"""What `step()` becomes: updates of units, by noria's kernels or by the real torch optimizer.

Note [Separable]. Optimizers whose update of one parameter looks at nothing but that parameter give the same bits unit
by unit as all at once. They are listed in `kernels.SEPARABLE`; anything else runs whole, inside `step()`, on the object
itself: it may count, keep and look at what it likes, so a worker would be a copy that drifts.
"""

from noria.updates.step import Updates

__all__ = ["Updates"]

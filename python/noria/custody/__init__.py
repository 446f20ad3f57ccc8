"""One `wrap` call: the models' parameters in custody, one idea a file.

`wrapped` holds what is shared, and says when nothing may look or write; `passes` are the hooks that announce the use of
parameters; `values` reads and writes what the home has of them, with `masters`; `state_dicts` are the hooks through
which `model.state_dict()` does; `together` is what ranks that share the model do on the calling thread; `later` takes
memory once training has begun, `gradients` for loops that let them stay, `shown` for whole weights; `loaded` says
what must be loaded first, `drafts` whether drafts pay. `following` knows what a pipeline's schedule does, with
`in_flight`, which lets go of what its stages keep.
"""

from noria.custody.hooks import in_backward
from noria.custody.wrapped import Wrapped, wrapped_by, wrapped_together

__all__ = ["Wrapped", "in_backward", "wrapped_by", "wrapped_together"]

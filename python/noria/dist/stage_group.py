"""Puts the ranks of a pipeline, one process each, into a group of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from noria._errors import usage_error
from noria.dist.groups import Group
from noria.dist.ranks import SAME_MESHES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["StageGroup"]


class StageGroup:
    """Holds the group of a pipeline's ranks, which have met."""

    def __init__(self, ranks: list[int]) -> None:
        """Meets the other ranks. Collective."""
        self.group = Group(ranks)
        self.rank, self.size = self.group.rank, self.group.size
        try:
            self.group.agree([f"stages={ranks}"], **SAME_MESHES)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def meet(mesh: DeviceMesh | None = None) -> StageGroup | None:
        """Returns the group of a mesh's ranks, or None if there is no mesh or only one rank. Collective.

        `mesh`: a DeviceMesh of one dimension.
        """
        if mesh is None:
            return None
        if not dist.is_available() or not dist.is_initialized():
            raise usage_error("a process group before stages=", "none", "call init_process_group first")
        from torch.distributed.device_mesh import DeviceMesh

        if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
            raise usage_error(
                "stages=None or a DeviceMesh of one dimension",
                f"stages={mesh!r}",
                'give the dimension along which stages lie: grid["stages"]',
            )
        ranks = sorted(mesh.mesh.tolist())
        if dist.get_rank() not in ranks:
            raise usage_error(
                f"stages with rank {dist.get_rank()} in them", f"ranks {ranks}", "let those ranks alone call it"
            )
        return StageGroup(ranks) if len(ranks) > 1 else None

    def first_failure(self, own: Exception | None, call: str) -> Exception | None:
        """Returns this rank's failure, else that of the first rank that has one. Collective."""
        return self.group.first_failure(own, call)

    def close(self) -> None:
        self.group.close()

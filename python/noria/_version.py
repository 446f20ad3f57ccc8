"""The version of this library, here and nowhere else."""

__version__ = "0.1.0"

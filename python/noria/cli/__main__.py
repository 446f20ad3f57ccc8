"""Runs the command as `python -m noria.cli`."""

import sys

from noria.cli.main import main

sys.exit(main())

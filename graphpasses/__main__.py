"""``python -m graphpasses`` is the ``graphpasses`` command."""

import sys

from graphpasses.cli import main

sys.exit(main())

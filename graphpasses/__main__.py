"""``python -m graphpasses`` is the ``graphpasses`` command."""

import sys

from graphpasses.commands.app import main

sys.exit(main())

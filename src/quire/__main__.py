"""`python -m quire` is the command `quire`."""

import sys

from quire.cli.main import main

sys.exit(main())

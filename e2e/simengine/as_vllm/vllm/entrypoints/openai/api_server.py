"""The module that the operator's Deployments run."""

import sys

from e2e.simengine.__main__ import main

sys.exit(main())

"""``python -m guard_middleware``."""

from guard_middleware.cli.main import main

raise SystemExit(main())

"""``python -m guard_middleware``."""

from __future__ import annotations

from guard_middleware.cli.main import main

raise SystemExit(main())

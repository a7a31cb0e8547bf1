"""What a session is told whose subject is not planning."""

from __future__ import annotations

from typing import Any

QUICK_PLANS: dict[str, Any] = {"policy": "capuchin", "recompute": False}
"""Plans in a seventh of the time of `auto`: a third of the suite's went into them."""

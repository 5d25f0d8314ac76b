"""The command line: ``bitwright demo | inspect | plan | compress | compare | sweep | export | explain``."""

from __future__ import annotations

from .app import app, main

__all__ = ["app", "main"]

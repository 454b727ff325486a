"""Checks that strategies train identically: `specs` parses them, `runs` trains under each, `compare` judges."""

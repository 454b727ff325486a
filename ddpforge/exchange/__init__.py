"""Weights from and to elsewhere: export, import, initial weights, other programs' formats."""

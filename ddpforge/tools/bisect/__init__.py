"""Finds the first step, module and operation at which two runs that must agree differ."""

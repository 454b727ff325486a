"""Trains one recipe under every layout that strategies declare, and compares each with one process."""

"""Exchange with other programs: import, export, exported programs, initial weights, comparison, tables."""

"""Cases, one file per theme."""

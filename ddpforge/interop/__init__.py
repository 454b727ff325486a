"""Models from and to elsewhere: export, programs, the hub, import, initial weights, other formats, tables."""

"""Run folders: their files, and functions that find and read them. Nothing here imports torch."""

"""The components that a recipe names: their kinds, the places where they are found, and their options."""

"""What a recipe names: the kinds of components, where they are found, and their options."""

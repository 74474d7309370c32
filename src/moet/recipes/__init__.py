"""Recipes: one YAML file a model × hardware, which `moet serve` takes in place of a model."""

from moet.recipes.recipe import Recipe, find_recipe, recipe_names

__all__ = ["Recipe", "find_recipe", "recipe_names"]

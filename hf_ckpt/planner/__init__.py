"""From costs and a budget to a plan."""

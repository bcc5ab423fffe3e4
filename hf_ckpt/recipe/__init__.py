"""A YAML file in, a frozen `Recipe` out. Knows neither torch nor data."""

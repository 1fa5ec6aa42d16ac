"""Finds mistakes that users do not notice. While a step is traced, each is refused or gives one warning."""

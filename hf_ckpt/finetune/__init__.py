"""A recipe carried out."""

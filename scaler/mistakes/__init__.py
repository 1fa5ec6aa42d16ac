"""What users do wrong without noticing, noticed: each is refused or said once, while a step is traced."""

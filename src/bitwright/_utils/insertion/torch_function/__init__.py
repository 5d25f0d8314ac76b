"""Names that coreai-opt keeps here, for code written for it."""

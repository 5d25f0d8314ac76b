"""Names that code written for coreai-opt's internals imports."""

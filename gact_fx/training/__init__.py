"""The life of one compiled model: profiled, rewritten by its plan, profiled again."""

"""Where the guard's state lives: Redis or Valkey behind a `Protocol` of a few verbs, or the reference in memory."""

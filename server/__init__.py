"""HTTP over charrm: routes, wire types and the one worker that owns the model."""

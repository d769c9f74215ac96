"""Who carries a scheme's requests: `ops` is the vocabulary, `c10d` and `lockstep` are the carriers."""

"""Who carries a scheme's requests: `ops` is the vocabulary, `engine` and `lockstep` are the carriers."""

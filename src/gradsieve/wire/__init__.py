"""How messages are laid out in bytes, and how a peer's message is checked."""

# Raised with every change after which ranks of both sides would misread each other's messages, or compute
# other bits from them.
VERSION = 3

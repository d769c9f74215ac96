"""What a training says about itself: startup log, metrics, diagnostics, records, sinks."""

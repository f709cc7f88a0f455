"""What every job needs around its work: threads, context, platform, provenance, artifacts."""

"""Where models come from: prefetch, the cache, loading."""

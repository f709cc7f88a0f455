"""Corpora: the fictional watch service, a user's own files, and the items that are asked."""

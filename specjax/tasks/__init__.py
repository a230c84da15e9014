"""Prompts to sample from, and what is measured on the answers."""

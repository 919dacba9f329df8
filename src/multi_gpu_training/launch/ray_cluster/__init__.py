"""Ranks on a Ray cluster. Only what runs there or starts something there imports ray."""

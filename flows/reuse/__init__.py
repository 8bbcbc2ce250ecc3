"""Finished work: which steps are finished, requests that need nothing else, reports that need not be written again."""
